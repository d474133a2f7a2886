"""Test builds from modules with quantizers, which make a variant that is compared with the module in float."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.builder.inspect import inspect
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.errors import AccuracyError, PlanError, UnsupportedError
from hasten.core.report import Status
from hasten.core.system.hardware import Gpu, this_machine
from hasten.core.variant import Support
from support.int8 import needs_exact_int8_sums
from support.models import tiny_encoders, tiny_generators

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnx")

from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.rewrite import is_rewritten  # noqa: E402

ORT_QDQ = "onnxruntime-int8+qdq"
BOTH = ["onnxruntime-fp32", ORT_QDQ]
LABELS = ("bad", "good")
# Relative to the largest logit: see test_qdq.py.
CLOSE = 0.05
# fp32 logits, and quantized ones of the same values, differ by the order of additions: by up to 7e-7 on x86-64 with
# AVX-512 (2026-11). Other CPUs add in another order.
SAME = 3e-6
# Layers of the tiny model, and matmuls of a layer: linear layers and attention.
LAYERS, MATMULS = 2, 6 + 2


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """Texts with words of the first or of the second half of the corpus."""
    draw = random.Random(3)
    words = [
        sorted({word for text in half for word in text.split()})
        for half in (tiny_encoders.CORPUS[:4], tiny_encoders.CORPUS[4:])
    ]
    return [{"text": " ".join(draw.sample(words[index % 2], 7)), "label": LABELS[index % 2]} for index in range(64)]


@pytest.fixture(scope="module")
def data(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def fitted(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained on the rows: rounding changes the labels of an untrained one at random."""
    folder = tmp_path_factory.mktemp("fitted")
    fields = {"id2label": dict(enumerate(LABELS)), "label2id": {label: index for index, label in enumerate(LABELS)}}
    tiny_encoders.save("bert", "ForSequenceClassification", folder, initializer_range=0.15, **fields)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    feeds = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    gold = torch.tensor([LABELS.index(row["label"]) for row in rows])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model(**feeds, labels=gold).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def feeds_of(folder: Path, texts: list[str]) -> Any:
    return tokenizer_of(folder)(texts, padding=True, return_tensors="pt")


def quantized(folder: Path, kind: str = "AutoModelForSequenceClassification") -> Any:
    with qdq.patched(), qdq.calibration("max") as calibrate:
        model = getattr(transformers, kind).from_pretrained(folder).eval()
        calibrate(model, [feeds_of(folder, list(tiny_encoders.CORPUS))])
    return model


def narrowed(model: Any) -> Any:
    """Shrink the ranges, as if the model had been calibrated on zeros."""
    for name, part in qdq.quantizers(model).items():
        if name.endswith("input_quantizer"):
            part.set_range(part.amax * 0.02)
    return model


def logits(model: Any, feeds: Any) -> np.ndarray:
    with torch.inference_mode():
        return model(**feeds).logits.numpy()


def in_float(model: Any, feeds: Any) -> np.ndarray:
    plain = copy.deepcopy(model)
    qdq.disable(plain)
    return logits(plain, feeds)


def outputs_of(bundle: Bundle, variant: str, payload: list[Any], output: str = "logits") -> np.ndarray:
    with hasten.load(bundle.path, variant, threads=1) as predictor:
        return predictor.outputs(predictor.encode(payload))[output]


def candidates(source: Bundle | AccuracyError) -> dict[str, Any]:
    actual = source.report.candidates if isinstance(source, Bundle) else source.candidates
    return {candidate.variant: candidate for candidate in actual}


@pytest.fixture(scope="module")
def module(fitted: Path) -> Any:
    return quantized(fitted)


@pytest.fixture(scope="module")
def bundle(module: Any, fitted: Path, data: Path, quick_build: Any) -> Bundle:
    return quick_build(module, tokenizer=tokenizer_of(fitted), variants=BOTH, data=data, max_drop=1.0, keep="all")


