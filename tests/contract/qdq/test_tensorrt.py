"""int8 for TensorRT: quantizers are added by the build, or come with the module. A fake stands in for TensorRT."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.builder.inspect import inspect
from hasten.builder.preflight import preview
from hasten.bundle import Bundle
from hasten.core.errors import UnsupportedError
from hasten.core.plan import Plan
from hasten.quantize.qdq.rules import find_violations
from support.models import tiny_encoders

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnx: Any = pytest.importorskip("onnx")

from hasten.quantize import qdq  # noqa: E402

HALF, ENGINE = "tensorrt-fp16@cuda", "tensorrt-int8+qdq@cuda"
FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
# Relative to the norm of the logits. fp16 rounding moves some values to another 8-bit step.
CLOSE = 0.06

pytestmark = pytest.mark.usefixtures("standin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "bert"
    tiny_encoders.save("bert", "ForSequenceClassification", directory, initializer_range=0.15)
    return directory


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[str]:
    """Texts of one length: without padding, all calibrations see the same values."""
    words = sorted({word for text in tiny_encoders.CORPUS for word in text.split() if len(tokens(folder, word)) == 3})
    random = np.random.default_rng(3)
    return [" ".join(random.choice(words, 9)) for _ in range(16)]


def write_rows(texts: list[str], file: Path) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def tokens(folder: Path, text: str) -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def feeds_of(folder: Path, texts: list[str]) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")


def quantized(folder: Path, texts: list[str]) -> Any:
    with qdq.patched(), qdq.calibration() as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        calibrate(model, [feeds_of(folder, texts)])
    return model


def logits(model: Any, feeds: Any) -> np.ndarray:
    with torch.inference_mode():
        return model(**feeds).logits.numpy()


def outputs_of(bundle: Bundle, variant: str, texts: list[str]) -> np.ndarray:
    with hasten.load(bundle.path, variant) as predictor:
        return predictor.outputs(predictor.encode(texts))["logits"]


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def engine_graph(bundle: Bundle) -> Any:
    """Return the graph that the engine was built from."""
    return onnx.load(bundle.artifact(bundle.entry(ENGINE)).path().with_suffix(".onnx"))


def activation_scales(model: Any) -> list[float]:
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    return sorted({float(onnx.numpy_helper.to_array(weights[name])) for name in names})


def test_build_adds_quantizers_to_a_plain_model(
    folder: Path, texts: list[str], tmp_path: Path, quick_build: Any
) -> None:
    rows = write_rows(texts, tmp_path / "rows.jsonl")
    bundle = quick_build(folder, variants=[HALF, ENGINE], calibration=rows, min_agreement=0.0, keep="all")
    assert {entry.name: entry.precision for entry in bundle.manifest.variants} == {HALF: "fp16", ENGINE: "int8"}
    passes = inspect(bundle, ENGINE).passes
    assert [step.name for step in passes] == ["export", "fold", "prune"]
    assert passes[0].notes == (f"with quantizers, calibrated on {len(texts)} rows",)

    # The ranges are those of `mse`, the default, on the rows.
    module = quantized(folder, texts)
    active = {part.amax.item() for part in qdq.quantizers(module).values() if part.channels is None and part.is_active}
    graph = engine_graph(bundle)
    scales = activation_scales(graph)
    expected = sorted({float(np.float16(amax / 127)) for amax in active})
    np.testing.assert_allclose(scales, expected, rtol=1e-3)  # one step of fp16; equal on x86-64 (2026-11)

    assert not find_violations(graph)
    inferred = onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True).graph
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in (*inferred.value_info, *inferred.output)}
    by_operator: dict[str, set[int]] = {}
    for node in inferred.node:
        by_operator.setdefault(node.op_type, set()).add(kinds[node.output[0]])
    assert by_operator["MatMul"] == by_operator["DequantizeLinear"] == {FLOAT16}
    assert by_operator["LayerNormalization"] == by_operator["Softmax"] == {FLOAT}

    rounded = logits(module, feeds_of(folder, texts))
    assert 0 < error(outputs_of(bundle, ENGINE, texts), rounded) < CLOSE


def test_quantizers_of_the_module_are_used(folder: Path, texts: list[str], tmp_path: Path, quick_build: Any) -> None:
    """The ranges are far too narrow, so that the outputs differ clearly from those of other ranges."""
    model = quantized(folder, texts)
    for name, part in qdq.quantizers(model).items():
        if name.endswith("input_quantizer"):
            part.set_range(part.amax * 0.1)
    feeds = feeds_of(folder, texts)
    rounded, plain = logits(model, feeds), copy.deepcopy(model)
    qdq.disable(plain)
    assert error(logits(plain, feeds), rounded) > 0.3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # There are too few rows to set some aside for calibration, and none are needed.
    rows = write_rows(texts[:4], tmp_path / "few.jsonl")
    bundle = quick_build(model, tokenizer=tokenizer, variants=[ENGINE], data=rows, min_agreement=0.0)
    assert inspect(bundle, ENGINE).passes[0].notes == ("with the module's quantizers",)
    assert error(outputs_of(bundle, ENGINE, texts), rounded) < CLOSE
    np.testing.assert_allclose(
        bundle.reference().outputs["logits"], logits(plain, feeds)[:4], atol=2e-6
    )  # 3e-7 on x86-64 (2026-11)


def test_values_beyond_fp16_stay_in_fp32(folder: Path, texts: list[str], tmp_path: Path, quick_build: Any) -> None:
    """One matmul scales values up and the next scales them down; in between fp16 would overflow."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        layer = model.bert.encoder.layer[0]
        layer.intermediate.dense.weight *= 1e6
        layer.output.dense.weight *= 1e-6
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = write_rows(texts, tmp_path / "rows.jsonl")
    bundle = quick_build(model, tokenizer=tokenizer, variants=[ENGINE], calibration=rows, min_agreement=0.0)
    guard = next(step for step in inspect(bundle, ENGINE).passes if step.name == "guard")
    assert "layer.0/intermediate/dense/MatMul" in guard.notes[0]
    assert not find_violations(engine_graph(bundle))
    assert error(outputs_of(bundle, ENGINE, texts), logits(model, feeds_of(folder, texts))) < 2 * CLOSE


