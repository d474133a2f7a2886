"""Invalid input to calibration, search and export: clear errors, and a model that stays unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.models import tiny_encoders

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnx")

from hasten.core.errors import InputError, PlanError, StageError, UnsupportedError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    tiny_encoders.save("bert", "ForSequenceClassification", directory, initializer_range=0.15)
    return directory


@pytest.fixture(scope="module")
def batch(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)(
        list(tiny_encoders.CORPUS), padding=True, return_tensors="pt"
    )


@pytest.fixture
def model(folder: Path) -> Any:
    return patched_model(folder)


@pytest.fixture
def calibrated(model: Any, batch: Any) -> Any:
    calibrate(model, [batch])
    return model


def patched_model(folder: Path, precision: str = "int8") -> Any:
    with qdq.patched(precision):
        return transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()


def calibrate(model: Any, batches: Any, method: str = "max") -> None:
    with qdq.calibration(method) as run:
        run(model, batches)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


@pytest.mark.parametrize("mistake", ["one batch", "a text", "no tensors"])
def test_batches_must_be_dictionaries_of_tensors(mistake: str, model: Any, batch: Any) -> None:
    wrong = {"one batch": batch, "a text": ["a text"], "no tensors": [{"input_ids": [[1, 2]]}]}[mistake]
    with pytest.raises(InputError, match=r"takes a list of dictionaries of tensors \(.*return_tensors='pt'"):
        calibrate(model, wrong)
    assert not any(part.observer for part in qdq.quantizers(model).values())


def test_non_finite_values_are_reported_with_their_location(model: Any, batch: Any) -> None:
    with torch.no_grad():
        model.classifier.weight.fill_(torch.inf)
    with pytest.raises(StageError, match="the weights of classifier are not finite"):
        calibrate(model, [batch])
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.value.bias.fill_(torch.nan)
    with pytest.raises(StageError, match=r"layer\.0\.attention\.self\.value_quantizer is not finite"):
        calibrate(model, [batch])


def test_sensitivity_before_calibration_is_rejected(model: Any) -> None:
    with pytest.raises(PlanError, match=r"is enabled and calibrated \(calibrate it first\)"):
        qdq.sensitivity(model, always(0.0))


@pytest.mark.parametrize(("score", "message"), [(None, "None, which is not a number"), (float("nan"), "nan, which")])
def test_scores_that_cannot_be_compared_are_rejected(score: Any, message: str, calibrated: Any, batch: Any) -> None:
    with pytest.raises(InputError, match=message):
        qdq.sensitivity(calibrated, always(score))
    with pytest.raises(InputError, match=message):
        qdq.grid_search(calibrated, [batch], always(score))
    assert calibrated.classifier.input_quantizer.is_active


def test_failing_evaluation_leaves_quantizers_unchanged(calibrated: Any) -> None:
    before = {name: part.is_enabled for name, part in qdq.quantizers(calibrated).items()}

    def fail(_: Any) -> float:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        qdq.sensitivity(calibrated, fail)
    assert {name: part.is_enabled for name, part in qdq.quantizers(calibrated).items()} == before


def test_score_may_be_a_torch_scalar(calibrated: Any) -> None:
    measured = qdq.sensitivity(calibrated, always(torch.tensor(0.5)), qdq.groups(calibrated))
    first, second, *_ = str(measured).splitlines()
    assert first.split() == ["all", "off", "0.5000"]
    assert second.split()[1:] == ["0.5000", "+0.0000"], "a cost of zero is not negative"


def test_groups_may_be_patterns(calibrated: Any) -> None:
    """Patterns are resolved once, so that relax disables the quantizers that were measured."""
    layers = {str(layer): [f"*.layer.{layer}.*.dense.*"] for layer in range(2)}
    measured = qdq.sensitivity(calibrated, always(0.0), layers)
    assert [len(each.quantizers) for each in measured.costs] == [6, 6]
    assert len(qdq.relax(calibrated, always(-1.0), measured, max_drop=0.5)) == 12


def test_relax_evaluates_only_after_a_change(calibrated: Any) -> None:
    """Evaluations take long, and the two quantizers of a linear layer are disabled together."""
    calls: list[Any] = []

    def evaluate(model: Any) -> float:
        calls.append(sum(part.is_active for part in qdq.quantizers(model).values()))
        return -1.0 if calls[-1] else 0.0

    measured = qdq.sensitivity(calibrated, evaluate)
    calls.clear()
    active = [name for name, part in qdq.quantizers(calibrated).items() if part.is_active]
    assert sorted(qdq.relax(calibrated, evaluate, measured, max_drop=0.5)) == sorted(active)
    assert calls == sorted(set(calls), reverse=True)


def test_methods_that_do_not_support_the_precision_are_not_tried(folder: Path, batch: Any) -> None:
    model, consumed = patched_model(folder, "fp8"), []

    def batches() -> Iterator[Any]:
        consumed.append(batch)
        yield batch

    with pytest.raises(PlanError, match="entropy"):
        calibrate(model, batches(), "entropy")
    assert not consumed, "the method is checked before the batches are read"
    ranked = qdq.grid_search(model, batches(), always(0.0))
    assert "entropy" not in ranked
    assert len(ranked) == 5


def test_frozen_modules_stay_frozen(folder: Path, calibrated: Any, batch: Any, tmp_path: Path) -> None:
    calibrated.train().bert.embeddings.eval()
    before = {name: part.training for name, part in calibrated.named_modules()}
    calibrate(calibrated, [batch])
    qdq.export(calibrated, transformers.AutoTokenizer.from_pretrained(folder), tmp_path)
    assert {name: part.training for name, part in calibrated.named_modules()} == before


def test_failing_export_leaves_the_model_in_training(calibrated: Any, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no words")

    with pytest.raises(UnsupportedError, match="fails on its tokenizer's output: ValueError: no words"):
        qdq.export(calibrated.train(), broken, tmp_path)
    assert calibrated.training


def test_invalid_arguments_are_rejected(folder: Path, model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="int4"), qdq.patched("int4"):
        pass
    with pytest.raises(PlanError, match="median"), qdq.calibration("median"):
        pass
    with pytest.raises(PlanError, match="calibrate it first"):
        qdq.export(model, transformers.AutoTokenizer.from_pretrained(folder), tmp_path)
    with pytest.raises(PlanError, match=r"no quantizer matches '\*\.decoder\.\*'"):
        qdq.disable(model, "*.decoder.*")
    with pytest.raises(InputError, match="no batches"):
        calibrate(model, [])


def test_unsupported_model_is_rejected_with_file_and_line(tmp_path: Path) -> None:
    tiny_encoders.save("xlnet", "ForSequenceClassification", tmp_path)
    with pytest.raises(UnsupportedError, match=r"torch\.einsum in '.*modeling_xlnet\.py:\d+"):
        patched_model(tmp_path)
