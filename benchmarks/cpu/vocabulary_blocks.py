"""Measure the peak memory of a sparse encoder's graph by the number of terms that it computes at a time.

    python benchmarks/cpu/vocabulary_blocks.py MODEL

MODEL is a sparse encoder or a masked language model. Each graph runs in a process of its own, with two threads; its
outputs are compared with those of the whole vocabulary. Peak memory is what batches up to a size add to the loaded
model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from hasten.backends import Dialect
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_passes
from hasten.builder.sources import export_wrapper
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.core.plan import Plan
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "vocabulary_blocks.json"
# From small to large, since a process reports its peak.
SHAPES = ((1, 16), (1, 128), (8, 128), (8, 384))
# None is the whole vocabulary.
BLOCKS = (4096, 16384, None)


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--graph", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.graph is not None:
        print(json.dumps(measure(args.graph)))
        return
    runs: dict[int | None, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for block in BLOCKS:
            graph = make_graph(args.model, block, Path(work) / str(block))
            command = [sys.executable, __file__, args.model, "--graph", str(graph)]
            runs[block] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            print(block, runs[block], flush=True)
    np.testing.assert_allclose([run["checksum"] for run in runs.values()], runs[None]["checksum"], rtol=1e-5)
    rows = [
        {"terms": block, "batch": batch, "tokens": tokens, "memory_mb": round(memory)}
        for block, run in runs.items()
        for (batch, tokens), memory in zip(SHAPES, run["memory_mb"], strict=True)
    ]
    results = {**provenance(), "model": Path(args.model).name, "threads": 2, "rows": rows}
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def make_graph(model: str, block: int | None, folder: Path) -> Path:
    """Return the graph that ONNX Runtime runs, with up to this number of terms in a block."""
    export_wrapper._BLOCK_TERMS = block or 2**31
    plan = Plan(model, task="sparse-embedding")
    loaded = load_model(find_model(plan), plan)
    folder.mkdir()
    export(loaded, folder / "model.onnx")
    return apply_passes(folder / "model.onnx", folder, loaded.config).by_dialect()[Dialect.ORT]


def measure(graph: Path) -> dict[str, Any]:
    """Return the memory that each shape adds to the loaded model, and the sum of all outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    random, loaded = np.random.default_rng(0), peak_mb()
    memory: list[float] = []
    checksum = 0.0
    for shape in SHAPES:
        ids = random.integers(1000, 20000, shape, np.int32)
        names = [spec.name for spec in session.get_inputs()]
        feeds = {name: ids if name == "input_ids" else np.ones(shape, np.int32) for name in names}
        checksum += float(session.run(None, feeds)[0].sum())
        memory.append(peak_mb() - loaded)
    return {"memory_mb": memory, "checksum": checksum}


def peak_mb() -> float:
    """Return the peak memory of this process since it began; getrusage would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


if __name__ == "__main__":
    main()
