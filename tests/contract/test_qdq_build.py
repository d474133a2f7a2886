"""A build from a module with quantizers: compared with itself in float, they make one variant that the gate judges."""

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
import tiny
import tiny_writers
from hasten.builder.inspect import inspect
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.errors import AccuracyError, PlanError, UnsupportedError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.report import Status
from hasten.core.variant import Support

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnx")

from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.rewrite import is_rewritten  # noqa: E402

OF_QUANTIZERS = "onnxruntime-int8+qdq"
BOTH = ["onnxruntime-fp32", OF_QUANTIZERS]
LABELS = ("bad", "good")
# Relative to the largest logit: see test_qdq.py.
CLOSE = 0.05
# Layers of the tiny model, products of a layer in linear layers and in attention.
LAYERS, PRODUCTS = 2, 6 + 2


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """Texts of one half of the corpus' words or the other."""
    draw = random.Random(3)
    words = [sorted({word for text in half for word in text.split()}) for half in (tiny.CORPUS[:4], tiny.CORPUS[4:])]
    return [{"text": " ".join(draw.sample(words[place % 2], 7)), "label": LABELS[place % 2]} for place in range(64)]


@pytest.fixture(scope="module")
def data(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def fitted(rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the answers: of one that does not, any rounding makes another."""
    folder = tmp_path_factory.mktemp("fitted")
    about = {"id2label": dict(enumerate(LABELS)), "label2id": {label: place for place, label in enumerate(LABELS)}}
    tiny.save("bert", "ForSequenceClassification", folder, initializer_range=0.15, **about)
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
        calibrate(model, [feeds_of(folder, list(tiny.CORPUS))])
    return model


def narrowed(model: Any) -> Any:
    """Ranges far too small: what is calibrated on nothing but zeros comes out so."""
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
    found = source.report.candidates if isinstance(source, Bundle) else source.candidates
    return {candidate.variant: candidate for candidate in found}


@pytest.fixture(scope="module")
def module(fitted: Path) -> Any:
    return quantized(fitted)


@pytest.fixture(scope="module")
def bundle(module: Any, fitted: Path, data: Path, quick_build: Any) -> Bundle:
    return quick_build(module, tokenizer=tokenizer_of(fitted), variants=BOTH, data=data, max_drop=1.0, keep="all")


def test_the_original_is_the_module_in_float(
    bundle: Bundle, module: Any, fitted: Path, rows: list[dict[str, str]]
) -> None:
    feeds = feeds_of(fitted, [row["text"] for row in rows])
    expected = in_float(module, feeds)
    assert np.abs(expected - logits(module, feeds)).max() > 1e-3, "rounding must show, or nothing here can"
    np.testing.assert_allclose(bundle.reference().outputs["logits"], expected, atol=1e-5)
    assert bundle.manifest.graph_precision == "fp32"
    np.testing.assert_allclose(
        outputs_of(bundle, "onnxruntime-fp32", [row["text"] for row in rows]), expected, atol=1e-4
    )
    assert bundle.report.bench.baseline == "torch-fp32"
    assert "QuantizeLinear" not in next(step for step in bundle.report.passes if step.name == "export").operators_after


def test_the_variant_answers_as_the_module_rounds(
    bundle: Bundle, module: Any, fitted: Path, rows: list[dict[str, str]]
) -> None:
    texts = [row["text"] for row in rows]
    expected = logits(module, feeds_of(fitted, texts))
    found = outputs_of(bundle, OF_QUANTIZERS, texts)
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
    assert np.abs(found - in_float(module, feeds_of(fitted, texts))).max() > 1e-3
    alone = np.concatenate([outputs_of(bundle, OF_QUANTIZERS, [text]) for text in texts[:4]])
    np.testing.assert_allclose(alone, found[:4], atol=1e-5)


def test_it_is_judged_like_any_other(bundle: Bundle) -> None:
    found = candidates(bundle)[OF_QUANTIZERS]
    assert found.status in (Status.CHOSEN, Status.ELIGIBLE)
    assert found.verdict.reference_metric.value > 0.9
    assert found.verdict.drop_interval is not None
    entry = bundle.entry(OF_QUANTIZERS)
    assert (entry.precision, entry.depends_on_batch) == ("int8", False)
    assert "recipe.toml" not in [file.name for file in bundle.artifact(entry).directory.iterdir()]


def test_it_runs_in_integers(bundle: Bundle) -> None:
    looked = inspect(bundle, OF_QUANTIZERS)
    assert [step.name for step in looked.passes] == ["export", "fold", "fuse", "prune", "split norms"]
    [view] = looked.graphs
    ran = {execution.operator: execution.count for execution in view.executed}
    assert ran.get("MatMulIntegerToFloat", 0) + ran.get("QLinearMatMul", 0) >= LAYERS * PRODUCTS
    assert not ran.get("MatMul", 0) + ran.get("FusedMatMul", 0)


def test_ranges_that_are_far_too_narrow_are_refused(fitted: Path, data: Path, tmp_path: Path, quick_build: Any) -> None:
    model = narrowed(quantized(fitted)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    asked = {"tokenizer": tokenizer_of(fitted), "data": data, "max_drop": 1.0}
    with pytest.raises(AccuracyError, match="may be used") as caught:
        quick_build(model, tmp_path / "refused", variants=[OF_QUANTIZERS], **asked)
    verdict = candidates(caught.value)[OF_QUANTIZERS].verdict
    assert verdict.drop == pytest.approx(100 * (verdict.reference_metric.value - verdict.metric.value))
    assert verdict.drop > 10
    assert not (tmp_path / "refused").exists()

    # Among others it is one that was tried, and none of them is any other's excuse.
    others = quick_build(model, tmp_path / "others", precision="int8", budget_s=1e-3, **asked)
    assert candidates(others)[OF_QUANTIZERS].status is Status.INACCURATE
    assert {Status.CHOSEN} == {candidates(others)["onnxruntime-int8"].status}
    assert {entry.precision for entry in others.manifest.variants} == {"int8"}

    assert model.training
    assert all(part.is_active for name, part in qdq.quantizers(model).items() if name.endswith("input_quantizer"))
    after = model.state_dict()
    assert all(
        torch.equal(before[name], after[name]) for name in before if "amax" not in name or before[name].isfinite().all()
    )


def test_without_ranges_it_is_refused_and_with_all_off_it_is_a_float_model(
    fitted: Path, data: Path, quick_build: Any, no_leftovers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"tokenizer": tokenizer_of(fitted), "data": data}
    # All of it inside, where every model that is made would have quantizers.
    with qdq.patched():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(fitted).eval()
        with pytest.raises(PlanError, match="the quantizers of BertForSequenceClassification are not calibrated"):
            hasten.build(model, no_leftovers, **asked)
        qdq.disable(model)
        bundle = quick_build(model, variants=["onnxruntime-fp32"], **asked)
        assert is_rewritten(type(transformers.AutoModelForSequenceClassification.from_pretrained(fitted)))
    assert [record.message for record in caplog.records if "quantizers" in record.message] == [
        "all quantizers of BertForSequenceClassification are off: it is built as the float model that it is"
    ]
    text = tiny.CORPUS[0]
    np.testing.assert_allclose(
        outputs_of(bundle, "onnxruntime-fp32", [text]), logits(model, feeds_of(fitted, [text])), atol=1e-4
    )
    with pytest.raises(PlanError, match=r"made by quantizers in the module, and BertForSequence.* has none"):
        hasten.build(model, no_leftovers, variants=OF_QUANTIZERS, **asked)


def test_a_directory_is_built_inside_of_patched_as_outside(fitted: Path, data: Path, quick_build: Any) -> None:
    with qdq.patched():
        bundle = quick_build(fitted, variants=["onnxruntime-fp32"], data=data)
    assert candidates(bundle)["onnxruntime-fp32"].status is Status.CHOSEN


def test_quantizers_that_no_bundle_runs_are_refused(fitted: Path, no_leftovers: Path) -> None:
    with qdq.patched("fp8"), qdq.calibration("max") as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(fitted).eval()
        calibrate(model, [feeds_of(fitted, list(tiny.CORPUS))])
    asked = {"tokenizer": tokenizer_of(fitted), "device": "cpu"}
    with pytest.raises(UnsupportedError, match="round to fp8, and nothing computes in it on the cpu"):
        hasten.build(model, no_leftovers, **asked)
    with pytest.raises(PlanError, match=r"qdq cannot be made by quantizers that round to fp8"):
        hasten.build(model, no_leftovers, tokenizer=tokenizer_of(fitted), variants=OF_QUANTIZERS)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_on_a_gpu_the_fused_kernels_take_their_ranges(
    precision: str, fitted: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be tried there; what it computes is tested with the kernels."""
    gpu = Gpu("NVIDIA H200", 2**37, "9.0", "580")
    machine = replace(this_machine(), gpus=(gpu,))
    monkeypatch.setattr("hasten.builder.outline.this_machine", lambda: machine)
    monkeypatch.setattr("hasten.backends.fused.probe_torch_gpu", lambda _: Support.yes())
    monkeypatch.setattr("hasten.builder.build._Build.run", lambda build: build.about)
    with qdq.patched(precision), qdq.calibration("max") as calibrate:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(fitted).eval()
        calibrate(model, [feeds_of(fitted, list(tiny.CORPUS))])
    about = hasten.build(model, tokenizer=tokenizer_of(fitted), data=data, device="cuda")
    assert f"fused-{precision}+qdq@cuda" in about.contenders
    assert not about.notes


def test_quantizers_where_no_variant_can_be_made_of_them_are_refused(
    module: Any, fitted: Path, no_leftovers: Path
) -> None:
    import peft

    tokenizer = tokenizer_of(fitted)
    with pytest.raises(
        UnsupportedError, match="in a BertForSequenceClassification, and sentence-similarity takes a Bert"
    ):
        hasten.build(module, no_leftovers, tokenizer=tokenizer, task="sentence-similarity", pooling="mean")
    adapted = peft.get_peft_model(copy.deepcopy(module), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(UnsupportedError, match="PeftModel has quantizers and adapters"):
        hasten.build(adapted, no_leftovers, tokenizer=tokenizer)

    words = tiny_writers.tokenizer(has_end=False)
    with qdq.patched(), qdq.calibration("max") as calibrate:
        writer = tiny_writers.module("llama")
        calibrate(writer, [words(list(tiny.CORPUS), padding=True, return_tensors="pt")])
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has quantizers, and of a model that writes"):
        hasten.build(writer, no_leftovers, tokenizer=words)


def test_a_directory_has_no_quantizers(fitted: Path, no_leftovers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(fitted), "-o", str(no_leftovers), "--variants", OF_QUANTIZERS]) == PlanError.exit_code
    said = capsys.readouterr().err
    assert f"{OF_QUANTIZERS} is made by quantizers in the module, and {fitted} has none" in said
    assert "qdq.patched()" in said


def test_quantizers_that_are_not_asked_for_are_told_of(
    module: Any, fitted: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.builder.build._Build.run", lambda build: build.about)
    asked = {"tokenizer": tokenizer_of(fitted), "data": data}
    [note] = hasten.build(module, variants="onnxruntime-fp32", **asked).notes
    assert note.endswith(f"are not used: {OF_QUANTIZERS} is not among what is tried")
    outline = hasten.build(module, **asked)
    assert OF_QUANTIZERS in outline.contenders
    assert not outline.notes


def test_pooling_stands_behind_quantizers_too(tiny_embedder: Any, quick_build: Any) -> None:
    from sentence_transformers import SentenceTransformer

    with qdq.patched(), qdq.calibration("max") as calibrate:
        model = SentenceTransformer(str(tiny_embedder()), device="cpu", local_files_only=True)
        calibrate(model[0].auto_model, [model.tokenizer(list(tiny.CORPUS), padding=True, return_tensors="pt")])
    bundle = quick_build(model, variants=[OF_QUANTIZERS], min_agreement=0.5)
    expected = model.encode(list(tiny.CORPUS))
    with hasten.load(bundle.path, threads=1) as embed:
        found = embed(list(tiny.CORPUS))
    assert (found * expected).sum(axis=1).min() > 0.99
    qdq.disable(model)
    np.testing.assert_allclose(
        bundle.reference().outputs["embedding"][: len(tiny.CORPUS)], model.encode(list(tiny.CORPUS)), atol=1e-4
    )


def test_mask_tokens_alone_are_rounded_as_among_all(tiny_model: Any, tmp_path: Path, quick_build: Any) -> None:
    folder = tiny_model("bert", "ForMaskedLM", initializer_range=0.15)
    model = quantized(folder, "AutoModelForMaskedLM")
    hooks = len(model.base_model._forward_hooks)
    texts = [text.replace(text.split()[2], "[MASK]", 1) for text in tiny.CORPUS]
    file = tmp_path / "masked.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    bundle = quick_build(
        model, tokenizer=tokenizer_of(folder), task="fill-mask", variants=[OF_QUANTIZERS], data=file, min_agreement=0.0
    )
    feeds = feeds_of(folder, texts)
    expected = logits(model, feeds)[feeds["input_ids"].numpy() == tokenizer_of(folder).mask_token_id]
    found = outputs_of(bundle, OF_QUANTIZERS, texts)
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
    assert len(model.base_model._forward_hooks) == hooks