def test_reference_is_the_module_in_float(
    bundle: Bundle, module: Any, fitted: Path, rows: list[dict[str, str]]
) -> None:
    feeds = feeds_of(fitted, [row["text"] for row in rows])
    expected = in_float(module, feeds)
    assert np.abs(expected - logits(module, feeds)).max() > 1e-3, (
        "rounding must change the outputs for this test to mean anything"
    )
    np.testing.assert_allclose(bundle.reference().outputs["logits"], expected, atol=SAME)
    assert bundle.manifest.graph_precision == "fp32"
    np.testing.assert_allclose(
        outputs_of(bundle, "onnxruntime-fp32", [row["text"] for row in rows]), expected, atol=SAME
    )
    assert bundle.report.bench.baseline == "torch-fp32"
    assert "QuantizeLinear" not in next(step for step in bundle.report.passes if step.name == "export").operators_after


def test_qdq_variant_matches_the_rounded_module(
    bundle: Bundle, module: Any, fitted: Path, rows: list[dict[str, str]]
) -> None:
    texts = [row["text"] for row in rows]
    expected = logits(module, feeds_of(fitted, texts))
    actual = outputs_of(bundle, ORT_QDQ, texts)
    assert np.abs(actual - expected).max() < CLOSE * np.abs(expected).max()
    assert np.abs(actual - in_float(module, feeds_of(fitted, texts))).max() > 1e-3
    alone = np.concatenate([outputs_of(bundle, ORT_QDQ, [text]) for text in texts[:4]])
    np.testing.assert_allclose(alone, actual[:4], atol=SAME)


def test_qdq_variant_goes_through_the_gate(bundle: Bundle) -> None:
    actual = candidates(bundle)[ORT_QDQ]
    assert actual.status in (Status.CHOSEN, Status.ELIGIBLE)
    assert actual.verdict.reference_metric.value > 0.9
    assert actual.verdict.drop_interval is not None
    entry = bundle.entry(ORT_QDQ)
    assert (entry.precision, entry.depends_on_batch) == ("int8", False)
    assert "recipe.toml" not in [file.name for file in bundle.artifact(entry).directory.iterdir()]


def test_qdq_variant_runs_integer_matmuls(bundle: Bundle) -> None:
    inspection = inspect(bundle, ORT_QDQ)
    assert [step.name for step in inspection.passes] == ["export", "fold", "fuse", "prune", "split norms"]
    [view] = inspection.graphs
    ran = {execution.operator: execution.count for execution in view.executed}
    integer, in_float = (
        sum(ran.get(name, 0) for name in names)
        for names in (("MatMulIntegerToFloat", "QLinearMatMul"), ("MatMul", "FusedMatMul"))
    )
    # On x86 ONNX Runtime leaves the linear layers in float that read one rounded input together.
    if this_machine().has("neon"):
        assert integer >= LAYERS * MATMULS
        assert not in_float
    else:
        assert integer + in_float >= LAYERS * MATMULS
        assert integer > in_float


def test_qdq_variant_with_narrow_ranges_is_rejected(fitted: Path, data: Path, tmp_path: Path, quick_build: Any) -> None:
    model = narrowed(quantized(fitted)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"tokenizer": tokenizer_of(fitted), "data": data, "max_drop": 1.0}
    with pytest.raises(AccuracyError, match="can be used") as caught:
        quick_build(model, tmp_path / "rejected", variants=[ORT_QDQ], **options)
    verdict = candidates(caught.value)[ORT_QDQ].verdict
    assert verdict.drop == pytest.approx(100 * (verdict.reference_metric.value - verdict.metric.value))
    assert verdict.drop > 10
    assert not (tmp_path / "rejected").exists()

    # In a search it is one of several candidates, and the others are judged independently.
    others = quick_build(model, tmp_path / "others", precision="int8", keep="all", search_budget_s=1e-3, **options)
    assert candidates(others)[ORT_QDQ].status is Status.INACCURATE
    assert {Status.CHOSEN} == {candidates(others)["onnxruntime-int8"].status}
    assert {entry.precision for entry in others.manifest.variants} == {"int8"}

    assert model.training
    assert all(part.is_active for name, part in qdq.quantizers(model).items() if name.endswith("input_quantizer"))
    after = model.state_dict()
    assert all(
        torch.equal(before[name], after[name]) for name in before if "amax" not in name or before[name].isfinite().all()
    )


