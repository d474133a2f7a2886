"""One graph in ONNX Runtime on the CPU, and what every session of it shares: settings, and who executed what."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.backends import MODEL, Artifact, PaddedSession, RunOptions
from hasten.core.errors import StageError
from hasten.core.execution import Execution
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import CPU

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
TENSORRT_PROVIDER = "TensorrtExecutionProvider"
_ERRORS_ONLY = 3
# It would put norms back together with the additions before them, into a kernel that is slower than the two.
_UNWANTED = ["SkipLayerNormFusion"]


class CpuSession(PaddedSession):
    def __init__(self, artifact: Artifact, options: RunOptions, profile: str | None = None) -> None:
        import onnxruntime

        try:
            session = onnxruntime.InferenceSession(
                str(artifact.path(MODEL)),
                settings(options.thread_count, profile),
                providers=[CPU_PROVIDER],
                disabled_optimizers=_UNWANTED,
            )
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime cannot load {artifact.variant}: {error}") from error
        self.runtime: Any = session
        self._outputs = [spec.name for spec in artifact.signature.outputs]
        # What the graph file says it takes decides, since a fused graph may take 32-bit ids.
        self._feeds = {entry.name for entry in session.get_inputs()}
        # Proven when it was made (stored_precision); the bundle's hashes keep it so.
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, artifact.variant.precision)

    def close(self) -> None:
        self.runtime = None

    def run_padded(self, batch: Batch) -> Outputs:
        if self.runtime is None:
            raise StageError("the session is closed")
        feeds = pad(batch, self.spec.signature)
        try:
            results = self.runtime.run(
                self._outputs, {name: value for name, value in feeds.items() if name in self._feeds}
            )
        except Exception as error:
            raise StageError(f"ONNX Runtime failed on a batch of {len(batch)}: {error}") from error
        return unpad(dict(zip(self._outputs, results, strict=True)), batch, self.spec.signature)


def settings(threads: int, profile: str | None = None) -> Any:
    import onnxruntime

    made = onnxruntime.SessionOptions()
    made.intra_op_num_threads = threads
    made.inter_op_num_threads = 1
    made.log_severity_level = _ERRORS_ONLY
    if profile is not None:
        made.enable_profiling = True
        made.profile_file_prefix = f"{profile}/profile"
    return made


@dataclass(frozen=True, slots=True)
class Placement:
    """A node that ran, and who executed it."""

    node: str
    operator: str
    provider: str
    output_bytes: int = 0


def placements(session: Any) -> tuple[Placement, ...]:
    """As the profile of the one run says."""
    ending = "_kernel_time"
    events = json.loads(Path(session.end_profiling()).read_bytes())
    return tuple(
        Placement(
            event["name"].removesuffix(ending),
            event["args"]["op_name"],
            event["args"]["provider"],
            int(event["args"].get("output_size", 0)),
        )
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith(ending)
    )


def executed(ran: Sequence[Placement]) -> tuple[Execution, ...]:
    counts = Counter((placement.operator, placement.provider) for placement in ran)
    return tuple(Execution(operator, provider, count) for (operator, provider), count in counts.most_common())
