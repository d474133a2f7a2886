"""`hasten.build` from a directory to a bundle: what it writes, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, Artifact, Dialect, RunOptions, Session, Source
from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import AccuracyError, HastenError, InputError, PlanError, StageError, UnsupportedError
from hasten.core.hardware import this_machine
from hasten.core.plan import Gate
from hasten.core.progress import Silent
from hasten.core.report import Status
from hasten.core.tensors import Batch, Outputs, Shape
from hasten.core.variant import Precision, Variant
from hasten.measure.verify import expect, verify

ARCHITECTURES = ("bert", "distilbert", "roberta", "electra")
ORT_FP32 = "onnxruntime-fp32"


@pytest.fixture
def no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where a failed build was to write; afterwards nothing may lie there, nor in the temporary directory."""
    place, temporary = tmp_path / "place", tmp_path / "temporary"
    place.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield place / "bundle"
    assert list(place.iterdir()) == []
    assert list(temporary.iterdir()) == []


def stages(bundle: Bundle) -> dict[str, tuple[str, ...]]:
    return {stage.name: stage.notes for stage in bundle.report.stages}


# ---- what a build writes


@pytest.fixture(scope="module")
def default(tiny_classifier: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Everything as it comes: every variant this machine has, the built-in sample, a real though short benchmark."""
    target = tmp_path_factory.mktemp("default") / "bundle"
    return hasten.build(tiny_classifier("bert"), target, bench_budget_s=0.5, batch_size=(1, 2, 4), seq_len=(4, 8, 99))


def test_layout(default: Bundle) -> None:
    found = {file.relative_to(default.path).as_posix() for file in default.path.rglob("*") if file.is_file()}
    assert found == {"manifest.json", *default.manifest.files}
    expected = ("graph/model.onnx", "report.json", "tokenizer/tokenizer.json", "reference/inputs.jsonl")
    assert found.issuperset({*expected, "reference/outputs.npz"})
    stored = {name.split("/")[1] for name in found if name.startswith("variants/")}
    assert stored == {entry.name for entry in default.manifest.variants}


def test_manifest(default: Bundle, tiny_classifier: Any) -> None:
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


def test_the_fastest_eligible_is_chosen(default: Bundle) -> None:
    report = default.report
    timings = report.bench.at(Shape(2, 8))
    passed = {row.variant for row in report.candidates if row.status in (Status.CHOSEN, Status.ELIGIBLE)}
    stored = [name for name in passed if BACKENDS.get(Variant.parse(name).backend).is_stored]
    ranking = sorted(stored, key=lambda name: timings[name].p50_ms)
    assert [row.variant for row in report.candidates if row.status is Status.CHOSEN] == ranking[:1]
    assert [entry.name for entry in default.manifest.variants] == ranking[:2]
    assert report.chosen == default.chosen.name == ranking[0]
    # What did not pass the gate was not timed.
    assert set(timings) == {*passed, "torch-fp32"}


def test_finalists_are_timed_at_every_shape_the_model_takes(default: Bundle) -> None:
    """A length beyond the model's is shortened, and said so."""
    shapes = {timing.shape for timing in default.report.bench.timings if timing.variant == default.chosen.name}
    assert shapes == {Shape(2, 8), Shape(1, 4), Shape(1, 64), Shape(4, 4), Shape(4, 64)}
    assert any("64" in note for note in stages(default)["benchmark"])


def test_a_bundle_passes_its_own_checks(default: Bundle) -> None:
    open_bundle(default.path).check()


def test_a_reopened_bundle_verifies_again(default: Bundle) -> None:
    bundle = open_bundle(default.path)
    reference = bundle.reference()
    for entry in bundle.manifest.variants:
        with hasten.load(bundle.path, entry.name) as predictor:
            expected = expect(predictor, reference.rows, Silent(), reference.outputs)
            verdict = verify(predictor, entry.name, expected, Gate(), Silent())
        assert verdict.passed, verdict.reason
        assert verdict.agreement.rows == entry.agreement.rows


def test_every_graph_is_as_old_as_promised(tiny_classifier: Any, quick_build: Any) -> None:
    """Opset 17 and IR 8, in what is stored too: an old runtime reads the variants, not the graph they came from."""
    import onnx

    from hasten.builder.export import IR_VERSION, OPSET

    bundle = quick_build(
        tiny_classifier("bert"), variants=[ORT_FP32, "onnxruntime-int8"], keep="all", min_agreement=0.0
    )
    graphs = list(bundle.path.rglob("*.onnx"))
    assert len(graphs) == 3
    for file in graphs:
        model = onnx.load(file)
        assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET
        assert model.ir_version == IR_VERSION


def test_speed_decides_and_the_next_is_kept(tiny_classifier: Any, quick_build: Any) -> None:
    speeds = {ORT_FP32: 3.0, "onnxruntime-int8": 2.0, "openvino-fp32": 1.0}
    built = partial(quick_build, tiny_classifier("bert"), variants=list(speeds), speeds=speeds, min_agreement=0.0)
    assert [entry.name for entry in built().manifest.variants] == ["openvino-fp32", "onnxruntime-int8"]
    every = built(keep="all")
    assert [entry.name for entry in every.manifest.variants] == ["openvino-fp32", "onnxruntime-int8", ORT_FP32]
    every.check()


def test_explicit_variants_are_the_only_ones(tiny_classifier: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_classifier("bert"), variants=[ORT_FP32, ORT_FP32])
    assert [row.variant for row in bundle.report.candidates] == [ORT_FP32, "torch-fp32"]
    assert bundle.report.plan.variants == (ORT_FP32, ORT_FP32)


def test_without_a_place_the_cache_is_it(tiny_classifier: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hasten.builder.build import outline
    from hasten.core.plan import Plan

    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    about = outline(Plan(model=str(tiny_classifier("bert"))))
    assert about.target == tmp_path / "bundles" / tiny_classifier("bert").name
    assert not about.target.exists()


def test_force_replaces_a_bundle_and_nothing_else(tiny_classifier: Any, quick_build: Any, tmp_path: Path) -> None:
    model, target = tiny_classifier("bert"), tmp_path / "place" / "bundle"
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


# ---- data and the gate


@pytest.fixture(scope="module")
def labelled(tiny_classifier: Any, corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts labelled by the model itself, so that the original is right on all of them."""
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
def test_labels_give_a_metric_and_a_gate(
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
    assert bundle.manifest.max_drop == max_drop
    assert {entry.name: entry.metric for entry in bundle.manifest.variants}[ORT_FP32] == exact.metric
    # How many labels int8 changes depends on the processor; that the gate goes by it does not.
    assert reduced.passed == (reduced.drop <= max_drop)
    assert "accuracy drop" in reduced.reason
    assert (rows["onnxruntime-int8"].status is Status.INACCURATE) == (not reduced.passed)


def test_an_embedders_metric(tiny_embedder: Any, quick_build: Any, corpus: tuple[str, ...], tmp_path: Path) -> None:
    pairs = [{"text": corpus[0], "text_pair": text, "score": float(place)} for place, text in enumerate(corpus[1:])]
    bundle = quick_build(tiny_embedder(), variants=[ORT_FP32], data=write_rows(tmp_path / "pairs.jsonl", pairs))
    assert bundle.chosen.metric.name == "Spearman correlation"
    assert bundle.chosen.metric.rows == len(pairs)


def test_a_drop_needs_labels(tiny_classifier: Any, quick_build: Any, texts_file: Path, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="no labels"):
        quick_build(tiny_classifier("bert"), no_leftovers, data=texts_file, max_drop=1.0)
    with pytest.raises(PlanError, match="labelled data"):
        quick_build(tiny_classifier("bert"), no_leftovers, data=None, max_drop=1.0)


@pytest.mark.parametrize(
    ("content", "says"),
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
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path, content: str | None, says: str
) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        quick_build(tiny_classifier("bert"), no_leftovers, data=file)


def test_nothing_eligible_is_an_accuracy_error(tiny_embedder: Any, no_leftovers: Path) -> None:
    """Rounded weights never give exactly the same vectors."""
    with pytest.raises(AccuracyError) as caught:
        hasten.build(tiny_embedder(), no_leftovers, variants=["onnxruntime-int8"], min_agreement=1.0)
    (refused,) = caught.value.candidates
    assert caught.value.exit_code == 5
    assert refused.variant == "onnxruntime-int8"
    assert refused.status is Status.INACCURATE
    assert refused.verdict.agreement.value < 1.0
    assert "mean cosine" in refused.reason


# ---- what a build refuses


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"variants": ["onnxruntime-fp16"]}, UnsupportedError, "fp16"),
        ({"variants": ["openvino-fp32@abacus"]}, UnsupportedError, "abacus"),
        ({"variants": ["onnxruntim-fp32"]}, PlanError, "did you mean 'onnxruntime'"),
        ({"variants": ["onnxruntime-int9"]}, PlanError, "not the name of a variant"),
        ({"variants": ["torch-fp32"]}, PlanError, "comparison"),
        ({"task": "text-clasification"}, PlanError, "did you mean 'text-classification'"),
        ({"batch_size": (4, 2, 1)}, PlanError, "out of order"),
        ({"seq_len": ()}, PlanError, "one number or three"),
        ({"min_agreement": 2.0}, PlanError, "between 0 and 1"),
        ({"threads": 0}, PlanError, "threads"),
        ({"revision": "main"}, PlanError, "revision"),
        ({"keep": "some"}, PlanError, "keep"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_at_once(
    tiny_classifier: Any, no_leftovers: Path, options: dict[str, Any], error: type[HastenError], says: str
) -> None:
    with pytest.raises(error, match=says):
        hasten.build(tiny_classifier("bert"), no_leftovers, **options)


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def remove_head(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("classifier")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path], object], type[HastenError], str]] = {
    "no config": (lambda model: (model / "config.json").unlink(), PlanError, "no config.json"),
    "broken config": (lambda model: (model / "config.json").write_text("{"), PlanError, "not valid JSON"),
    "config is a list": (lambda model: (model / "config.json").write_text("[]"), PlanError, "config.json"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), PlanError, "no weights"),
    "broken weights": (lambda model: (model / "model.safetensors").write_bytes(b"{}" * 9), StageError, "does not load"),
    # transformers fills in random numbers and only warns; a bundle of them would pass every later check.
    "weights without the head": (remove_head, StageError, "classifier"),
    # transformers 5 makes one with an empty vocabulary, to which every word is unknown.
    "no tokenizer": (
        lambda model: [file.unlink() for file in model.glob("tokenizer*")], HastenError, "tokenizer"
    ),
    "unknown architecture": (
        lambda model: edit_config(model, architectures=["BertForSomethingElse"]), PlanError, "cannot tell the task"
    ),
    "unknown model type": (lambda model: edit_config(model, model_type="abacus"), StageError, "does not load"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path, damage: str
) -> None:
    change, error, says = DAMAGE[damage]
    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    change(model)
    with pytest.raises(error, match=says):
        quick_build(model, no_leftovers, variants=[ORT_FP32])


def test_pickled_weights_need_leave(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, tmp_path: Path, corpus: tuple[str, ...]
) -> None:
    import torch
    from safetensors.torch import load_file

    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="pickled"):
        quick_build(model, no_leftovers, variants=[ORT_FP32])
    pickled = quick_build(model, variants=[ORT_FP32], allow_pickle=True)
    safe = quick_build(tiny_classifier("bert"), variants=[ORT_FP32])
    assert hasten.load(pickled.path)(list(corpus)) == hasten.load(safe.path)(list(corpus))


@pytest.mark.parametrize(
    ("model", "error", "exit_code"),
    [
        ("nobody/has-this-model", StageError, 4),
        ("nobody-has-this-model", StageError, 4),
        ("./no/such/directory", PlanError, 2),
        ("/no/such/directory", PlanError, 2),
        ("not a model name", PlanError, 2),
        ("https://example.com/model", PlanError, 2),
    ],
)
def test_no_model_there(no_leftovers: Path, model: str, error: type[HastenError], exit_code: int) -> None:
    with pytest.raises(error, match="no model") as caught:
        hasten.build(model, no_leftovers)
    assert caught.value.exit_code == exit_code


def test_a_bundle_is_no_model(default: Bundle, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="already a bundle"):
        hasten.build(default.path, no_leftovers)


def test_a_file_is_no_model(default: Bundle, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="is a file"):
        hasten.build(default.path / "graph" / "model.onnx", no_leftovers)


def test_the_task_must_fit(tiny_classifier: Any, tiny_embedder: Any, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="no head for text-classification; it fits sentence-similarity"):
        hasten.build(tiny_embedder(), no_leftovers, task="text-classification")
    with pytest.raises(PlanError, match="pooling"):
        hasten.build(tiny_classifier("bert"), no_leftovers, task="sentence-similarity")


def test_an_unknown_pooling(tiny_embedder: Any, no_leftovers: Path) -> None:
    with pytest.raises(PlanError, match="weightedmean"):
        hasten.build(tiny_embedder(), no_leftovers, pooling="average")


def test_pooling_means_nothing_to_a_classifier(tiny_classifier: Any, quick_build: Any, no_leftovers: Path) -> None:
    """Asked for and ignored is worse than refused."""
    with pytest.raises(PlanError, match="pooling"):
        quick_build(tiny_classifier("bert"), no_leftovers, pooling="mean", variants=[ORT_FP32])


def test_an_unknown_module_is_refused(tiny_embedder: Any, no_leftovers: Path) -> None:
    with pytest.raises(UnsupportedError, match="LSTM"):
        hasten.build(tiny_embedder(modules=("LSTM",)), no_leftovers)


def test_a_target_that_cannot_be_is_found_before_the_work(tiny_classifier: Any, tmp_path: Path) -> None:
    from hasten.builder.build import outline
    from hasten.core.plan import Plan

    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "bundle"):
        with pytest.raises(PlanError, match="is a file"):
            outline(Plan(model=str(tiny_classifier("bert"))), target)


# ---- interrupted


class Interrupter(Silent):
    """A person who presses Ctrl-C when a step has got a little way."""

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
    [("export", True), (f"verify {ORT_FP32}", False), ("start benchmark processes", False), ("write", True)],
)
def test_an_interrupt_leaves_nothing_behind(
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


def test_an_interrupt_while_replacing_keeps_the_old_bundle(
    tiny_classifier: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tmp_path / "place" / "bundle"
    before = quick_build(tiny_classifier("bert"), target, variants=[ORT_FP32])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hasten.bundle.write.BundleWriter.add_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quick_build(tiny_classifier("bert"), target, variants=["openvino-fp32"], force=True)
    assert open_bundle(target).manifest == before.manifest
    open_bundle(target).check()
    assert [path.name for path in target.parent.iterdir()] == ["bundle"]


def test_a_failing_backend_is_recorded_if_we_picked_it_and_an_error_if_the_user_did(
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


# ---- graphs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_is_fused_in_every_layer(
    tiny_classifier: Any, load_tiny: Any, tmp_path: Path, architecture: str
) -> None:
    from hasten.builder.export import export
    from hasten.builder.optimize import fuse

    loaded = load_tiny(tiny_classifier(architecture))
    export(loaded, tmp_path / "model.onnx")
    fusions = fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx", loaded.config, external_data=False)
    assert fusions.layers == 2
    assert fusions.attention == 2
    assert fusions.nodes_after < fusions.nodes_before


def test_export_leaves_the_module_as_it_was(tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    """The reference is computed by the same module: train mode would put dropout into it."""
    from hasten.builder.export import export

    loaded = load_tiny(tiny_classifier("bert"))
    before = loaded.config._attn_implementation
    export(loaded, tmp_path / "model.onnx")
    assert not any(module.training for module in loaded.module.modules())
    assert loaded.config._attn_implementation == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


EXAMPLE = Batch(
    {"input_ids": np.arange(5, 105, dtype=np.int32), "token_type_ids": np.zeros(100, np.int32)},
    np.array([40, 1, 59], np.int32),
)


def test_external_data_gives_the_same_answers(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path
) -> None:
    """Weights beside the graph, as a model beyond 2 GiB has them."""
    loaded = load_tiny(tiny_classifier("bert"))
    answers = []
    for external in (False, True):
        folder = tmp_path / f"external-{external}"
        folder.mkdir()
        graphs = make_graphs(loaded, folder, external_data=external)
        for graph in graphs.values():
            assert graph.with_name("model.onnx.data").exists() == external
        for variant in (Variant("onnxruntime", Precision.FP32), Variant("openvino", Precision.FP32)):
            backend = BACKENDS.get(variant.backend)
            (folder / variant.name).mkdir()
            source = Source(loaded.signature, {"model": graphs[backend.dialect]})
            artifact = backend.make(source, variant, folder / variant.name)
            # Made is made: what it came from may go.
            graphs[backend.dialect].with_name("model.onnx.data").unlink(missing_ok=True)
            with backend.open(artifact, RunOptions(1)) as session:
                answers.append(session.run(EXAMPLE)["logits"])
    for other in answers[1:]:
        np.testing.assert_allclose(other, answers[0], atol=1e-4)


def test_a_large_model_is_bundled_whole(
    tiny_classifier: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch, corpus: tuple[str, ...]
) -> None:
    from hasten.builder.export import export

    small = quick_build(tiny_classifier("bert"), variants=[ORT_FP32])
    monkeypatch.setattr("hasten.builder.build.EXTERNAL_DATA_BYTES", 0)
    monkeypatch.setattr("hasten.builder.build.export", partial(export, external_data_bytes=0))
    variants = [ORT_FP32, "onnxruntime-int8", "openvino-fp32"]
    large = quick_build(tiny_classifier("bert"), variants=variants, keep="all", min_agreement=0.0)
    large.check()
    assert "graph/model.onnx.data" in large.manifest.files
    expected = hasten.load(small.path)(list(corpus))
    for name in (ORT_FP32, "openvino-fp32"):
        for ours, theirs in zip(hasten.load(large.path, name)(list(corpus)), expected, strict=True):
            assert ours["label"] == theirs["label"]
            assert ours["score"] == pytest.approx(theirs["score"], abs=1e-4)
    hasten.load(large.path, "onnxruntime-int8")("the int8 one loads")
    with BACKENDS.get("onnxruntime").open(large.graph(), RunOptions(1)) as session:
        assert session.run(EXAMPLE)["logits"].shape == (3, 3)


class Wrong:
    """A session that answers right but for one fault."""

    def __init__(self, session: Session, fault: Callable[[Any, Batch], Any]) -> None:
        self.session, self.spec, self.fault = session, session.spec, fault

    def run(self, batch: Batch) -> Outputs:
        return {name: self.fault(value.copy(), batch) for name, value in self.session.run(batch).items()}


FAULTS: dict[str, tuple[Callable[[Any, Batch], Any], str]] = {
    "a constant off": (lambda logits, _: logits + 0.1, "differs"),
    "not finite": (lambda logits, _: logits * np.nan, "not finite"),
    "a row lost": (lambda logits, _: logits[:1], "shape"),
    "a batch size frozen": (lambda logits, batch: logits[:1].repeat(len(batch), 0), "differs"),
    "wrong at the full length": (lambda logits, batch: logits + (batch.lengths.max() == 64), "differs"),
    "wrong for one token": (lambda logits, batch: logits + (batch.lengths.max() == 1), "differs"),
    "padding counted": (lambda logits, batch: logits + (batch.lengths.max() - batch.lengths)[:, None], "mixed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_graph_is_caught(tiny_classifier: Any, load_tiny: Any, tmp_path: Path, fault: str) -> None:
    from hasten.builder.check import check_graph

    loaded = load_tiny(tiny_classifier("bert"))
    torch = BACKENDS.get("torch")
    artifact = torch.make(Source(loaded.signature, {}, loaded.module), Variant.parse("torch-fp32"), tmp_path)
    with torch.open(artifact, RunOptions(1)) as original:
        assert "batched against single" in check_graph(original, original, EXAMPLE)
        change, says = FAULTS[fault]
        with pytest.raises(StageError, match=says):
            check_graph(Wrong(original, change), original, EXAMPLE)


def test_a_wrong_tokenizer_is_caught(tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    from hasten.builder.check import check_tokenizer
    from hasten.builder.load import save_tokenizer
    from hasten.core.tokenizer import Tokenizer

    loaded = load_tiny(tiny_classifier("bert"))
    save_tokenizer(loaded, tmp_path / "right.json")
    right = (tmp_path / "right.json").read_text()
    (tmp_path / "wrong.json").write_text(right.replace('"lowercase": true', '"lowercase": false'))
    rows = [{"text": "The cat", "text_pair": "A dog"}]
    check_tokenizer(Tokenizer.open(tmp_path / "right.json", loaded.tokenizer), loaded.original_tokenizer, rows)
    with pytest.raises(StageError, match="tokenizer"):
        check_tokenizer(Tokenizer.open(tmp_path / "wrong.json", loaded.tokenizer), loaded.original_tokenizer, rows)


def test_a_precision_that_is_only_a_label_is_refused(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO takes a precision as a hint; what it really runs in is what counts."""
    monkeypatch.setattr("hasten.backends.openvino._executed_precision", lambda _: "fp16")
    with pytest.raises(StageError, match="really computes in fp16"):
        quick_build(tiny_classifier("bert"), no_leftovers, variants=["openvino-fp32"])


def test_dialects_are_all_made(make_graphs: Any, tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    """A backend of a new dialect needs a way to it here, or no contract test reaches it."""
    made = make_graphs(load_tiny(tiny_classifier("bert")), tmp_path)
    assert {backend.dialect for backend in BACKENDS.all()} <= {*made, Dialect.MODULE}


def test_artifacts_know_their_size(default: Bundle) -> None:
    artifact: Artifact = default.artifact(default.chosen)
    listed = [name for name in default.manifest.files if name.startswith(f"variants/{default.chosen.name}/")]
    assert artifact.size_bytes == sum((default.path / name).stat().st_size for name in listed)
