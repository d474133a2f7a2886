"""Test `hasten.build`: the bundle it writes, the data and the gate, and that failures leave nothing behind."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, Artifact
from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import AccuracyError, InputError, PlanError, StageError, UnsupportedError
from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Status
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Shape
from hasten.core.variant import Variant
from hasten.measure.encoder_gate import expect, verify

ORT_FP32 = "onnxruntime-fp32"


def stages(bundle: Bundle) -> dict[str, tuple[str, ...]]:
    return {stage.name: stage.notes for stage in bundle.report.stages}


# ---- the bundle


@pytest.fixture(scope="module")
def default(tiny_classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Build with the defaults: every variant of this machine, the built-in sample, a real but short benchmark."""
    target = tmp_path_factory.mktemp("default") / "bundle"
    return hasten.build(tiny_classifier("bert"), target, bench_budget_s=0.5, batch_size=(1, 2, 4), seq_len=(4, 8, 99))


def test_bundle_contains_the_files_of_its_manifest(default: Bundle) -> None:
    files = {file.relative_to(default.path).as_posix() for file in default.path.rglob("*") if file.is_file()}
    assert files == {"manifest.json", "report.html", *default.manifest.files}
    expected = ("graph/model.onnx", "report.json", "tokenizer/tokenizer.json", "reference/inputs.jsonl")
    assert files.issuperset({*expected, "reference/outputs.npz"})
    stored = {name.split("/")[1] for name in files if name.startswith("variants/")}
    assert stored == {entry.name for entry in default.manifest.variants}


def test_manifest_describes_model_and_variants(default: Bundle, tiny_classifier: Any) -> None:
    manifest = default.manifest
    assert manifest.model.id == str(tiny_classifier("bert"))
    assert manifest.model.architecture == "BertForSequenceClassification"
    assert manifest.task.name == "text-classification"
    assert manifest.task.labels == ("bad", "fair", "good")
    assert manifest.signature.max_length == 64
    assert manifest.machine == this_machine()
    assert len(manifest.variants) == 2
    for entry in manifest.variants:
        assert entry.name == entry.variant.name
        assert BACKENDS.get(entry.backend).is_stored
        assert entry.requires == BACKENDS.get(entry.backend).requires
        assert entry.agreement.rows > 300
    assert open_bundle(default.path).manifest == manifest


def test_report_names_every_candidate_with_a_reason(default: Bundle) -> None:
    report = default.report
    offered = {variant.name for backend in BACKENDS.all() for variant in backend.variants(this_machine())}
    assert offered <= {row.variant for row in report.candidates}
    assert all(row.reason for row in report.candidates)
    assert all(stage.seconds > 0 for stage in report.stages)
    judged = (Status.CHOSEN, Status.ELIGIBLE, Status.INACCURATE)
    assert all((row.verdict is not None) == (row.status in judged) for row in report.candidates)
    assert [row.variant for row in report.candidates if row.status is Status.BASELINE] == ["torch-fp32"]


def test_fastest_eligible_variant_is_chosen(default: Bundle) -> None:
    report = default.report
    timings = report.bench.at(Shape(2, 8))
    passed = {row.variant for row in report.candidates if row.status in (Status.CHOSEN, Status.ELIGIBLE)}
    passed -= {row.variant for row in report.candidates if row.reason.startswith("not timed")}
    stored = [name for name in passed if BACKENDS.get(Variant.parse(name).backend).is_stored]
    ranking = sorted(stored, key=lambda name: timings[name].p50_ms)
    assert [row.variant for row in report.candidates if row.status is Status.CHOSEN] == ranking[:1]
    assert [entry.name for entry in default.manifest.variants] == ranking[:2]
    assert report.chosen == default.chosen.name == ranking[0]
    # Variants that fail the gate are not timed.
    assert set(timings) == {*passed, "torch-fp32"}


def test_finalists_are_timed_at_every_supported_shape(default: Bundle) -> None:
    """A length beyond the model's is shortened with a note."""
    shapes = {timing.shape for timing in default.report.bench.timings if timing.variant == default.chosen.name}
    assert shapes == {Shape(2, 8), Shape(1, 4), Shape(1, 64), Shape(4, 4), Shape(4, 64)}
    assert any("64" in note for note in stages(default)["benchmark"])


def test_bundle_passes_its_own_checks(default: Bundle) -> None:
    open_bundle(default.path).check()


def test_reopened_bundle_verifies_again(default: Bundle) -> None:
    bundle = open_bundle(default.path)
    reference = bundle.reference()
    for entry in bundle.manifest.variants:
        with hasten.load(bundle.path, entry.name) as predictor:
            expected = expect(predictor, reference.rows, SilentProgress(), reference.outputs)
            verdict = verify(predictor, entry.name, expected, Gate(), SilentProgress())
        assert verdict.passed, verdict.reason
        assert verdict.agreement.rows == entry.agreement.rows


