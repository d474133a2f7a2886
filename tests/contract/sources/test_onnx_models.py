"""A build from an ONNX graph finds it, completes it for its task and answers like its model, or rejects it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError
from hasten.core.progress import SilentProgress
from hasten.core.variant import Precision
from hasten.tasks import TASKS, Pooling
from support.int8 import recipe_here

ORT_FP32 = "onnxruntime-fp32"
BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def stage_notes(bundle: Bundle) -> dict[str, str]:
    return {stage.name: "; ".join(stage.notes) for stage in bundle.report.stages}


def answers(bundle: Bundle, payload: Any, variant: str | None = None, **options: Any) -> Any:
    with hasten.load(bundle.path, variant, threads=1) as predictor:
        return predictor(payload, **options)


def scores(results: Sequence[Any]) -> np.ndarray:
    """Return the scores of all texts, each in the order of the labels."""
    return np.array([[label["score"] for label in sorted(row, key=lambda label: label["label"])] for row in results])


Exporter = Callable[..., Path]


@pytest.fixture(scope="session")
def export_onnx(tmp_path_factory: pytest.TempPathFactory) -> Exporter:
    """A model directory as Optimum writes it: a graph with int64 ids and Optimum's axis names, and no weights."""

    def make(
        model: Path,
        head: str,
        outputs: Sequence[str],
        *,
        file: str = "model.onnx",
        inputs: Sequence[str] = BERT_INPUTS,
        fixed: Sequence[int] = (),
        opset: int = 18,
        change: Callable[[Any], Any] = lambda module: module,
    ) -> Path:
        import torch
        import transformers

        from hasten.builder.sources.export_wrapper import Exportable
        from hasten.builder.sources.quiet import quiet_libraries

        folder = tmp_path_factory.mktemp("onnx") / "model"
        shutil.copytree(model, folder)
        (folder / "model.safetensors").unlink()
        (folder / file).parent.mkdir(exist_ok=True)
        axes = {axis: name for axis, name in enumerate(("batch_size", "sequence_length")) if axis not in fixed}
        feeds = {name: torch.full((2, 7), int(name != "token_type_ids")) for name in inputs}
        with quiet_libraries():
            module = getattr(transformers, head).from_pretrained(model, attn_implementation="eager")
            torch.onnx.export(
                change(Exportable(module, inputs, outputs)).eval(),
                tuple(feeds.values()),
                str(folder / file),
                dynamo=False,
                opset_version=opset,
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_axes=dict.fromkeys((*inputs, *outputs), axes),
            )
        return folder

    return make


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Any, export_onnx: Exporter) -> Path:
    return export_onnx(tiny_classifier("bert"), "BertForSequenceClassification", ["logits"])


@pytest.fixture(scope="module")
def pipeline(tiny_classifier: Any) -> Any:
    import transformers

    return transformers.pipeline("text-classification", str(tiny_classifier("bert")), device="cpu", top_k=None)