def test_int8_engine_is_calibrated_on_rows_set_aside(
    folder: Path, texts: list[str], tmp_path: Path, quick_build: Any
) -> None:
    data = write_rows(texts, tmp_path / "data.jsonl")
    bundle = quick_build(folder, variants=[ENGINE], data=data, min_agreement=0.0)
    assert [entry.name for entry in bundle.manifest.variants] == [ENGINE]
    # A fifth of the rows was set aside for calibration; the gate uses the rest.
    assert inspect(bundle, ENGINE).passes[0].notes == ("with quantizers, calibrated on 3 rows",)
    assert bundle.manifest.chosen.agreement.rows == len(texts) - 3


def test_fill_mask_model_is_calibrated(tiny_model: Any, tmp_path: Path, quick_build: Any) -> None:
    folder = tiny_model("bert", "ForMaskedLM", initializer_range=0.15)
    texts = [text.replace(text.split()[2], "[MASK]", 1) for text in tiny_encoders.CORPUS]
    files = {
        "data": write_rows(texts[:4], tmp_path / "data.jsonl"),
        "calibration": write_rows(texts[4:], tmp_path / "rows.jsonl"),
    }
    bundle = quick_build(folder, task="fill-mask", variants=[ENGINE], min_agreement=0.0, **files)
    assert bundle.manifest.chosen.agreement.relative_error < 0.2
    assert not find_violations(engine_graph(bundle))


def test_an_architecture_that_quantizers_are_not_put_into(
    tiny_classifier: Any, texts_file: Path, no_leftovers: Path
) -> None:
    refusal = r"XLNetForSequenceClassification cannot be quantized: torch\.einsum"
    few: dict[str, Any] = {"data": texts_file, "threads": 1}
    with pytest.raises(UnsupportedError, match=refusal) as raised:
        hasten.build(tiny_classifier("xlnet"), no_leftovers, variants=[ENGINE, HALF], **few)
    assert raised.value.hint == "fp16 variants need no quantizers"


@pytest.mark.parametrize("variant", ["tensorrt-int8@cuda", "tensorrt-fp8@cuda"])
def test_int8_without_qdq_needs_a_quantized_graph(variant: str, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="is made from an ONNX graph that comes quantized") as caught:
        preview(Plan(str(folder), variants=(variant,)))
    assert caught.value.hint == f"--variants {ENGINE} quantizes the weights"


def test_automatic_search_leaves_tensorrt_out(folder: Path, load_tiny: Any, tmp_path: Path) -> None:
    from hasten.builder.export.encoder import export

    planned = preview(Plan(str(folder)))
    assert planned.device == "cpu"
    assert not [name for name in (*planned.contenders, *planned.further) if name.startswith("tensorrt")]
    reason = next(candidate.reason for candidate in planned.unavailable if candidate.variant == "tensorrt")
    assert reason == f"experimental: tried only if it is named: --variants {HALF}"
    with pytest.raises(UnsupportedError, match="no backend that a bundle can store runs on the GPU here"):
        preview(Plan(str(folder), device="cuda"))
    assert preview(Plan(str(folder), variants=(HALF, ENGINE))).contenders == (HALF, ENGINE)
    # A graph has no module to put quantizers into.
    graph = tmp_path / "graph"
    shutil.copytree(folder, graph, ignore=shutil.ignore_patterns("*.safetensors"))
    export(load_tiny(folder), graph / "model.onnx")
    assert preview(Plan(str(graph), variants=(HALF,))).contenders == (HALF,)
    with pytest.raises(UnsupportedError, match="is made by quantizers in a PyTorch module"):
        preview(Plan(str(graph), variants=(ENGINE,)))