def test_every_graph_has_the_documented_opset_and_ir_version(tiny_classifier: Any, quick_build: Any) -> None:
    """Opset 17 and IR 8, in stored variants too: old runtimes load those, not the exported graph."""
    import onnx

    from hasten.builder.export.encoder import IR_VERSION, OPSET

    bundle = quick_build(
        tiny_classifier("bert"), variants=[ORT_FP32, "onnxruntime-int8"], keep="all", min_agreement=0.0
    )
    graphs = list(bundle.path.rglob("*.onnx"))
    assert len(graphs) == 3
    for file in graphs:
        model = onnx.load(file)
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET
        assert model.ir_version == IR_VERSION


def test_fastest_variant_and_the_next_are_stored(tiny_classifier: Any, quick_build: Any) -> None:
    speeds = {ORT_FP32: 3.0, "onnxruntime-int8": 2.0, "openvino-fp32": 1.0}
    built = partial(quick_build, tiny_classifier("bert"), variants=list(speeds), speeds=speeds, min_agreement=0.0)
    assert [entry.name for entry in built().manifest.variants] == ["openvino-fp32", "onnxruntime-int8"]
    every = built(keep="all")
    assert [entry.name for entry in every.manifest.variants] == ["openvino-fp32", "onnxruntime-int8", ORT_FP32]
    every.check()


def test_only_explicit_variants_are_built(tiny_classifier: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_classifier("bert"), variants=[ORT_FP32, ORT_FP32])
    assert [row.variant for row in bundle.report.candidates] == [ORT_FP32, "torch-fp32"]
    assert bundle.report.plan.variants == (ORT_FP32, ORT_FP32)


def test_default_output_is_the_cache(tiny_classifier: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hasten.builder.preflight import preview
    from hasten.core.plan import Plan

    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    outline = preview(Plan(model=str(tiny_classifier("bert"))))
    assert outline.target == tmp_path / "bundles" / tiny_classifier("bert").name
    assert not outline.target.exists()


def test_precision_restricts_the_search(tiny_classifier: Any) -> None:
    from hasten.builder.preflight import preview
    from hasten.core.plan import Plan

    plan = Plan(model=str(tiny_classifier("bert")), device="cpu", precision="int8")
    outline = preview(plan)
    tried = [Variant.parse(name) for name in (*outline.contenders, *outline.further)]
    assert {variant.precision for variant in tried} == {"int8"}
    assert "onnxruntime-int8+attention" in outline.further
    with pytest.raises(UnsupportedError, match="no variant for the cpu of this machine computes in fp8"):
        preview(replace(plan, precision="fp8"))


def test_force_replaces_a_bundle_and_nothing_else(tiny_classifier: Any, quick_build: Any, tmp_path: Path) -> None:
    model, target = tiny_classifier("bert"), tmp_path / "parent" / "bundle"
    first = quick_build(model, target, variants=[ORT_FP32])
    with pytest.raises(PlanError, match="already"):
        quick_build(model, target, variants=[ORT_FP32])
    second = quick_build(model, target, variants=["openvino-fp32"], force=True)
    assert second.chosen.name != first.chosen.name
    assert open_bundle(target).chosen.name == "openvino-fp32"
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]

    diary = tmp_path / "diary"
    diary.mkdir()
    (diary / "monday.txt").write_text("rain")
    with pytest.raises(PlanError, match="not empty"):
        quick_build(model, diary, variants=[ORT_FP32], force=True)
    assert (diary / "monday.txt").read_text() == "rain"


def test_artifact_size_is_the_size_of_its_files(default: Bundle) -> None:
    artifact: Artifact = default.artifact(default.chosen)
    listed = [name for name in default.manifest.files if name.startswith(f"variants/{default.chosen.name}/")]
    assert artifact.size_bytes == sum((default.path / name).stat().st_size for name in listed)


# ---- data and the gate


