"""Measure time and peak memory of a sparse encoder's graph by the number of terms that it computes at a time.

    python benchmarks/cpu/vocabulary_blocks.py MODEL

MODEL is a sparse encoder or a masked language model. Each graph runs in a process of its own, in alternating rounds,
with two threads; the first round compares the outputs. Peak memory is what a batch adds to the loaded model. Nothing
else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
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
SHAPES = ((1, 16), (1, 128), (8, 384))
# None is the whole vocabulary.
BLOCKS = (2048, 4096, 8192, 16384, None)
ROUNDS = 3
RUNS = {(1, 16): 30, (1, 128): 10, (8, 384): 2}


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--graph", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.graph is not None:
        print(json.dumps(measure(args.graph)))
        return
    with tempfile.TemporaryDirectory() as work:
        graphs = {block: make_graph(args.model, block, Path(work) / str(block)) for block in BLOCKS}
        rounds: dict[int | None, list[Any]] = {block: [] for block in BLOCKS}
        for _ in range(ROUNDS):
            for block, graph in graphs.items():
                command = [sys.executable, __file__, args.model, "--graph", str(graph)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                rounds[block].append(json.loads(done.stdout))
    checksums = {block: runs[0]["checksum"] for block, runs in rounds.items()}
    np.testing.assert_allclose(list(checksums.values()), checksums[None], rtol=1e-5)
    rows = [
        {
            "terms": block,
            "batch": batch,
            "tokens": tokens,
            "p50_ms": round(float(np.median([run["p50_ms"][index] for run in runs])), 2),
            "memory_mb": round(float(np.median([run["memory_mb"][index] for run in runs]))),
        }
        for block, runs in rounds.items()
        for index, (batch, tokens) in enumerate(SHAPES)
    ]
    for row in rows:
        print(row)
    results = {**provenance(), "model": Path(args.model).name, "threads": 2, "rounds": ROUNDS, "rows": rows}
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
    """Return the median time of each shape and the memory it adds, the smallest shape first."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    random, loaded = np.random.default_rng(0), peak_mb()
    times: list[float] = []
    memory: list[float] = []
    checksum = 0.0
    for shape in SHAPES:
        feeds = {
            spec.name: random.integers(1000, 20000, shape, np.int32)
            if spec.name == "input_ids"
            else np.ones(shape, np.int32)
            for spec in session.get_inputs()
        }
        checksum += float(session.run(None, feeds)[0].sum())
        durations = []
        for _ in range(RUNS[shape]):
            begin = time.perf_counter()
            session.run(None, feeds)
            durations.append(1e3 * (time.perf_counter() - begin))
        times.append(float(np.median(durations)))
        memory.append(peak_mb() - loaded)
    return {"p50_ms": times, "memory_mb": memory, "checksum": checksum}


def peak_mb() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
