"""Run one graph in ONNX Runtime on the CPU; also the session options and profiles that all its sessions share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.backends import MODEL, Artifact, PaddedSession, RunOptions, uniform_batch
from hasten.core.errors import StageError
from hasten.core.placement import OperatorPlacement
from hasten.core.tensors import Batch, IntArray, Layout, Outputs, SessionSpec, Shape, pad, unpad
from hasten.core.variant import CPU

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
TENSORRT_PROVIDER = "TensorrtExecutionProvider"
_ERRORS_ONLY = 3
_SMALL = Shape(1, 1)
# It would fuse norms with the additions before them into a kernel that is slower than the two.
_DISABLED_OPTIMIZERS = ["SkipLayerNormFusion"]


class CpuSession(PaddedSession):
    """A graph on the CPU execution provider."""

    def __init__(self, artifact: Artifact, options: RunOptions, profile_folder: str | None = None) -> None:
        import onnxruntime

        try:
            session = onnxruntime.InferenceSession(
                str(artifact.path(MODEL)),
                session_options(options.thread_count, profile_folder),
                providers=[CPU_PROVIDER],
                disabled_optimizers=_DISABLED_OPTIMIZERS,
            )
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error
        self.runtime: Any = session
        self._outputs = [spec.name for spec in artifact.signature.outputs]
        # The inputs of the graph file decide: a fused graph may take 32-bit ids, and unused inputs are pruned.
        self._feeds = {entry.name for entry in session.get_inputs()}
        # The precision was checked when the variant was made (stored_precision); the bundle's hashes protect it.
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, artifact.variant.precision)

    def close(self) -> None:
        self.runtime = None

    def release_memory(self, *, everything: bool = False) -> None:
        """Run a small batch: its end is when ONNX Runtime can return unused memory of its arena."""
        if self.runtime is None:
            return
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        try:
            self._run(pad(uniform_batch(_SMALL, self.spec.signature), self.spec.signature), options)
        except Exception as error:
            raise StageError(f"ONNX Runtime cannot release memory: {error}") from error

    def run_padded(self, batch: Batch) -> Outputs:
        if self.runtime is None:
            raise StageError("the session is closed")
        feeds = pad(batch, self.spec.signature)
        try:
            results = self._run(feeds)
        except Exception as error:
            raise StageError(f"ONNX Runtime failed on a batch of {len(batch)}: {error}") from error
        return unpad(dict(zip(self._outputs, results, strict=True)), batch, self.spec.signature)

    def _run(self, feeds: Mapping[str, IntArray], options: Any = None) -> list[Any]:
        results: list[Any] = self.runtime.run(
            self._outputs, {name: value for name, value in feeds.items() if name in self._feeds}, options
        )
        return results


def session_options(threads: int, profile_folder: str | None = None) -> Any:
    """Return ONNX Runtime's session options; with a folder, the session writes a profile to it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ERRORS_ONLY
    if profile_folder is not None:
        options.enable_profiling = True
        options.profile_file_prefix = f"{profile_folder}/profile"
    return options


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """A node that ran, and the execution provider that ran it."""

    node: str
    operator: str
    provider: str
    output_bytes: int = 0


def node_placements(session: Any) -> tuple[NodePlacement, ...]:
    """End profiling and return the placements of all nodes that ran."""
    suffix = "_kernel_time"
    events = json.loads(Path(session.end_profiling()).read_bytes())
    return tuple(
        NodePlacement(
            event["name"].removesuffix(suffix),
            event["args"]["op_name"],
            event["args"]["provider"],
            int(event["args"].get("output_size", 0)),
        )
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith(suffix)
    )


def count_placements(nodes: Sequence[NodePlacement]) -> tuple[OperatorPlacement, ...]:
    """Count nodes by operator and execution provider, the most frequent first."""
    counts = Counter((node.operator, node.provider) for node in nodes)
    return tuple(OperatorPlacement(operator, provider, count) for (operator, provider), count in counts.most_common())