def test_uncalibrated_quantizers_are_rejected_and_disabled_ones_ignored(
    fitted: Path, data: Path, quick_build: Any, no_leftovers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"tokenizer": tokenizer_of(fitted), "data": data}
    # Inside patched(), where every new model gets quantizers.
    with qdq.patched():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(fitted).eval()
        with pytest.raises(PlanError, match="the quantizers of BertForSequenceClassification are not calibrated"):
            hasten.build(model, no_leftovers, **options)
        qdq.disable(model)
        bundle = quick_build(model, variants=["onnxruntime-fp32"], **options)
        assert is_rewritten(type(transformers.AutoModelForSequenceClassification.from_pretrained(fitted)))
    assert [record.message for record in caplog.records if "quantizers" in record.message] == [
        "all quantizers of BertForSequenceClassification are disabled: it is built as a float model"
    ]
    text = tiny_encoders.CORPUS[0]
    np.testing.assert_allclose(
        outputs_of(bundle, "onnxruntime-fp32", [text]), logits(model, feeds_of(fitted, [text])), atol=SAME
    )
    with pytest.raises(PlanError, match=r"made by quantizers in the module, and BertForSequence.* has none"):
        hasten.build(model, no_leftovers, variants=ORT_QDQ, **options)


def test_directory_builds_the_same_inside_patched(fitted: Path, data: Path, quick_build: Any) -> None:
    with qdq.patched():
        bundle = quick_build(fitted, variants=["onnxruntime-fp32"], data=data)
    assert candidates(bundle)["onnxruntime-fp32"].status is Status.CHOSEN


