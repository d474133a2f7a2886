"""Measure the exact passes: a fine-tuned SST-2 model with and without pruning, on ONNX Runtime and OpenVINO.

    python benchmarks/cpu/pruning.py --models DIR --data DIR     # DIR with assemble.py, DIR with sst2_validation.jsonl

Contenders alternate, each in its own process; compare ratios, not times. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from alternating_rounds import RUNS, SHAPES, time_alternating
from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.builder.export.encoder import export
from hasten.builder.passes.pipeline import apply_passes
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.builder.sources.tokenizer import save_tokenizer
from hasten.core.plan import Plan
from hasten.core.system.hardware import this_machine
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.measure.data import read_rows
from hasten.metrics.statistics import median_ratio
from hasten.predictor import Predictor
from hasten.tasks import TASKS
from provenance import provenance
from stock_runtimes import export_stock

BENCHMARKS = Path(__file__).parents[1]
STOCK = "plain_onnxruntime-fp32"
HALF_PRECISIONS = (Precision.BF16, Precision.FP16)


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="directory with assemble.py")
    parser.add_argument("--data", type=Path, required=True, help="directory with sst2_validation.jsonl")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing per shape")
    parser.add_argument("-o", "--output", type=Path, default=BENCHMARKS / "results" / "pruning.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
        results = study(Path(work), args.models, read_rows(args.data / "sst2_validation.jsonl"), args.budget)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def study(folder: Path, models: Path, rows: Any, budget_s: float) -> dict[str, Any]:
    """Return accuracy and speed of all contenders."""
    subprocess.run([sys.executable, str(models / "assemble.py"), "sst2", str(folder / "model")], check=True)
    plan = Plan(str(folder / "model"))
    loaded = load_model(find_model(plan), plan)
    save_tokenizer(loaded.original_tokenizer, folder / "tokenizer.json")
    tokenizer = Tokenizer.open(folder / "tokenizer.json", loaded.tokenizer)
    contenders = make_contenders(loaded, folder)
    answers = {name: accuracy(artifact, loaded, tokenizer, rows) for name, artifact in contenders.items()}
    task = TASKS.get(loaded.task.name)
    batch = task.encode(task.parse(rows), tokenizer, task.options(loaded.task, {})).batch
    commands = {name: [sys.executable, str(BENCHMARKS / "stock_runtimes.py")] for name in contenders}
    speed = []
    for shape in SHAPES:
        medians = time_alternating(list(contenders.values()), shape, batch, budget_s, commands)
        speed.append(
            {
                "shape": str(shape),
                "runs": RUNS,
                "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
                "over_plain": {name: median_ratio(medians[STOCK], times) for name, times in medians.items()},
                "pruned_over_whole": {
                    name: median_ratio(medians[f"whole_{name}"], medians[name])
                    for name in medians
                    if f"whole_{name}" in medians
                },
                "round_medians_ms": {name: times.tolist() for name, times in medians.items()},
            }
        )
    return {**provenance(), "speed": speed, "answers": answers}


def make_contenders(loaded: Any, folder: Path) -> dict[str, Artifact]:
    """Make the stock export and, per backend, the graph with all passes and the one without pruning."""
    exported = folder / "exported.onnx"
    export(loaded, exported)
    (folder / "passes").mkdir()
    graphs = apply_passes(exported, folder / "passes", loaded.config)
    unpruned_fused = folder / "passes" / "whole" / exported.name
    unpruned_plain = folder / "passes" / "folded" / exported.name
    artifacts = [export_stock(loaded, folder / "plain")]
    pairs = [("onnxruntime", Precision.FP32, graphs.fused, unpruned_fused)]
    pairs += [
        ("openvino", precision, graphs.plain, unpruned_plain)
        for precision in HALF_PRECISIONS
        if BACKENDS.get("openvino").probe(this_machine(), Variant("openvino", precision)).ok
    ]
    for name, precision, pruned, unpruned in pairs:
        for prefix, graph in (("", pruned), ("whole_", unpruned)):
            variant = Variant(name, precision)
            target = folder / f"{prefix}{variant.name}"
            target.mkdir()
            artifact = BACKENDS.get(name).make(Source(loaded.signature, {MODEL: graph}), variant, target)
            artifacts.append(replace(artifact, variant=Variant(f"{prefix}{name}", precision)))
    return {artifact.variant.name: artifact for artifact in artifacts}


def accuracy(artifact: Artifact, loaded: Any, tokenizer: Tokenizer, rows: Any) -> dict[str, Any]:
    """Return the accuracy on labelled rows and the difference from PyTorch."""
    from hasten.backends.torch import ModuleSession

    name = artifact.variant.backend.split("_")[-1]
    artifact = replace(artifact, variant=Variant(name, artifact.variant.precision))
    torch_session = ModuleSession(loaded.module, artifact, RunOptions())
    with BACKENDS.get(name).open(artifact, RunOptions()) as session:
        predictor, reference = (Predictor(loaded.task, tokenizer, each) for each in (session, torch_session))
        encoded, spec = predictor.encode(rows), loaded.task
        ours, theirs = predictor.outputs(encoded), reference.outputs(encoded)
        item_scores = predictor.task.item_scores(ours, encoded, predictor.task.gold(rows, spec), spec)
        metric = predictor.task.metric(item_scores, spec)
        agreement = predictor.task.agree(ours, theirs, encoded, spec)
    return {"accuracy": metric.value, "flips": agreement.flips, "max_error": agreement.max_error, "rows": metric.rows}


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results."""
    for row in results["speed"]:
        for name, time in row["p50_ms"].items():
            gain = row["pruned_over_whole"].get(name)
            note = f", {_interval(gain)} of unpruned" if gain else ""
            print(f"{row['shape']:>6} {name:<24} {time:8.2f} ms  {_interval(row['over_plain'][name])} of stock{note}")
    for name, answer in results["answers"].items():
        print(name, answer)


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


if __name__ == "__main__":
    main()
