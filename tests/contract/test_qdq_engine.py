"""int8 for TensorRT: a model is given quantizers on the way, or brings them. In TensorRT's place a stand-in."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import tiny
from hasten.builder.inspect import inspect
from hasten.builder.outline import outline
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.plan import Plan
from hasten.quantize.qdq.rules import misplaced

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
onnx: Any = pytest.importorskip("onnx")

from hasten.quantize import qdq  # noqa: E402

HALF, ENGINE = "tensorrt-fp16@cuda", "tensorrt-int8+qdq@cuda"
FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
# Of the norm of the logits. What rounds in fp16 too lands on other steps of eight bits here and there.
CLOSE = 0.06

pytestmark = pytest.mark.usefixtures("standin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "bert"
    tiny.save("bert", "ForSequenceClassification", made, initializer_range=0.15)
    return made


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[str]:
    """Of one length: nothing is padded, and whoever calibrates on them sees the same."""
    words = sorted({word for text in tiny.CORPUS for word in text.split() if len(tokens(folder, word)) == 3})
    draw = np.random.default_rng(3)
    return [" ".join(draw.choice(words, 9)) for _ in range(16)]


def written(texts: list[str], file: Path) -> Path:
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


def answers(bundle: Bundle, variant: str, texts: list[str]) -> np.ndarray:
    with hasten.load(bundle.path, variant) as predictor:
        return predictor.outputs(predictor.encode(texts))["logits"]


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def typed(bundle: Bundle) -> Any:
    """The graph that the engine was built from."""
    return onnx.load(bundle.artifact(bundle.entry(ENGINE)).path().with_suffix(".onnx"))


def activation_scales(model: Any) -> list[float]:
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    names = {node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    return sorted({float(onnx.numpy_helper.to_array(weights[name])) for name in names})


def test_a_plain_model_is_given_quantizers(folder: Path, texts: list[str], tmp_path: Path, quick_build: Any) -> None:
    rows = written(texts, tmp_path / "rows.jsonl")
    bundle = quick_build(folder, variants=[HALF, ENGINE], calibration=rows, min_agreement=0.0, keep="all")
    assert {entry.name: entry.precision for entry in bundle.manifest.variants} == {HALF: "fp16", ENGINE: "int8"}
    passes = inspect(bundle, ENGINE).passes
    assert [step.name for step in passes] == ["export", "fold", "prune"]
    assert passes[0].notes == (f"with quantizers, calibrated on {len(texts)} rows",)

    # Its ranges are those that `mse`, the default, finds on the rows.
    module = quantized(folder, texts)
    active = {part.amax.item() for part in qdq.quantizers(module).values() if part.channels is None and part.is_active}
    graph = typed(bundle)
    found = activation_scales(graph)
    expected = sorted({float(np.float16(amax / 127)) for amax in active})
    np.testing.assert_allclose(found, expected, rtol=2e-3)

    assert not misplaced(graph)
    inferred = onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True).graph
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in (*inferred.value_info, *inferred.output)}
    by_operator: dict[str, set[int]] = {}
    for node in inferred.node:
        by_operator.setdefault(node.op_type, set()).add(kinds[node.output[0]])
    assert by_operator["MatMul"] == by_operator["DequantizeLinear"] == {FLOAT16}
    assert by_operator["LayerNormalization"] == by_operator["Softmax"] == {FLOAT}

    rounded = logits(module, feeds_of(folder, texts))
    assert 0 < error(answers(bundle, ENGINE, texts), rounded) < CLOSE


def test_quantizers_that_come_with_the_module_are_used(
    folder: Path, texts: list[str], tmp_path: Path, quick_build: Any
) -> None:
    """Far too narrow, so that nobody could take their answers for those of others."""
    model = quantized(folder, texts)
    for name, part in qdq.quantizers(model).items():
        if name.endswith("input_quantizer"):
            part.set_range(part.amax * 0.1)
    feeds = feeds_of(folder, texts)
    rounded, plain = logits(model, feeds), copy.deepcopy(model)
    qdq.disable(plain)
    assert error(logits(plain, feeds), rounded) > 0.3
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # Of so few rows none could be set aside to calibrate on, and none is needed.
    rows = written(texts[:4], tmp_path / "few.jsonl")
    bundle = quick_build(model, tokenizer=tokenizer, variants=[ENGINE], data=rows, min_agreement=0.0)
    assert inspect(bundle, ENGINE).passes[0].notes == ("with the module's quantizers",)
    assert error(answers(bundle, ENGINE, texts), rounded) < CLOSE
    np.testing.assert_allclose(bundle.reference().outputs["logits"], logits(plain, feeds)[:4], atol=1e-5)


def test_values_beyond_fp16_stay_in_fp32(folder: Path, texts: list[str], tmp_path: Path, quick_build: Any) -> None:
    """What one product multiplies, the next divides again; in between fp16 would be infinite."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        layer = model.bert.encoder.layer[0]
        layer.intermediate.dense.weight *= 1e6
        layer.output.dense.weight *= 1e-6
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = written(texts, tmp_path / "rows.jsonl")
    bundle = quick_build(model, tokenizer=tokenizer, variants=[ENGINE], calibration=rows, min_agreement=0.0)
    guard = next(step for step in inspect(bundle, ENGINE).passes if step.name == "guard")
    assert "layer.0/intermediate/dense/MatMul" in guard.notes[0]
    assert not misplaced(typed(bundle))
    assert error(answers(bundle, ENGINE, texts), logits(model, feeds_of(folder, texts))) < 2 * CLOSE


