"""Graphs: exported as promised, fused, whole with their weights beside them, and found out when they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, Dialect, RunOptions, Session, Source
from hasten.core.errors import HastenError, StageError
from hasten.core.tensors import Batch, Outputs
from hasten.core.variant import Precision, Variant

ARCHITECTURES = ("bert", "distilbert", "roberta", "electra")
ORT_FP32 = "onnxruntime-fp32"


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
    monkeypatch.setattr("hasten.graph.EXTERNAL_DATA_BYTES", 0)
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
        with pytest.raises(HastenError, match=says):
            check_graph(Wrong(original, change), original, EXAMPLE)


def test_a_wrong_tokenizer_is_caught(tiny_classifier: Any, load_tiny: Any, tmp_path: Path) -> None:
    from hasten.builder.check import check_tokenizer
    from hasten.builder.tokenizer import save_tokenizer
    from hasten.core.tokenizer import Tokenizer

    loaded = load_tiny(tiny_classifier("bert"))
    save_tokenizer(loaded, tmp_path / "right.json")
    right = (tmp_path / "right.json").read_text()
    (tmp_path / "wrong.json").write_text(right.replace('"lowercase": true', '"lowercase": false'))
    check_tokenizer(Tokenizer.open(tmp_path / "right.json", loaded.tokenizer), loaded.original_tokenizer)
    with pytest.raises(StageError, match="tokenizer"):
        check_tokenizer(Tokenizer.open(tmp_path / "wrong.json", loaded.tokenizer), loaded.original_tokenizer)


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