@pytest.fixture(scope="module")
def labelled(tiny_classifier: Any, corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts labelled by the model itself, so that the reference is right on all of them."""
    import transformers

    draw = np.random.default_rng(3)
    words = " ".join(corpus).split()
    texts = [" ".join(draw.choice(words, draw.integers(2, 12))) for _ in range(80)]
    answers = transformers.pipeline("text-classification", str(tiny_classifier("bert")), device="cpu")(texts)
    return write_rows(
        tmp_path_factory.mktemp("data") / "labelled.jsonl",
        [{"text": text, "label": answer["label"]} for text, answer in zip(texts, answers, strict=True)],
    )


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("max_drop", [0.0, 5.0, 100.0])
def test_labels_add_a_metric_to_the_gate(
    tiny_classifier: Any, quick_build: Any, labelled: Path, max_drop: float
) -> None:
    bundle = quick_build(
        tiny_classifier("bert"), variants=[ORT_FP32, "onnxruntime-int8"], data=labelled, max_drop=max_drop, keep="all"
    )
    rows = {row.variant: row for row in bundle.report.candidates}
    exact, reduced = rows[ORT_FP32].verdict, rows["onnxruntime-int8"].verdict
    assert exact.reference_metric.value == exact.metric.value == 1.0
    assert exact.metric.name == "accuracy"
    assert exact.metric.rows == 80
    assert bundle.manifest.gate.max_drop == max_drop
    assert {entry.name: entry.metric for entry in bundle.manifest.variants}[ORT_FP32] == exact.metric
    # How many labels int8 changes depends on the CPU; that the gate uses them does not.
    assert reduced.passed == (reduced.drop <= max_drop + 1e-9)
    assert "accuracy drop" in reduced.reason
    assert (rows["onnxruntime-int8"].status is Status.INACCURATE) == (not reduced.passed)


def test_metric_of_embeddings_is_spearman(
    tiny_embedder: Any, quick_build: Any, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    pairs = [{"text": corpus[0], "text_pair": text, "score": float(index)} for index, text in enumerate(corpus[1:])]
    bundle = quick_build(tiny_embedder(), variants=[ORT_FP32], data=write_rows(tmp_path / "pairs.jsonl", pairs))
    assert bundle.chosen.metric.name == "Spearman correlation"
    assert bundle.chosen.metric.rows == len(pairs)


def test_max_drop_needs_labels(tiny_classifier: Any, quick_build: Any, texts_file: Path, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="--max-drop needs labels"):
        quick_build(tiny_classifier("bert"), no_leftovers, data=texts_file, max_drop=1.0)
    with pytest.raises(PlanError, match="labelled data"):
        quick_build(tiny_classifier("bert"), no_leftovers, data=None, max_drop=1.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no data file"),
        ("", "no rows"),
        ('{"text": "a"}\nnot json\n', "line 2"),
        ('["a"]\n', "line 1"),
        ('{"text": "a", "label": "goood"}\n', "did you mean 'good'"),
        ('{"text": "a", "label": "good"}\n{"text": "b"}\n', "row 2"),
        ('{"label": "good"}\n', "text"),
        ('{"text": ""}\n', "empty"),
    ],
)
def test_bad_data_is_an_input_error(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        quick_build(tiny_classifier("bert"), no_leftovers, data=file)


def test_build_without_eligible_variant_is_an_accuracy_error(
    tiny_embedder: Any, quick_build: Any, no_leftovers: Path
) -> None:
    """Quantized weights never give exactly the same vectors."""
    with pytest.raises(AccuracyError) as caught:
        quick_build(tiny_embedder(), no_leftovers, variants=["onnxruntime-int8"], min_agreement=1.0)
    (rejected,) = caught.value.candidates
    assert caught.value.exit_code == 5
    assert rejected.variant == "onnxruntime-int8"
    assert rejected.status is Status.INACCURATE
    assert rejected.verdict.agreement.value < 1.0
    assert "mean cosine" in rejected.reason


# ---- interrupts


class Interrupter(SilentProgress):
    """A user who presses Ctrl-C at the start of a step or during it."""

    def __init__(self, step: str, *, at_start: bool) -> None:
        self.step, self.at_start, self.now = step, at_start, ""

    def start(self, what: str, total: float | None = None) -> None:
        self.now = what
        if what == self.step and self.at_start:
            raise KeyboardInterrupt

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        if self.now == self.step and not self.at_start:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "at_start"),
    [
        ("export", True),
        (f"verify {ORT_FP32}", False),
        pytest.param("start benchmark processes", False, marks=pytest.mark.slow),
        ("write", True),
    ],
)
def test_interrupt_leaves_nothing_behind(
    tiny_classifier: Any,
    quick_build: Any,
    texts_file: Path,
    no_leftovers: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    at_start: bool,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    build = hasten.build if "benchmark" in step else quick_build
    with pytest.raises(KeyboardInterrupt):
        build(
            tiny_classifier("bert"),
            no_leftovers,
            variants=[ORT_FP32],
            data=texts_file,
            progress=Interrupter(step, at_start=at_start),
        )
    assert bool(started) == ("benchmark" in step)
    assert all(process.poll() is not None for process in started)


def test_interrupt_while_replacing_keeps_the_old_bundle(
    tiny_classifier: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "parent" / "bundle"
    before = quick_build(tiny_classifier("bert"), target, variants=[ORT_FP32])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hasten.bundle.write.BundleWriter.add_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quick_build(tiny_classifier("bert"), target, variants=["openvino-fp32"], force=True)
    assert open_bundle(target).manifest == before.manifest
    open_bundle(target).check()
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]


@pytest.mark.slow
def test_failing_backend_is_recorded_unless_the_user_named_it(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageError("out of luck")

    monkeypatch.setattr(type(BACKENDS.get("openvino")), "make", fail)
    bundle = quick_build(tiny_classifier("bert"))
    failed = [row for row in bundle.report.candidates if row.status is Status.FAILED]
    assert {row.variant.split("-")[0] for row in failed} == {"openvino"}
    assert all(row.reason == "out of luck" for row in failed)
    with pytest.raises(StageError, match="out of luck"):
        quick_build(tiny_classifier("bert"), no_leftovers, variants=["openvino-fp32"])