def copy_model(model: Path, target: Path) -> Path:
    return shutil.copytree(model, target / "model")


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change an ONNX file."""
    import onnx

    graph = onnx.load(file)
    change(graph)
    onnx.save(graph, file)


@pytest.mark.slow
def test_graph_is_built_like_other_models(
    classifier: Path, pipeline: Any, quick_build: Any, corpus: tuple[str, ...]
) -> None:
    """The graph is reference and baseline, and may itself be the fastest variant."""
    bundle = quick_build(classifier, keep="all", min_agreement=0.0, speeds={"graph-fp32": 0.5})
    manifest = bundle.manifest
    assert manifest.model.file == "model.onnx"
    assert manifest.graph_precision is Precision.FP32
    assert [(spec.name, spec.dtype) for spec in manifest.signature.inputs] == [(name, "int64") for name in BERT_INPUTS]
    assert bundle.report.bench.baseline == bundle.chosen.name == "graph-fp32"
    assert {ORT_FP32, "onnxruntime-int8", "openvino-fp32"} <= {entry.name for entry in manifest.variants}
    assert not any("torch" in row.variant for row in bundle.report.candidates)
    assert "model.onnx: opset 18" in stage_notes(bundle)["load"]
    assert "the graph equals graph-fp32 at 1×1" in stage_notes(bundle)["check"]
    theirs = scores(pipeline(list(corpus)))
    for variant in ("graph-fp32", ORT_FP32, "openvino-fp32"):
        np.testing.assert_allclose(scores(answers(bundle, list(corpus), variant, top_k=None)), theirs, atol=1e-4)


LAYOUTS = {
    "Optimum, optimized and quantized": (["model.onnx", "model_optimized.onnx", "model_quantized.onnx"], "model.onnx"),
    "transformers.js": (["onnx/model.onnx", "onnx/model_fp16.onnx", "onnx/model_quantized.onnx"], "onnx/model.onnx"),
    "single graph with another name": (["classifier.onnx"], "classifier.onnx"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graph_is_found_in_layout(classifier: Path, load_onnx: Any, tmp_path: Path, layout: str) -> None:
    files, expected = LAYOUTS[layout]
    model = copy_model(classifier, tmp_path)
    graph = (model / "model.onnx").read_bytes()
    (model / "model.onnx").unlink()
    for file in files:
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_bytes(graph if file == expected else b"not this one")
    assert load_onnx(model).notes[0].startswith(f"{expected}: opset")


@pytest.fixture
def load_onnx(tmp_path: Path) -> Callable[..., Any]:
    """A function that loads a directory with a graph; keywords are options of the plan."""

    def load(model: Path, **options: Any) -> Any:
        from hasten.builder.sources.locate import find_model
        from hasten.builder.sources.onnx_model import load_graph
        from hasten.core.plan import Plan

        plan = Plan(model=str(model), **options)
        return load_graph(find_model(plan), plan, tmp_path / "complete.onnx")

    return load


def test_weights_take_precedence_unless_graph_is_named(
    tiny_classifier: Any, classifier: Path, quick_build: Any, load_onnx: Any, tmp_path: Path
) -> None:
    model = copy_model(tiny_classifier("bert"), tmp_path)
    (model / "onnx").mkdir()
    shutil.copy(classifier / "model.onnx", model / "onnx")
    plain = quick_build(model, variants=[ORT_FP32])
    assert plain.manifest.model.file is None
    assert plain.report.bench.baseline == "torch-fp32"
    assert "not from onnx/model.onnx (--file-name selects a graph)" in stage_notes(plain)["load"]
    loaded = load_onnx(model, file_name="onnx/model.onnx")
    assert loaded.notes[0].startswith("onnx/model.onnx: opset")
    assert loaded.baseline.name == "graph-fp32"


def test_external_weights_are_bundled(
    classifier: Path,
    quick_build: Any,
    load_onnx: Any,
    pipeline: Any,
    corpus: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import onnx

    model = copy_model(classifier, tmp_path)
    graph = onnx.load(model / "model.onnx")
    onnx.save_model(
        graph, model / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0
    )
    bundle = quick_build(model, variants=[ORT_FP32])
    np.testing.assert_allclose(
        scores(answers(bundle, list(corpus), top_k=None)), scores(pipeline(list(corpus))), atol=1e-4
    )
    monkeypatch.setattr("hasten.builder.sources.onnx_model.EXTERNAL_DATA_BYTES", 0)
    monkeypatch.setattr("hasten.onnx_graph.EXTERNAL_DATA_BYTES", 0)
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 1024)
    large = quick_build(model, variants=["graph-fp32", ORT_FP32], keep="all")
    assert "graph/model.onnx.data" in large.manifest.files
    for variant in ("graph-fp32", ORT_FP32):
        np.testing.assert_allclose(
            scores(answers(large, list(corpus), variant, top_k=None)), scores(pipeline(list(corpus))), atol=1e-4
        )
    (model / "model.onnx_data").unlink()
    with pytest.raises(StageError, match=r"model\.onnx does not load"):
        load_onnx(model)


def test_token_classification_graph(
    tiny_tagger: Any, export_onnx: Exporter, quick_build: Any, corpus: tuple[str, ...]
) -> None:
    import transformers

    weights = tiny_tagger("bert")
    graph = export_onnx(weights, "BertForTokenClassification", ["logits"])
    bundle = quick_build(graph, variants=[ORT_FP32], data=None)
    theirs = transformers.pipeline("token-classification", str(weights), device="cpu")(list(corpus))
    ours = answers(bundle, list(corpus))
    assert [[token["entity"] for token in row] for row in ours] == [
        [token["entity"] for token in row] for row in theirs
    ]
    for our, their in zip(ours, theirs, strict=True):
        assert [token["score"] for token in our] == pytest.approx([float(token["score"]) for token in their], abs=1e-4)


def test_token_types_are_zeros_when_tokenizer_returns_none(
    tiny_classifier: Any, export_onnx: Exporter, quick_build: Any, corpus: tuple[str, ...]
) -> None:
    """RoBERTa's tokenizer returns none, but some exporters keep the input in the graph."""
    import transformers

    weights = tiny_classifier("roberta")
    bundle = quick_build(export_onnx(weights, "RobertaForSequenceClassification", ["logits"]), variants=[ORT_FP32])
    assert [spec.name for spec in bundle.manifest.signature.inputs] == ["input_ids", "attention_mask"]
    theirs = transformers.pipeline("text-classification", str(weights), device="cpu", top_k=None)(list(corpus))
    np.testing.assert_allclose(scores(answers(bundle, list(corpus), top_k=None)), scores(theirs), atol=1e-4)


