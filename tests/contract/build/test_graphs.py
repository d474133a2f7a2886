"""Graphs are exported and fused as expected, work with external weights, and wrong ones are detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, Dialect, RunOptions, Session, Source
from hasten.core.errors import HastenError, StageError
from hasten.core.tensors import Batch, Outputs
from hasten.core.variant import Precision, Variant
from support.models import tiny_encoders

ARCHITECTURES = ("bert", "distilbert", "roberta", "electra")
ORT_FP32 = "onnxruntime-fp32"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_is_fused_in_every_layer(
    tiny_classifier: Any, load_tiny: Any, tmp_path: Path, architecture: str
) -> None:
    from hasten.builder.export.encoder import export
    from hasten.builder.passes.fuse import fuse
    from hasten.onnx_graph import read_graph

    loaded = load_tiny(tiny_classifier(architecture))
    export(loaded, tmp_path / "model.onnx")
    fusions = fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx", loaded.config)
    assert fusions.layers == 2
    assert fusions.attention == 2
    assert len(read_graph(tmp_path / "fused.onnx").graph.node) < len(read_graph(tmp_path / "model.onnx").graph.node)


def test_export_does_not_modify_the_module(tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    """The same module computes the reference: train mode would apply dropout."""
    from hasten.builder.export.encoder import export

    loaded = load_tiny(tiny_classifier("bert"))
    before = loaded.config._attn_implementation
    export(loaded, tmp_path / "model.onnx")
    assert not any(module.training for module in loaded.module.modules())
    assert loaded.config._attn_implementation == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    "norm",
    [{}, {"adapter_reuse_layer_norm": False}, {"adapter_layer_norm": True}, {"ln_before_adapter": False}],
    ids=["reused", "none", "own", "after residual"],
)
def test_only_adapter_of_default_language_is_exported(
    norm: dict[str, bool], load_tiny: Any, make_graphs: Any, tmp_path: Path
) -> None:
    from hasten.onnx_graph import read_graph

    languages = {"languages": ["de_DE", "en_XX", "fr_XX"], "default_language": "en_XX"}
    tiny_encoders.save("xmod", "ForSequenceClassification", tmp_path / "model", **languages, **norm)
    loaded = load_tiny(tmp_path / "model")
    graph = make_graphs(loaded, tmp_path)[Dialect.ONNX]
    assert not {"NonZero", "ScatterND"} & {node.op_type for node in read_graph(graph).graph.node}
    batch = Batch({"input_ids": np.arange(5, 55, dtype=np.int32)}, np.array([20, 1, 29], np.int32))
    answers = []
    for source, variant in (
        (loaded.source, loaded.baseline),
        (Source(loaded.signature, {"model": graph}), Variant("onnxruntime", Precision.FP32)),
    ):
        backend, folder = BACKENDS.get(variant.backend), tmp_path / variant.name
        folder.mkdir()
        with backend.open(backend.make(source, variant, folder), RunOptions(1)) as session:
            answers.append(session.run(batch)["logits"])
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-3, atol=1e-4)


EXAMPLE = Batch(
    {"input_ids": np.arange(5, 105, dtype=np.int32), "token_type_ids": np.zeros(100, np.int32)},
    np.array([40, 1, 59], np.int32),
)


def test_external_data_gives_the_same_answers(
    tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """External weights are needed by models beyond 2 GiB."""
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 1024)
    loaded = load_tiny(tiny_classifier("bert"))
    answers = []
    for external in (False, True):
        folder = tmp_path / f"external-{external}"
        folder.mkdir()
        if external:
            monkeypatch.setattr("hasten.onnx_graph.EXTERNAL_DATA_BYTES", 0)
        graphs = make_graphs(loaded, folder, external_data=external)
        for graph in graphs.values():
            assert graph.with_name("model.onnx.data").exists() == external
        for variant in (Variant("onnxruntime", Precision.FP32), Variant("openvino", Precision.FP32)):
            backend = BACKENDS.get(variant.backend)
            (folder / variant.name).mkdir()
            source = Source(loaded.signature, {"model": graphs[backend.dialect]})
            artifact = backend.make(source, variant, folder / variant.name)
            # A built variant does not need its source.
            graphs[backend.dialect].with_name("model.onnx.data").unlink(missing_ok=True)
            with backend.open(artifact, RunOptions(1)) as session:
                answers.append(session.run(EXAMPLE)["logits"])
    for other in answers[1:]:
        np.testing.assert_allclose(other, answers[0], atol=1e-4)


def test_large_model_is_bundled_with_external_data(
    tiny_classifier: Any, quick_build: Any, monkeypatch: pytest.MonkeyPatch, corpus: tuple[str, ...]
) -> None:
    small = quick_build(tiny_classifier("bert"), variants=[ORT_FP32])
    monkeypatch.setattr("hasten.onnx_graph.EXTERNAL_DATA_BYTES", 0)
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 1024)
    variants = [ORT_FP32, "onnxruntime-int8", "openvino-fp32"]
    large = quick_build(tiny_classifier("bert"), variants=variants, keep="all", min_agreement=0.0)
    large.check()
    assert "graph/model.onnx.data" in large.manifest.files
    expected = hasten.load(small.path)(list(corpus))
    for name in (ORT_FP32, "openvino-fp32"):
        for ours, theirs in zip(hasten.load(large.path, name)(list(corpus)), expected, strict=True):
            assert ours["label"] == theirs["label"]
            assert ours["score"] == pytest.approx(theirs["score"], abs=1e-4)
    hasten.load(large.path, "onnxruntime-int8")("the int8 variant loads")
    with BACKENDS.get("onnxruntime").open(large.graph(), RunOptions(1)) as session:
        assert session.run(EXAMPLE)["logits"].shape == (3, 3)


class FaultySession:
    """A session whose outputs have one fault."""

    def __init__(self, session: Session, fault: Callable[[Any, Batch], Any]) -> None:
        self.session, self.spec, self.fault = session, session.spec, fault

    def run(self, batch: Batch) -> Outputs:
        return {name: self.fault(value.copy(), batch) for name, value in self.session.run(batch).items()}


FAULTS: dict[str, tuple[Callable[[Any, Batch], Any], str]] = {
    "constant offset": (lambda logits, _: logits + 0.1, "differs"),
    "not finite": (lambda logits, _: logits * np.nan, "not finite"),
    "missing row": (lambda logits, _: logits[:1], "shape"),
    "frozen batch size": (lambda logits, batch: logits[:1].repeat(len(batch), 0), "differs"),
    "wrong at maximum length": (lambda logits, batch: logits + (batch.lengths.max() == 64), "differs"),
    "wrong for one token": (lambda logits, batch: logits + (batch.lengths.max() == 1), "differs"),
    "padding not masked": (lambda logits, batch: logits + (batch.lengths.max() - batch.lengths)[:, None], "mixed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_graph_is_detected(tiny_classifier: Any, load_tiny: Any, tmp_path: Path, fault: str) -> None:
    from hasten.builder.check_export import answer_awkward_batches, check_graph

    loaded = load_tiny(tiny_classifier("bert"))
    torch = BACKENDS.get("torch")
    artifact = torch.make(Source(loaded.signature, {}, loaded.module), Variant.parse("torch-fp32"), tmp_path)
    with torch.open(artifact, RunOptions(1)) as original:
        batches = answer_awkward_batches(original, EXAMPLE)
        assert "batched against single" in check_graph(original, batches)
        change, message = FAULTS[fault]
        with pytest.raises(HastenError, match=message):
            check_graph(FaultySession(original, change), batches)


@pytest.mark.parametrize(("budget_s", "longest", "unchecked"), [(0.0, 2048, "more than 2048"), (1e9, 3000, "")])
def test_longest_text_is_checked_within_the_budget(
    tiny_model: Any, load_tiny: Any, tmp_path: Path, budget_s: float, longest: int, unchecked: str
) -> None:
    from hasten.builder.check_export import answer_awkward_batches, check_graph

    loaded = load_tiny(tiny_model("modernbert", "ForSequenceClassification", positions=3000, tokenizer_max_length=3000))
    torch = BACKENDS.get("torch")
    artifact = torch.make(Source(loaded.signature, {}, loaded.module), Variant.parse("torch-fp32"), tmp_path)
    with torch.open(artifact, RunOptions(1)) as original:
        checks = answer_awkward_batches(original, EXAMPLE, attention_heads=4, long_text_budget_s=budget_s)
        assert f"1×{longest}" in check_graph(original, checks)
        assert unchecked in checks.unchecked
        assert bool(checks.unchecked) == bool(unchecked)
        wrong = FaultySession(original, lambda logits, batch: logits + (batch.lengths.max() == longest))
        with pytest.raises(StageError, match=f"wrong at 1×{longest}"):
            check_graph(wrong, checks)


def test_wrong_tokenizer_is_detected(tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    from hasten.builder.check_export import check_tokenizer
    from hasten.builder.sources.tokenizer import save_tokenizer
    from hasten.core.text.tokenizer import Tokenizer

    loaded = load_tiny(tiny_classifier("bert"))
    save_tokenizer(loaded.original_tokenizer, tmp_path / "right.json")
    right = (tmp_path / "right.json").read_text()
    (tmp_path / "wrong.json").write_text(right.replace('"lowercase": true', '"lowercase": false'))
    check_tokenizer(Tokenizer.open(tmp_path / "right.json", loaded.tokenizer), loaded.original_tokenizer)
    with pytest.raises(StageError, match="tokenizer"):
        check_tokenizer(Tokenizer.open(tmp_path / "wrong.json", loaded.tokenizer), loaded.original_tokenizer)


def test_variant_is_rejected_when_executed_precision_differs(
    tiny_classifier: Any, quick_build: Any, no_leftovers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO treats a precision as a hint; the executed precision counts."""
    monkeypatch.setattr("hasten.backends.openvino._executed_precision", lambda _: "fp16")
    with pytest.raises(StageError, match="computes in fp16 on this machine"):
        quick_build(tiny_classifier("bert"), no_leftovers, variants=["openvino-fp32"])


def test_every_dialect_has_a_graph(make_graphs: Any, tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    """A backend with a new dialect needs a graph here, or the contract tests do not cover it."""
    graphs = make_graphs(load_tiny(tiny_classifier("bert")), tmp_path)
    assert {backend.dialect for backend in BACKENDS.all()} <= {*graphs, Dialect.MODULE}
