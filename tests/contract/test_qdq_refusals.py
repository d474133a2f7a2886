"""What calibration, search and export are given wrongly: one clear line, and a model that is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnx")

from hasten.core.errors import InputError, PlanError, StageError, UnsupportedError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert")
    tiny.save("bert", "ForSequenceClassification", made, initializer_range=0.15)
    return made


@pytest.fixture(scope="module")
def batch(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)(list(tiny.CORPUS), padding=True, return_tensors="pt")


@pytest.fixture
def model(folder: Path) -> Any:
    return made(folder)


@pytest.fixture
def calibrated(model: Any, batch: Any) -> Any:
    calibrate(model, [batch])
    return model


def made(folder: Path, precision: str = "int8") -> Any:
    with qdq.patched(precision):
        return transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()


def calibrate(model: Any, batches: Any, method: str = "max") -> None:
    with qdq.calibration(method) as run:
        run(model, batches)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


@pytest.mark.parametrize("mistake", ["one batch", "a text", "no tensors"])
def test_batches_are_dictionaries_of_tensors(mistake: str, model: Any, batch: Any) -> None:
    wrong = {"one batch": batch, "a text": ["a text"], "no tensors": [{"input_ids": [[1, 2]]}]}[mistake]
    with pytest.raises(InputError, match=r"takes a list of dictionaries of tensors \(.*return_tensors='pt'"):
        calibrate(model, wrong)
    assert not any(part.observer for part in qdq.quantizers(model).values())


def test_numbers_that_are_not_finite_are_told_by_where_they_are(model: Any, batch: Any) -> None:
    with torch.no_grad():
        model.classifier.weight.fill_(torch.inf)
    with pytest.raises(StageError, match="the weights of classifier are not finite"):
        calibrate(model, [batch])
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.value.bias.fill_(torch.nan)
    with pytest.raises(StageError, match=r"not finite at bert\.encoder\.layer\.0\.attention\.self\.value_quantizer"):
        calibrate(model, [batch])


def test_there_is_nothing_to_search_before_calibration(model: Any) -> None:
    with pytest.raises(PlanError, match=r"is on and calibrated \(calibrate it first\)"):
        qdq.sensitivity(model, always(0.0))


@pytest.mark.parametrize(("given", "said"), [(None, "None, which is no number"), (float("nan"), "nan, which")])
def test_an_evaluation_that_cannot_be_compared_is_refused(given: Any, said: str, calibrated: Any, batch: Any) -> None:
    with pytest.raises(InputError, match=said):
        qdq.sensitivity(calibrated, always(given))
    with pytest.raises(InputError, match=said):
        qdq.grid_search(calibrated, [batch], always(given))
    assert calibrated.classifier.input_quantizer.is_active


def test_an_evaluation_that_fails_leaves_quantizers_on(calibrated: Any) -> None:
    before = {name: part.is_enabled for name, part in qdq.quantizers(calibrated).items()}

    def fail(_: Any) -> float:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        qdq.sensitivity(calibrated, fail)
    assert {name: part.is_enabled for name, part in qdq.quantizers(calibrated).items()} == before


def test_a_metric_of_torch_is_a_number(calibrated: Any) -> None:
    found = qdq.sensitivity(calibrated, always(torch.tensor(0.5)), qdq.groups(calibrated))
    first, second, *_ = str(found).splitlines()
    assert first.split() == ["all", "off", "0.5000"]
    assert second.split()[1:] == ["0.5000", "+0.0000"], "what costs nothing is not less than nothing"


def test_groups_may_be_patterns(calibrated: Any) -> None:
    """They are found by name once, so that a search switches off what it asked about."""
    layers = {str(place): [f"*.layer.{place}.*.dense.*"] for place in range(2)}
    found = qdq.sensitivity(calibrated, always(0.0), layers)
    assert [len(each.quantizers) for each in found.costs] == [6, 6]
    assert len(qdq.relax(calibrated, always(-1.0), found, max_drop=0.5)) == 12


def test_a_search_asks_only_after_something_changed(calibrated: Any) -> None:
    """Evaluations are what takes long, and a linear layer has two quantizers that go off together."""
    calls: list[Any] = []

    def evaluate(model: Any) -> float:
        calls.append(sum(part.is_active for part in qdq.quantizers(model).values()))
        return -1.0 if calls[-1] else 0.0

    found = qdq.sensitivity(calibrated, evaluate)
    calls.clear()
    active = [name for name, part in qdq.quantizers(calibrated).items() if part.is_active]
    assert sorted(qdq.relax(calibrated, evaluate, found, max_drop=0.5)) == sorted(active)
    assert calls == sorted(set(calls), reverse=True)


def test_ways_that_a_precision_does_not_know_are_not_tried(folder: Path, batch: Any) -> None:
    model, seen = made(folder, "fp8"), []

    def batches() -> Iterator[Any]:
        seen.append(batch)
        yield batch

    with pytest.raises(PlanError, match="entropy"):
        calibrate(model, batches(), "entropy")
    assert not seen, "told before the batches are seen"
    ranked = qdq.grid_search(model, batches(), always(0.0))
    assert "entropy" not in ranked
    assert len(ranked) == 5


def test_frozen_parts_stay_frozen(folder: Path, calibrated: Any, batch: Any, tmp_path: Path) -> None:
    calibrated.train().bert.embeddings.eval()
    before = {name: part.training for name, part in calibrated.named_modules()}
    calibrate(calibrated, [batch])
    qdq.export(calibrated, transformers.AutoTokenizer.from_pretrained(folder), tmp_path)
    assert {name: part.training for name, part in calibrated.named_modules()} == before


def test_an_export_that_fails_leaves_the_model_in_training(calibrated: Any, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no words")

    with pytest.raises(UnsupportedError, match="does not take texts as its tokenizer gives them: ValueError: no words"):
        qdq.export(calibrated.train(), broken, tmp_path)
    assert calibrated.training


def test_what_makes_no_sense_is_refused(folder: Path, model: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="int4"), qdq.patched("int4"):
        pass
    with pytest.raises(PlanError, match="median"), qdq.calibration("median"):
        pass
    with pytest.raises(PlanError, match="calibrate it first"):
        qdq.export(model, transformers.AutoTokenizer.from_pretrained(folder), tmp_path)
    with pytest.raises(PlanError, match=r"no quantizer is called '\*\.decoder\.\*'"):
        qdq.disable(model, "*.decoder.*")
    with pytest.raises(InputError, match="no batches"):
        calibrate(model, [])


def test_a_model_that_cannot_be_rewritten_says_where(tmp_path: Path) -> None:
    tiny.save("xlnet", "ForSequenceClassification", tmp_path)
    with pytest.raises(UnsupportedError, match=r"torch\.einsum in '.*modeling_xlnet\.py:\d+"):
        made(tmp_path)