# ---- embedding graphs


@pytest.mark.parametrize("layout", ["dense", "sentence_embedding"])
def test_embedding_graph(
    tiny_embedder: Any, export_onnx: Exporter, quick_build: Any, corpus: tuple[str, ...], layout: str
) -> None:
    """In the layout of sentence-transformers (onnx/model.onnx), and of Optimum, whose graph pools without a layout."""
    import torch
    from sentence_transformers import SentenceTransformer

    class Mean(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            inner.outputs = ("last_hidden_state",)

        def forward(self, *feeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, mask = self.inner(*feeds)[0], feeds[1].unsqueeze(-1).float()
            return tokens, torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)

    weights = tiny_embedder(modules=("Dense", "Normalize") if layout == "dense" else ("Normalize",))
    original = SentenceTransformer(str(weights), device="cpu", local_files_only=True)
    if layout == "sentence_embedding":
        model = export_onnx(weights, "BertModel", ["last_hidden_state", "sentence_embedding"], change=Mean)
        (model / "modules.json").unlink()
        (model / "sentence_bert_config.json").unlink()
        bundle = quick_build(model, variants=[ORT_FP32], task="sentence-similarity")
    else:
        bundle = quick_build(
            export_onnx(weights, "BertModel", ["last_hidden_state"], file="onnx/model.onnx"), variants=[ORT_FP32]
        )
    np.testing.assert_allclose(answers(bundle, list(corpus)), original.encode(list(corpus)), atol=1e-5)
    assert [spec.name for spec in bundle.manifest.signature.outputs] == ["embedding"]


POOLINGS: dict[str, tuple[Pooling, ...]] = {kind.value: (kind,) for kind in Pooling} | {
    "several": (Pooling.LAST_TOKEN, Pooling.MEAN, Pooling.CLS)
}


@pytest.mark.parametrize("opset", [11, 13, 18, 21])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_graph_pooling_equals_module_pooling(pooling: str, opset: int) -> None:
    """The nodes of onnx_heads.py compute the same as the module of export_wrapper.py."""
    import torch

    from hasten.builder.sources.export_wrapper import PoolingHead
    from hasten.builder.sources.onnx_heads import GraphAddition, add_pooling
    from hasten.builder.sources.sentence_layout import SentenceLayout

    draw = np.random.default_rng(5)
    tokens = draw.normal(size=(3, 6, 4)).astype(np.float32)
    mask = np.arange(6) < np.array([6, 1, 4])[:, None]
    kinds = POOLINGS[pooling]
    for normalize in (False, True):
        graph = blank_graph(opset, {"tokens": tokens, "mask": mask.astype(np.int64)})
        new = GraphAddition(graph)
        new.set_outputs({"out": add_pooling(new, "tokens", "mask", SentenceLayout(kinds, normalize))})
        expected = PoolingHead(kinds, [], normalize)(torch.from_numpy(tokens), torch.from_numpy(mask.astype(np.int64)))
        ours = run_graph(graph, {"tokens": tokens, "mask": mask.astype(np.int64)})
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU", "Sigmoid"])
def test_graph_dense_layers_equal_module_dense_layers(activation: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from hasten.builder.sources.onnx_heads import GraphAddition, add_pooling
    from hasten.builder.sources.sentence_layout import DenseLayer, SentenceLayout

    torch.manual_seed(3)
    save_file({"linear.weight": torch.randn(3, 4), "linear.bias": torch.randn(3)}, tmp_path / "model.safetensors")
    layer = DenseLayer(tmp_path / "model.safetensors", 4, 3, True, activation)
    tokens, mask = np.random.default_rng(5).normal(size=(2, 3, 4)).astype(np.float32), np.ones((2, 3), np.int64)
    graph = blank_graph(17, {"tokens": tokens, "mask": mask})
    new = GraphAddition(graph)
    new.set_outputs({"out": add_pooling(new, "tokens", "mask", SentenceLayout((Pooling.CLS,), False, (layer,)))})
    expected = layer.module()(torch.from_numpy(tokens[:, 0])).detach().numpy()
    np.testing.assert_allclose(run_graph(graph, {"tokens": tokens, "mask": mask}), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_only_mask_tokens_are_selected(dtype: Any) -> None:
    from hasten.builder.sources.onnx_heads import GraphAddition, gather_mask_tokens

    values = np.random.default_rng(5).normal(size=(3, 5, 7)).astype(np.float32)
    ids = np.array([[9, 4, 1, 4, 0], [4, 2, 3, 0, 0], [1, 2, 3, 5, 6]], dtype)
    graph = blank_graph(17, {"values": values, "ids": ids})
    new = GraphAddition(graph)
    new.set_outputs({"out": gather_mask_tokens(new, "values", "ids", 4, dtype)})
    np.testing.assert_array_equal(run_graph(graph, {"values": values, "ids": ids}), values[ids == 4])
    assert run_graph(graph, {"values": values, "ids": np.zeros_like(ids)}).shape == (0, 7)


def blank_graph(opset: int, feeds: dict[str, Any]) -> Any:
    from onnx import helper

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim)
        for name, value in feeds.items()
    ]
    graph = helper.make_graph([], "blank", inputs, [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run_graph(graph: Any, feeds: dict[str, Any]) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[
        0
    ]


@pytest.mark.skipif("fill-mask" not in TASKS.names(), reason="fill-mask is not registered")
def test_fill_mask_graph(tiny_model: Any, export_onnx: Exporter, quick_build: Any, tmp_path: Path) -> None:
    import transformers

    weights = tiny_model("bert", "ForMaskedLM")
    texts = ["the cat [MASK] on the mat", "a [MASK] ran across the [MASK] field"]
    data = tmp_path / "masked.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    graph = export_onnx(weights, "BertForMaskedLM", ["logits"])
    bundle = quick_build(graph, variants=[ORT_FP32], data=data, task="fill-mask")
    ours = answers(bundle, texts[0])
    theirs = transformers.pipeline("fill-mask", str(weights), device="cpu")(texts[0])
    assert [row["token"] for row in ours] == [row["token"] for row in theirs]
    assert [row["score"] for row in ours] == pytest.approx([row["score"] for row in theirs], abs=1e-4)


# ---- graphs of lower precision


@pytest.fixture
def quantized(classifier: Path, tmp_path: Path) -> Path:
    """A model with two graphs, model.onnx and model_quantized.onnx."""
    from hasten.quantize.methods.dynamic import quantize_dynamic

    model = copy_model(classifier, tmp_path)
    recipe = recipe_here("onnxruntime-int8", attention=True)
    quantize_dynamic(model / "model.onnx", model / "model_quantized.onnx", recipe, external_data=False)
    return model


def test_preview_knows_that_a_graph_is_quantized(quantized: Path, texts_file: Path) -> None:
    from hasten.builder.preflight import preview
    from hasten.core.plan import Plan

    plan = Plan(str(quantized), file_name="model_quantized.onnx", calibration=str(texts_file))
    quantized_preview = preview(plan)
    assert quantized_preview.further == ()
    skipped = {candidate.variant: candidate.reason for candidate in quantized_preview.unavailable}
    assert skipped["onnxruntime-int8+attention"] == "not tried: the model's graph is already in int8"
    assert quantized_preview.notes == ("--calibration is not used: no variant to try is calibrated",)
    float_preview = preview(replace(plan, file_name="model.onnx"))
    assert "onnxruntime-int8+attention" in float_preview.further
    assert float_preview.notes == ()
    with pytest.raises(PlanError, match=r"onnxruntime-int8\+attention cannot be made: .* already in int8"):
        preview(replace(plan, variants=("onnxruntime-int8+attention",)))


def test_quantized_graph_is_its_own_reference(quantized: Path, quick_build: Any, corpus: tuple[str, ...]) -> None:
    """The graph is compared with itself, as the fp32 model is unknown; rows may depend on their batch."""
    from hasten.core.plan import Gate
    from hasten.measure.verify_bundle import verify_bundle

    bundle = quick_build(quantized, file_name="model_quantized.onnx", keep="all")
    rows = {row.variant: row for row in bundle.report.candidates}
    assert bundle.manifest.graph_precision is Precision.INT8
    assert bundle.report.bench.baseline == "graph-int8"
    assert "its weights are int8: this graph is the baseline" in stage_notes(bundle)["load"]
    assert rows["graph-int8"].verdict.agreement.max_error == 0.0
    assert "holds int8 weights" in rows[ORT_FP32].reason
    assert rows["onnxruntime-int8"].verdict is not None
    verified = verify_bundle(open_bundle(bundle.path), None, Gate(), ["graph-int8"], 1, SilentProgress())
    assert all(row.verdict.passed for row in verified)
    exact = quick_build(quantized, file_name="model.onnx", variants=[ORT_FP32])
    ours, theirs = (scores(answers(each, list(corpus), top_k=None)) for each in (bundle, exact))
    assert np.abs(ours - theirs).max() > 1e-4, "the fp32 graph answers"
    np.testing.assert_allclose(ours, theirs, atol=0.3)


@pytest.mark.parametrize("keep_types", [True, False])
def test_half_precision_weights_are_widened(
    classifier: Path, quick_build: Any, pipeline: Any, corpus: tuple[str, ...], tmp_path: Path, keep_types: bool
) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = copy_model(classifier, tmp_path)
    half = convert_float_to_float16(onnx.load(model / "model.onnx"), keep_io_types=keep_types)
    assert any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in half.graph.initializer)
    onnx.save(half, model / "model.onnx")
    bundle = quick_build(model, variants=[ORT_FP32])
    assert "widened to fp32" in stage_notes(bundle)["load"]
    assert bundle.report.bench.baseline == "graph-fp32"
    theirs = scores(pipeline(list(corpus)))
    # Only the stored weights were rounded, to 11 bits.
    np.testing.assert_allclose(scores(answers(bundle, list(corpus), top_k=None)), theirs, atol=2e-2)
    graph = onnx.load(bundle.path / "graph" / "model.onnx")
    assert not any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.graph.initializer)


# ---- unsupported graphs


def rename_input(graph: Any, old: str, new: str) -> None:
    for node in graph.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    for entry in graph.graph.input:
        entry.name = new if entry.name == old else entry.name


def rename_output(graph: Any, new: str) -> None:
    from onnx import helper

    old = graph.graph.output[0].name
    graph.graph.node.append(helper.make_node("Identity", [old], [new]))
    graph.graph.node.append(helper.make_node("Identity", [old], ["another"]))
    for name in (new, "another"):
        graph.graph.output.append(helper.make_tensor_value_info(name, 1, None))
    del graph.graph.output[0]


def make_float(graph: Any) -> None:
    graph.graph.input[1].type.tensor_type.elem_type = 1


def add_axis(graph: Any) -> None:
    for entry in graph.graph.input:
        entry.type.tensor_type.shape.dim.add().dim_param = "choices"


def block_quantize(graph: Any) -> None:
    next(node for node in graph.graph.node if node.op_type == "MatMul").op_type = "MatMulNBits"


UNSUPPORTED: dict[str, tuple[Callable[[Any], object], str]] = {
    "unsupported input": (
        lambda graph: rename_input(graph, "token_type_ids", "position_ids"), "unsupported input 'position_ids'"
    ),
    "no attention mask": (
        lambda graph: rename_input(graph, "attention_mask", "token_types"), "unsupported input 'token_types'"
    ),
    "float mask": (make_float, "'attention_mask' as FLOAT"),
    "other outputs": (lambda graph: rename_output(graph, "scores"), "no output 'logits'.*scores, another"),
    "three axes": (add_axis, "with 3 axes"),
    "4-bit weights": (block_quantize, "MatMulNBits"),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNSUPPORTED)
def test_unsupported_graph_is_rejected(classifier: Path, load_onnx: Any, tmp_path: Path, fault: str) -> None:
    change, message = UNSUPPORTED[fault]
    model = copy_model(classifier, tmp_path)
    edit(model / "model.onnx", change)
    with pytest.raises(UnsupportedError, match=message):
        load_onnx(model)


@pytest.mark.parametrize(("fixed", "message"), [((0,), "a fixed batch of 2"), ((1,), "a fixed sequence of 7")])
def test_fixed_axis_is_rejected_by_name(
    tiny_classifier: Any, export_onnx: Exporter, load_onnx: Any, fixed: tuple[int, ...], message: str
) -> None:
    model = export_onnx(tiny_classifier("bert"), "BertForSequenceClassification", ["logits"], fixed=fixed)
    with pytest.raises(UnsupportedError, match=message):
        load_onnx(model)


def test_graph_of_another_task_is_rejected(tiny_tagger: Any, export_onnx: Exporter, load_onnx: Any) -> None:
    """The graph must match its configuration."""
    model = export_onnx(tiny_tagger("bert"), "BertForTokenClassification", ["logits"])
    change_config(model, architectures=["BertForSequenceClassification"])
    with pytest.raises(StageError, match="returns one output per token"):
        load_onnx(model)


def test_graph_with_another_label_count_is_rejected(classifier: Path, load_onnx: Any, tmp_path: Path) -> None:
    model = copy_model(classifier, tmp_path)
    change_config(model, id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    with pytest.raises(StageError, match="has 3 labels, and its config"):
        load_onnx(model)


def test_graph_that_attends_to_padding_is_rejected(
    tiny_classifier: Any, export_onnx: Exporter, quick_build: Any, no_leftovers: Path
) -> None:
    """The graph has no reference, but a row must have the same answer alone and in a batch."""
    import torch

    class Unmasked(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
            return self.inner(ids, torch.ones_like(mask) + 0 * mask, types)

    model = export_onnx(tiny_classifier("bert"), "BertForSequenceClassification", ["logits"], change=Unmasked)
    with pytest.raises(StageError, match="batched against single"):
        quick_build(model, no_leftovers, variants=[ORT_FP32])


def change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (["a.onnx", "onnx/b.onnx"], {}, r"2 ONNX graphs, and none is called model.onnx \(.*a.onnx, onnx/b.onnx"),
        (["model.onnx"], {"file_name": "modle.onnx"}, "did you mean 'model.onnx'"),
        ([], {"file_name": "model.onnx"}, "holds no .onnx file"),
        (["model.onnx"], {"file_name": "../model.onnx"}, "has no graph"),
        (["model.onnx"], {"variants": ["inductor-fp32", ORT_FP32]}, "comes as an ONNX graph"),
    ],
)
def test_ambiguous_or_missing_graph_is_rejected(
    classifier: Path, no_leftovers: Path, tmp_path: Path, files: list[str], options: dict[str, Any], message: str
) -> None:
    model = copy_model(classifier, tmp_path)
    (model / "model.onnx").unlink()
    for file in files:
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_bytes(b"")
    with pytest.raises(HastenError, match=message):
        hasten.build(model, no_leftovers, **options)


def test_graph_without_architecture_needs_a_task(classifier: Path, quick_build: Any, tmp_path: Path) -> None:
    model = copy_model(classifier, tmp_path)
    change_config(model, architectures=None)
    with pytest.raises(PlanError, match="cannot determine the task"):
        quick_build(model, variants=[ORT_FP32])
    bundle = quick_build(model, variants=[ORT_FP32], task="text-classification")
    assert bundle.manifest.task.labels == ("bad", "fair", "good")


def test_graph_without_configuration_is_rejected(classifier: Path, no_leftovers: Path, tmp_path: Path) -> None:
    model = copy_model(classifier, tmp_path)
    (model / "config.json").unlink()
    with pytest.raises(PlanError, match=r"no config.json \(a graph needs"):
        hasten.build(model, no_leftovers)


@pytest.mark.slow
def test_graph_is_built_and_benchmarked_without_torch(classifier: Path, tmp_path: Path) -> None:
    """In separate processes that cannot import torch."""
    model = copy_model(classifier, tmp_path)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    sizes = ["-b", "1", "-s", "8", "--json", "--quiet"]

    def run(*args: str) -> Any:
        process = subprocess.run(
            [sys.executable, "-m", "hasten", *args, *sizes],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    built = run("build", str(model), "-o", str(tmp_path / "bundle"), "--bench-budget", "0.2s", "--variants", ORT_FP32)
    assert built["report"]["bench"]["baseline"] == "graph-fp32"
    shutil.rmtree(model)
    again = run("bench", str(tmp_path / "bundle"), "--bench-budget", "0.2s")
    assert {row["variant"] for row in again["bench"]["timings"]} == {"graph-fp32", ORT_FP32}
    assert "is no longer there" in again["rejected"][0]["reason"]
