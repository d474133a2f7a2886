"""What the exact passes gain: a fine-tuned SST-2 model, whole and pruned, on ONNX Runtime and on OpenVINO.

    python benchmarks/pruning.py --models DIR --data DIR     # DIR with assemble.py, DIR with sst2_validation.jsonl

Nothing else may run on the machine meanwhile. Contenders alternate, each in its own process; ratios are what counts.
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

from by_hand import export_plainly
from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.builder.export import export
from hasten.builder.load import load_model
from hasten.builder.passes import apply_passes
from hasten.builder.source import find_model
from hasten.builder.tokenizer import save_tokenizer
from hasten.core.hardware import this_machine
from hasten.core.plan import Plan
from hasten.core.statistics import median_ratio
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.measure.data import read_rows
from hasten.predictor import Predictor
from hasten.tasks import TASKS
from origin import origin
from race import RUNS, SHAPES, race

HERE = Path(__file__).parent
PLAIN = "plain_onnxruntime-fp32"
HALVES = (Precision.BF16, Precision.FP16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="directory with assemble.py")
    parser.add_argument("--data", type=Path, required=True, help="directory with sst2_validation.jsonl")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds a shape")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "pruning.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
        results = study(Path(work), args.models, read_rows(args.data / "sst2_validation.jsonl"), args.budget)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def study(folder: Path, models: Path, rows: Any, budget_s: float) -> dict[str, Any]:
    subprocess.run([sys.executable, str(models / "assemble.py"), "sst2", str(folder / "model")], check=True)
    plan = Plan(str(folder / "model"))
    loaded = load_model(find_model(plan), plan)
    save_tokenizer(loaded, folder / "tokenizer.json")
    tokenizer = Tokenizer.open(folder / "tokenizer.json", loaded.tokenizer)
    contenders = make_contenders(loaded, folder)
    answers = {name: accuracy(artifact, loaded, tokenizer, rows) for name, artifact in contenders.items()}
    task = TASKS.get(loaded.task.name)
    batch = task.encode(task.parse(rows), tokenizer, task.options(loaded.task, {})).batch
    commands = {name: [sys.executable, str(HERE / "by_hand.py")] for name in contenders}
    races = []
    for shape in SHAPES:
        medians = race(list(contenders.values()), shape, batch, budget_s, commands)
        races.append(
            {
                "shape": str(shape),
                "runs": RUNS,
                "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
                "over_plain": {name: median_ratio(medians[PLAIN], times) for name, times in medians.items()},
                "pruned_over_whole": {
                    name: median_ratio(medians[f"whole_{name}"], medians[name])
                    for name in medians
                    if f"whole_{name}" in medians
                },
                "round_medians_ms": {name: times.tolist() for name, times in medians.items()},
            }
        )
    return {
        **origin(),
        "speed": races,
        "answers": answers,
    }


def make_contenders(loaded: Any, folder: Path) -> dict[str, Artifact]:
    """By hand, with everything but the pruning, and as a build makes it."""
    exported = folder / "exported.onnx"
    export(loaded, exported)
    (folder / "passes").mkdir()
    graphs = apply_passes(exported, folder / "passes", loaded.config, external_data=False)
    whole = folder / "passes" / "whole" / exported.name
    made = [export_plainly(loaded, folder / "plain")]
    ways = [("onnxruntime", Precision.FP32, graphs.fused, whole)]
    ways += [
        ("openvino", half, graphs.plain, folder / "passes" / "folded" / exported.name)
        for half in HALVES
        if BACKENDS.get("openvino").probe(this_machine(), Variant("openvino", half)).ok
    ]
    for name, precision, pruned, unpruned in ways:
        for prefix, graph in (("", pruned), ("whole_", unpruned)):
            variant = Variant(name, precision)
            target = folder / f"{prefix}{variant.name}"
            target.mkdir()
            artifact = BACKENDS.get(name).make(Source(loaded.signature, {MODEL: graph}), variant, target)
            made.append(replace(artifact, variant=Variant(f"{prefix}{name}", precision)))
    return {artifact.variant.name: artifact for artifact in made}


def accuracy(artifact: Artifact, loaded: Any, tokenizer: Tokenizer, rows: Any) -> dict[str, Any]:
    """On the labelled rows, and how far from PyTorch."""
    from hasten.backends.torch import ModuleSession

    name = artifact.variant.backend.split("_")[-1]
    artifact = replace(artifact, variant=Variant(name, artifact.variant.precision))
    original = ModuleSession(loaded.module, artifact, RunOptions())
    with BACKENDS.get(name).open(artifact, RunOptions()) as own:
        predictor, reference = (Predictor(loaded.task, tokenizer, session) for session in (own, original))
        encoded, spec = predictor.encode(rows), loaded.task
        ours, theirs = predictor.outputs(encoded), reference.outputs(encoded)
        marks = predictor.task.marks(ours, encoded, predictor.task.gold(rows, spec), spec)
        metric = predictor.task.metric(marks, spec)
        agreement = predictor.task.agree(ours, theirs, encoded, spec)
    return {"accuracy": metric.value, "flips": agreement.flips, "max_error": agreement.max_error, "rows": metric.rows}


def report(results: dict[str, Any]) -> None:
    for row in results["speed"]:
        for name, time in row["p50_ms"].items():
            over = row["pruned_over_whole"].get(name)
            note = f", {_interval(over)} of it whole" if over else ""
            print(f"{row['shape']:>6} {name:<24} {time:8.2f} ms  {_interval(row['over_plain'][name])} of plain{note}")
    for name, answer in results["answers"].items():
        print(name, answer)


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


if __name__ == "__main__":
    main()
