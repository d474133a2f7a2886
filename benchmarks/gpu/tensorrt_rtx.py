"""Build engines of all architectures with TensorRT for RTX: test which graphs NVIDIA's parser and builder take.

    python benchmarks/gpu/tensorrt_rtx.py [--jobs N] [-o FILE]      # all; writes results/tensorrt_rtx.json
    python benchmarks/gpu/tensorrt_rtx.py bert xlnet                # these only; prints the results

Needs the extra `tensorrt-rtx`. Parsing and building need no GPU. On a GPU that the runtime supports, each engine also
runs, and its outputs are compared with PyTorch's; elsewhere the result file has the runtime's reason. Models are made
from configs and have random weights: tiny ones of all architectures, and two of the usual sizes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import transformers

sys.path += [str(Path(__file__).parents[2] / name) for name in ("benchmarks", "tests")]

from hasten.backends import BACKENDS, RunOptions
from hasten.backends.tensorrt.engine import build, infer, load_engine
from hasten.backends.tensorrt.engine_spec import EngineSpec, profiles
from hasten.backends.tensorrt.library import TENSORRT_RTX
from hasten.backends.tensorrt.typed_graph import write_typed
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_plain
from hasten.builder.search.qdq_module import FP16_SCALES, calibrate_module, export_quantized
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import LoadedModel, load_model
from hasten.builder.sources.quiet import quiet_libraries
from hasten.core.errors import HastenError, StageError, UnsupportedError
from hasten.core.plan import Plan, Shapes
from hasten.core.system.hardware import this_machine, usable_cores
from hasten.core.tensors import Batch, Outputs, pad, unpad
from hasten.core.variant import Precision
from hasten.quantize.analysis.calibration import Calibration
from provenance import provenance
from support.models import tiny_encoders

FILE = Path(__file__).parents[1] / "results" / "tensorrt_rtx.json"
PRECISIONS = (Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.FP8)
QUANTIZED = (Precision.INT8, Precision.FP8)
# The heads: outputs per row and per token, and embeddings pooled in the graph.
TASKS = {
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "sentence-similarity": "Model",
}
# The usual sizes, beside the tiny models of all architectures.
_BERT = {"vocab_size": 30522, "initializer_range": 0.02, "num_attention_heads": 12}
SIZES = {
    "MiniLM-L6": {**_BERT, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    "BERT-base": {**_BERT, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
}
# Smaller weights than those of tests, which amplify rounding errors.
TINY = {"initializer_range": 0.2}
POSITIONS = 192
SHAPES = Shapes()
TIMEOUT_S = 900
MAX_REASON_CHARS = 400
CRASH = "the process crashed while it was built or loaded"
# The norm of the error over the norm of the output: above rounding errors, below a defect such as a lost mask.
MAX_ERROR = dict.fromkeys(QUANTIZED, 0.4) | {Precision.FP32: 1e-4, Precision.FP16: 2e-2, Precision.BF16: 1e-1}


@dataclass
class Engine:
    """The result of one precision: the engine, and the first step that failed."""

    seconds: float = 0.0
    engine_bytes: int = 0
    failure: str = ""
    # The runtime's reason for rejecting the engine, or the error of its outputs relative to PyTorch's.
    rejection: str = ""
    relative_error: float | None = None


@dataclass
class Entry:
    """The results of an architecture by task and precision, or the reason why it has no graph."""

    engines: dict[str, dict[str, Engine]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Build all engines and write the result file."""
    names = [*SIZES, *tiny_encoders.ARCHITECTURES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes (default: one per core)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=FILE)
    args = parser.parse_args()
    if args.worker:
        study(args.architectures[0], args.output)
        return
    start, studied = time.monotonic(), args.architectures or names
    # A process each: a crash of a native library is a result of its architecture.
    with ThreadPoolExecutor(args.jobs) as pool:
        entries = dict(zip(studied, pool.map(study_in_process, studied), strict=True))
    for name, entry in entries.items():
        for line in describe(entry):
            print(f"{name:22}{line}")
    summary = summarize(entries)
    print(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    if args.architectures:
        return
    results = {
        **provenance(),
        "versions": versions(),
        "jobs": args.jobs,
        "seconds": round(time.monotonic() - start, 1),
        "profiles": [
            " to ".join(f"{shape.batch}×{shape.sequence}" for shape in (profile.min, profile.opt, profile.max))
            for profile in profiles(SHAPES, POSITIONS)
        ],
        "summary": summary,
        "architectures": entries,
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def versions() -> dict[str, str]:
    """Return the versions of the libraries that make and take the graphs."""
    import onnx
    import torch

    libraries = {"torch": torch, "onnx": onnx, "transformers": transformers}
    found = {name: str(library.__version__) for name, library in libraries.items()}
    return found | {TENSORRT_RTX.name: str(TENSORRT_RTX.load().__version__)}


def study_in_process(architecture: str) -> Entry:
    """Run the study of one architecture in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "entry.json"
        command = [sys.executable, __file__, "--worker", architecture, "-o", str(file)]
        before, results = None, b""
        # After a crash, the next process continues with the next engine.
        while results != before:
            try:
                done = subprocess.run(command, capture_output=True, env=environment, timeout=TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                return Entry(failures=dict.fromkeys(TASKS, f"no result after {TIMEOUT_S} s"))
            before, results = results, file.read_bytes() if file.exists() else b""
            if done.returncode == 0:
                print(f"{architecture} is done", file=sys.stderr, flush=True)
                return msgspec.json.decode(results, type=Entry)
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        reason = shorten(f"the process ended with {done.returncode}: {' '.join(last)}")
        return Entry(failures=dict.fromkeys(TASKS, reason))


def study(architecture: str, file: Path) -> None:
    """Build the engines of all tasks and precisions that `file` has no result of, and write the results to it."""
    entry = msgspec.json.decode(file.read_bytes(), type=Entry) if file.exists() else Entry()
    for task, head in TASKS.items():
        engines = entry.engines.get(task, {})
        remaining = [precision for precision in PRECISIONS if precision.value not in engines]
        if task in entry.failures or not remaining:
            continue
        with tempfile.TemporaryDirectory() as work, quiet_libraries():
            try:
                loaded = load(architecture, head, task, Path(work) / "model")
                exported = Path(work) / "model.onnx"
                export(loaded, exported)
                _, plain, _ = apply_plain(exported, Path(work), variants=())
                reference = answer_in_pytorch(loaded, Path(work))
            except HastenError as error:
                entry.failures[task] = shorten(error.message)
                continue
            entry.engines[task] = engines
            for precision in remaining:
                engines[precision.value] = Engine(failure=CRASH)
                file.write_bytes(msgspec.json.encode(entry))
                folder = Path(work) / precision.value
                engines[precision.value] = make_engine(loaded, plain, precision, reference, folder)
    file.write_bytes(msgspec.json.encode(entry))


def load(architecture: str, head: str, task: str, folder: Path) -> LoadedModel:
    """Make a model and load it as a build does."""
    config: dict[str, Any] = SIZES.get(architecture, TINY)
    name = "bert" if architecture in SIZES else architecture
    prefix = tiny_encoders.ARCHITECTURES[name].prefix
    if not hasattr(transformers, f"{prefix}{head}"):
        raise UnsupportedError(f"transformers has no {prefix}{head}")
    sizes = {"positions": POSITIONS, "tokenizer_max_length": POSITIONS}
    tiny_encoders.save(name, head, folder, **config, **sizes)
    plan = Plan(str(folder), task=task, pooling="mean" if head == "Model" else None)
    return load_model(find_model(plan), plan)


def make_engine(loaded: LoadedModel, plain: Path, precision: Precision, reference: Outputs, folder: Path) -> Engine:
    """Build an engine from the typed graph, and run it if the runtime takes it."""
    folder.mkdir()
    graph, plan, engine = folder / "typed.onnx", folder / "model.plan", Engine()
    try:
        source = quantized_graph(loaded, precision, folder) if precision in QUANTIZED else plain
        typed_precision = write_typed(source, graph, precision)
        if typed_precision is not precision:
            raise StageError(f"the matmuls of the graph are in {typed_precision}")
        start = time.perf_counter()
        build(TENSORRT_RTX, graph, loaded.signature, EngineSpec(profiles(SHAPES, loaded.signature.max_length)), plan)
        engine.seconds, engine.engine_bytes = round(time.perf_counter() - start, 2), plan.stat().st_size
    except HastenError as error:
        engine.failure = shorten(error.message)
        return engine
    try:
        outputs = answer_by_engine(plan, loaded)
    except HastenError as error:
        engine.rejection = shorten(error.message)
        return engine
    engine.relative_error = max(relative_error(outputs[name], reference[name]) for name in reference)
    if not engine.relative_error <= MAX_ERROR[precision]:
        engine.failure = f"its outputs differ from PyTorch's by {engine.relative_error:.2g}"
    return engine


def quantized_graph(loaded: LoadedModel, precision: Precision, folder: Path) -> Path:
    """Export the model with quantizers, as a build of `tensorrt-int8+qdq@cuda` does."""
    exported = folder / "model.onnx"
    module = calibrate_module(loaded, Calibration(sample_batch(loaded), loaded.signature), precision)
    export_quantized(loaded, module, exported, FP16_SCALES)
    return apply_plain(exported, folder, variants=())[1]


def sample_batch(loaded: LoadedModel) -> Batch:
    """Return rows of random tokens and of several lengths."""
    lengths, draw = np.array([7, 64, 23, 120], np.int32), np.random.default_rng(0)
    values = {spec.name: np.zeros(lengths.sum(), np.int32) for spec in loaded.signature.inputs}
    values["input_ids"] = draw.integers(5, 60, lengths.sum()).astype(np.int32)
    return Batch(values, lengths)


def answer_in_pytorch(loaded: LoadedModel, folder: Path) -> Outputs:
    """Return PyTorch's outputs in fp32."""
    backend = BACKENDS.get(loaded.baseline.backend)
    with backend.open(backend.make(loaded.source, loaded.baseline, folder), RunOptions(1)) as session:
        return session.run(sample_batch(loaded))


def answer_by_engine(plan: Path, loaded: LoadedModel) -> Outputs:
    """Load an engine and return its outputs."""
    batch, signature = sample_batch(loaded), loaded.signature
    with load_engine(plan, TENSORRT_RTX) as engine:
        return unpad(infer(engine, pad(batch, signature)), batch, signature)


def relative_error(ours: Any, theirs: Any) -> float:
    """Return the norm of the error over the norm of the output."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def shorten(reason: str) -> str:
    """Return a reason in one line, without the folders of this machine."""
    words = ["the model" if word.startswith(tempfile.gettempdir()) else word for word in reason.split()]
    words = [word for word in words if not word.startswith("(/")]
    line = " ".join(words)
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}…"


def describe(entry: Entry) -> list[str]:
    """Return a line per task and failure."""
    lines = [f"{task}: no graph: {reason}" for task, reason in entry.failures.items()]
    for task, engines in entry.engines.items():
        built = [
            f"{name} {e.seconds:.1f} s {e.engine_bytes / 2**20:.1f} MiB" for name, e in engines.items() if e.seconds
        ]
        lines.append(f"{task}: {', '.join(built) or 'no engine'}")
        lines += [f"{task}: {name} failed: {e.failure}" for name, e in engines.items() if e.failure]
    return lines


def summarize(entries: dict[str, Entry]) -> dict[str, Any]:
    """Return the number of engines that were built and run, the failures, and the runtime's reasons."""
    engines = [engine for entry in entries.values() for task in entry.engines.values() for engine in task.values()]
    rejections = {engine.rejection for engine in engines if engine.rejection}
    return {
        "gpu": [gpu.name for gpu in this_machine().gpus],
        "graphs": len(engines),
        "built": sum(bool(engine.seconds) for engine in engines),
        "run": sum(engine.relative_error is not None for engine in engines),
        "failed": sum(bool(engine.failure) for engine in engines),
        "runtime": sorted(rejections)[:3],
    }


if __name__ == "__main__":
    main()