def test_fp8_quantizers_are_rejected_on_the_cpu(fitted: Path, no_leftovers: Path) -> None:
    with qdq.patched("fp8"), qdq.calibration("max") as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(fitted).eval()
        calibrate(model, [feeds_of(fitted, list(tiny_encoders.CORPUS))])
    options = {"tokenizer": tokenizer_of(fitted), "device": "cpu"}
    with pytest.raises(UnsupportedError, match="round to fp8, in which no backend computes on the cpu"):
        hasten.build(model, no_leftovers, **options)
    with pytest.raises(PlanError, match=r"qdq cannot be made: the quantizers of .* round to fp8"):
        hasten.build(model, no_leftovers, tokenizer=tokenizer_of(fitted), variants=ORT_QDQ)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_fused_kernels_use_the_quantizers_on_a_gpu(
    precision: str, fitted: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test the candidates only; the kernels have their own tests."""
    gpu = Gpu("NVIDIA H200", 2**37, "9.0", "580")
    machine = replace(this_machine(), gpus=(gpu,))
    monkeypatch.setattr("hasten.builder.preflight.this_machine", lambda: machine)
    monkeypatch.setattr("hasten.backends.fused.probe_torch_gpu", lambda _: Support.yes())
    monkeypatch.setattr("hasten.builder.encoder_build.EncoderBuild.run", lambda build: build.resolved.preview)
    with qdq.patched(precision), qdq.calibration("max") as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(fitted).eval()
        calibrate(model, [feeds_of(fitted, list(tiny_encoders.CORPUS))])
    fields = hasten.build(model, tokenizer=tokenizer_of(fitted), data=data, device="cuda")
    assert f"fused-{precision}+qdq@cuda" in fields.contenders
    assert not fields.notes


def test_unsupported_modules_with_quantizers_are_rejected(module: Any, fitted: Path, no_leftovers: Path) -> None:
    import peft

    tokenizer = tokenizer_of(fitted)
    with pytest.raises(
        UnsupportedError, match="in a BertForSequenceClassification, and sentence-similarity needs a Bert"
    ):
        hasten.build(module, no_leftovers, tokenizer=tokenizer, task="sentence-similarity", pooling="mean")
    adapted = peft.get_peft_model(copy.deepcopy(module), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(UnsupportedError, match="PeftModel has quantizers and adapters"):
        hasten.build(adapted, no_leftovers, tokenizer=tokenizer)

    words = tiny_generators.tokenizer(has_end=False)
    with qdq.patched(), qdq.calibration("max") as calibrate:
        generator = tiny_generators.module("llama")
        calibrate(generator, [words(list(tiny_encoders.CORPUS), padding=True, return_tensors="pt")])
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has quantizers, which are not supported for"):
        hasten.build(generator, no_leftovers, tokenizer=words)


def test_qdq_variant_of_a_directory_is_rejected(
    fitted: Path, no_leftovers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(fitted), "-o", str(no_leftovers), "--variants", ORT_QDQ]) == PlanError.exit_code
    message = capsys.readouterr().err
    assert f"{ORT_QDQ} is made by quantizers in the module, and {fitted} has none" in message
    assert "qdq.patched()" in message


def test_unused_quantizers_are_noted(module: Any, fitted: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.builder.encoder_build.EncoderBuild.run", lambda build: build.resolved.preview)
    options = {"tokenizer": tokenizer_of(fitted), "data": data}
    [note] = hasten.build(module, variants="onnxruntime-fp32", **options).notes
    assert note.endswith(f"are not used: {ORT_QDQ} is not among the variants to try")
    outline = hasten.build(module, **options)
    assert ORT_QDQ in outline.contenders
    assert not outline.notes


@needs_exact_int8_sums
def test_pooling_follows_the_quantized_module(tiny_embedder: Any, quick_build: Any) -> None:
    from sentence_transformers import SentenceTransformer

    with qdq.patched(), qdq.calibration("max") as calibrate:
        model = SentenceTransformer(str(tiny_embedder()), device="cpu", local_files_only=True)
        calibrate(model[0].auto_model, [model.tokenizer(list(tiny_encoders.CORPUS), padding=True, return_tensors="pt")])
    bundle = quick_build(model, variants=[ORT_QDQ], min_agreement=0.5)
    expected = model.encode(list(tiny_encoders.CORPUS))
    with hasten.load(bundle.path, threads=1) as embed:
        actual = embed(list(tiny_encoders.CORPUS))
    assert (actual * expected).sum(axis=1).min() > 0.99
    qdq.disable(model)
    np.testing.assert_allclose(
        bundle.reference().outputs["embedding"][: len(tiny_encoders.CORPUS)],
        model.encode(list(tiny_encoders.CORPUS)),
        atol=SAME,
    )


@needs_exact_int8_sums
def test_masked_positions_match_the_rounded_module(tiny_model: Any, tmp_path: Path, quick_build: Any) -> None:
    folder = tiny_model("bert", "ForMaskedLM", initializer_range=0.15)
    model = quantized(folder, "AutoModelForMaskedLM")
    hooks = len(model.base_model._forward_hooks)
    texts = [text.replace(text.split()[2], "[MASK]", 1) for text in tiny_encoders.CORPUS]
    file = tmp_path / "masked.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    bundle = quick_build(
        model, tokenizer=tokenizer_of(folder), task="fill-mask", variants=[ORT_QDQ], data=file, min_agreement=0.0
    )
    feeds = feeds_of(folder, texts)
    expected = logits(model, feeds)[feeds["input_ids"].numpy() == tokenizer_of(folder).mask_token_id]
    actual = outputs_of(bundle, ORT_QDQ, texts)
    assert np.abs(actual - expected).max() < CLOSE * np.abs(expected).max()
    assert len(model.base_model._forward_hooks) == hooks