def test_a_search_for_int8_on_a_gpu_makes_it(folder: Path, texts: list[str], tmp_path: Path, quick_build: Any) -> None:
    data = written(texts, tmp_path / "data.jsonl")
    bundle = quick_build(folder, device="cuda", precision="int8", data=data, min_agreement=0.0)
    assert [entry.name for entry in bundle.manifest.variants] == [ENGINE]
    # A fifth of the rows was set aside, and the rest judges.
    assert inspect(bundle, ENGINE).passes[0].notes == ("with quantizers, calibrated on 3 rows",)
    assert bundle.manifest.chosen.agreement.rows == len(texts) - 3


def test_mask_tokens_alone_are_calibrated_on_too(tiny_model: Any, tmp_path: Path, quick_build: Any) -> None:
    folder = tiny_model("bert", "ForMaskedLM", initializer_range=0.15)
    texts = [text.replace(text.split()[2], "[MASK]", 1) for text in tiny.CORPUS]
    asked = {
        "data": written(texts[:4], tmp_path / "data.jsonl"),
        "calibration": written(texts[4:], tmp_path / "rows.jsonl"),
    }
    bundle = quick_build(folder, task="fill-mask", variants=[ENGINE], min_agreement=0.0, **asked)
    assert bundle.manifest.chosen.agreement.relative_error < 0.2
    assert not misplaced(typed(bundle))


def test_an_architecture_that_quantizers_are_not_put_into(
    tiny_classifier: Any, texts_file: Path, no_leftovers: Path
) -> None:
    refusal = r"XLNetForSequenceClassification cannot be quantized: torch\.einsum"
    few: dict[str, Any] = {"data": texts_file, "threads": 1}
    with pytest.raises(UnsupportedError, match=refusal) as asked:
        hasten.build(tiny_classifier("xlnet"), no_leftovers, variants=[ENGINE, HALF], **few)
    assert asked.value.hint == "in fp16 it needs no quantizers"
    # No gate was asked, and none would help.
    with pytest.raises(AccuracyError, match="may be used") as searched:
        hasten.build(tiny_classifier("xlnet"), no_leftovers, device="cuda", precision="int8", **few)
    assert searched.value.hint is None
    assert re.match(refusal, next(one.reason for one in searched.value.candidates if one.variant == ENGINE))


@pytest.mark.parametrize("variant", ["tensorrt-int8@cuda", "tensorrt-fp8@cuda"])
def test_eight_bits_that_only_a_graph_brings(variant: str, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="is made from an ONNX graph that comes quantized") as caught:
        outline(Plan(str(folder), variants=(variant,)))
    assert caught.value.hint == f"--variants {ENGINE} quantizes by itself"


def test_it_is_searched_for_where_tensorrt_runs(
    folder: Path, load_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.builder.export import export
    from hasten.core.hardware import this_machine

    about = outline(Plan(str(folder), device="cuda"))
    assert HALF in about.contenders
    assert ENGINE in about.further
    assert ENGINE in outline(Plan(str(folder), device="cuda", precision="int8")).further
    assert ENGINE not in (*(on_cpu := outline(Plan(str(folder), device="cpu"))).contenders, *on_cpu.further)
    # Quantizers have no module to stand in.
    graph = tmp_path / "graph"
    shutil.copytree(folder, graph, ignore=shutil.ignore_patterns("*.safetensors"))
    export(load_tiny(folder), graph / "model.onnx")
    about = outline(Plan(str(graph), device="cuda"))
    assert HALF in about.contenders
    assert ENGINE not in about.further
    # And where there is no TensorRT, nobody hears of it.
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", "/nowhere")
    this_machine.cache_clear()
    about = outline(Plan(str(folder)))
    assert ENGINE not in (*about.contenders, *about.further, *(one.variant for one in about.unavailable))
