"""Compare default builds with exhaustive ones: time, peak memory, and the speed of the variant that each chooses.

    python benchmarks/quantization/search.py NAME=DIRECTORY[,DATA[,CALIBRATION]] … [--exhaustive] [-o FILE]

Each model is built by default, in a process of its own; with data, the gate allows a drop of half a point. With
`--exhaustive`, it is built once more with `--keep all`, which tries every variant, judges all of them on all rows and
stores those that pass. Then the variants that both builds choose are timed in alternating rounds at the optimal shape,
beside stock ONNX Runtime in fp32. Nothing else may run on the machine meanwhile.

    python benchmarks/quantization/search.py --families [--real-models MODELS DATA] -o FILE

compares both builds of MiniLM and of twelve small models of different families (`search_models.py`), and of fine-tuned
ones, with short budgets: at most 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from search_models import make_families, make_real

from alternating_rounds import time_alternating
from hasten.backends import Artifact
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.bundle import Bundle, open_bundle
from hasten.core.plan import Plan, Shapes
from hasten.core.tensors import Batch
from hasten.measure.bench import BUSY_SHARE
from hasten.metrics.statistics import median_ratio
from hasten.tasks import TASKS
from provenance import provenance
from stock_runtimes import export_stock, register

RESULTS = Path(__file__).parents[1] / "results" / "search.json"
STOCK, QUICK, EXHAUSTIVE = "plain_onnxruntime-fp32", "default", "exhaustive"
MAX_DROP = "0.5"


def main() -> None:
    """Read the options, make the models and study them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="NAME=DIRECTORY[,DATA[,CALIBRATION]]")
    parser.add_argument("--families", action="store_true", help="compare small models of different families")
    parser.add_argument("--real-models", nargs=2, type=Path, metavar=("MODELS", "DATA"), help="also fine-tuned ones")
    parser.add_argument("--bench-budget", default=None, help="the option of the builds")
    parser.add_argument("--exhaustive", action="store_true", help="also build with --keep all, and compare")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing per model")
    parser.add_argument("--runs", type=int, default=4, help="runs with fresh processes")
    parser.add_argument("--append", action="store_true", help="keep the rows of other models in the result file")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.families:
        args.exhaustive, args.budget, args.runs = True, min(args.budget, 8.0), min(args.runs, 2)
        args.bench_budget = args.bench_budget or "4s"
    register(is_dynamic=True)
    with tempfile.TemporaryDirectory(prefix="hasten-models-") as folder:
        if args.families:
            args.models += make_families(Path(folder))
        if args.real_models is not None:
            args.models += make_real(*args.real_models, Path(folder))
        run_studies(args)


def run_studies(args: argparse.Namespace) -> None:
    """Build and time each model; write the result file after each."""
    rows: dict[str, Any] = {}
    if args.append and args.output.exists():
        rows = msgspec.json.decode(args.output.read_bytes())["models"]
    for argument in args.models:
        name, _, files = argument.partition("=")
        with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
            rows[name] = study(files.split(","), Path(work), args)
        results = provenance() | {"options": {"exhaustive": args.exhaustive, "max_drop": MAX_DROP}, "models": rows}
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
        print(name, msgspec.json.format(msgspec.json.encode(rows[name]["summary"])).decode(), flush=True)


def study(files: list[str], work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Build a model once or twice, and time what was chosen."""
    options = ["--bench-budget", args.bench_budget] if args.bench_budget is not None else []
    builds = {QUICK: build(files, work / QUICK, options)}
    if args.exhaustive:
        builds[EXHAUSTIVE] = build(files, work / EXHAUSTIVE, [*options, "--keep", "all"])
    bundles = {kind: open_bundle(work / kind) for kind in builds}
    artifacts = {kind: chosen_artifact(bundle) for kind, bundle in bundles.items()}
    stock = stock_artifact(files[0], bundles[QUICK], work / "stock")
    # Equal variants are one contender.
    contenders = [stock, *{artifact.variant.name: artifact for artifact in artifacts.values()}.values()]
    task = TASKS.get(bundles[QUICK].manifest.task.name)
    batch = reference_batch(bundles[QUICK])
    commands = {STOCK: [sys.executable, str(Path(__file__).parents[1] / "stock_runtimes.py")]}
    times = time_alternating(contenders, Shapes().optimal, batch, args.budget, commands, args.runs)
    names = {kind: artifact.variant.name for kind, artifact in artifacts.items()}
    over_stock = {kind: median_ratio(times[STOCK], times[name]) for kind, name in names.items()}
    summary: dict[str, Any] = {
        "task": task.name,
        "chosen": names,
        "seconds": {kind: each["seconds"] for kind, each in builds.items()},
        "peak_memory_bytes": {kind: each["peak_memory_bytes"] for kind, each in builds.items()},
        "over_stock": over_stock,
    }
    if args.exhaustive:
        quick, exhaustive = names[QUICK], names[EXHAUSTIVE]
        summary["quick_over_exhaustive"] = median_ratio(times[exhaustive], times[quick])
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {"summary": summary, "builds": builds, "p50_ms": medians}


def build(files: list[str], target: Path, options: list[str]) -> dict[str, Any]:
    """Build a model on the command line; return time, peak memory, stages and candidates."""
    model, *data = files
    command = [sys.executable, "-m", "hasten", "build", model, "-o", str(target), "--quiet", *options]
    if data:
        command += ["--data", data[0], "--max-drop", MAX_DROP]
    if len(data) > 1:
        command += ["--calibration", data[1]]
    before, begin = os.times(), time.perf_counter()
    # The peak of all children so far would hide that of a smaller model: measure it in a process that has no others.
    script = f"import resource, subprocess, sys; code = subprocess.call({command!r}, stdout=subprocess.DEVNULL); "
    script += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    printed = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, after = time.perf_counter() - begin, os.times()
    report = open_bundle(target).report
    return {
        "seconds": seconds,
        "cpu_s": sum(after[2:4]) - sum(before[2:4]),
        "peak_memory_bytes": int(printed) * (1 if sys.platform == "darwin" else 1024),
        "stages": {stage.name: stage.seconds for stage in report.stages},
        "stage_peak_memory_bytes": {stage.name: stage.peak_memory_bytes for stage in report.stages},
        "chosen": report.chosen,
        "candidates": report.candidates,
        "timings": report.bench.at(report.plan.shapes.optimal),
        "is_disturbed": (report.bench.other_cpu_share or 0.0) > BUSY_SHARE,
    }


def chosen_artifact(bundle: Bundle) -> Artifact:
    """Return the fastest variant of a bundle."""
    return bundle.artifact(bundle.manifest.variants[0])


def stock_artifact(model: str, bundle: Bundle, folder: Path) -> Artifact:
    """Export the model as tutorials do."""
    plan = Plan(model, task=bundle.manifest.task.name)
    return export_stock(load_model(find_model(plan), plan), folder)


def reference_batch(bundle: Bundle) -> Batch:
    """Return the rows that the build judged, as token ids."""
    spec = bundle.manifest.task
    task = TASKS.get(spec.name)
    return task.encode(task.parse(list(bundle.reference().rows)), bundle.tokenizer(), task.options(spec, {})).batch


if __name__ == "__main__":
    main()
