"""Calibrate a module: find the range of every quantizer on representative batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hasten.core.errors import InputError, PlanError, StageError
from hasten.core.variant import Precision
from hasten.quantize.qdq.quantizer import QuantizedLinear
from hasten.quantize.qdq.ranges import Histogram, RangeMethod, check_method, find_range
from hasten.quantize.qdq.sensitivity import checked_score
from hasten.quantize.qdq.toggle import evaluating, quantizers, switched

# A model's keyword arguments, such as a tokenizer's output.
Feeds: TypeAlias = Mapping[str, Any]
Choice: TypeAlias = str | tuple[str, float]

CHOICES: tuple[Choice, ...] = (
    RangeMethod.MAX,
    (RangeMethod.PERCENTILE, 99.9),
    (RangeMethod.PERCENTILE, 99.99),
    (RangeMethod.PERCENTILE, 99.999),
    RangeMethod.ENTROPY,
    RangeMethod.MSE,
)


@contextmanager
def calibration(method: str = RangeMethod.MSE, value: float | None = None) -> Iterator[Callable[..., None]]:
    """Return `calibrate(model, batches)`, which leaves the model quantized; batches are read one at a time."""
    check_method(method, value, Precision.INT8)

    def calibrate(model: nn.Module, batches: Iterable[Feeds]) -> None:
        _check_choices(model, [(method, value)])
        set_ranges(model, observe(model, batches), (method, value))

    yield calibrate


def observe(model: nn.Module, batches: Iterable[Feeds]) -> dict[str, Histogram]:
    """Return a histogram of the inputs of every activation quantizer, while the model computes in float."""
    parts = {name: part for name, part in quantizers(model).items() if part.channels is None}
    histograms = {name: Histogram(name) for name in parts}
    count, device = 0, next(model.parameters()).device
    try:
        for name, part in parts.items():
            part.observer = histograms[name].update
        with torch.no_grad(), evaluating(model), switched(model, off=("*",)):  # the ranges are those of the float model
            for feeds in batches:
                model(**_to_device(device, feeds))
                count += 1
    finally:
        for part in parts.values():
            part.observer = None
    if not count:
        raise InputError("there are no batches to calibrate on")
    return histograms


def set_ranges(model: nn.Module, histograms: Mapping[str, Histogram], choice: tuple[str, float | None]) -> None:
    """Set all activation ranges by one method, and the weight ranges to the maximum of each channel."""
    method, value = choice
    for name, part in quantizers(model).items():
        if part.channels is not None:
            continue
        # A quantizer that the batches never reached (a branch for other inputs) stays in float.
        if histograms[name].counts.sum():
            part.set_range(find_range(histograms[name], method, value, part.precision))
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLinear):
            if not part.weight.isfinite().all():
                raise StageError(f"the weights of {name} are not finite", hint="the float model is broken already")
            part.measure_weight()


def grid_search(
    model: nn.Module,
    batches: Iterable[Feeds],
    evaluate: Callable[[nn.Module], float],
    choices: Sequence[Choice] | None = None,
) -> dict[Choice, float]:
    """Calibrate by each choice, score each with `evaluate` (higher is better), and keep the best; return all scores.

    The best comes first. Without `choices`, all methods that support the precision of the quantizers are tried.
    """
    if choices is None:
        is_int8 = all(part.precision is Precision.INT8 for part in quantizers(model).values())
        choices = [choice for choice in CHOICES if is_int8 or choice != RangeMethod.ENTROPY]
    if not choices:
        raise PlanError("there are no choices to search")
    _check_choices(model, [_as_pair(choice) for choice in choices])
    histograms = observe(model, batches)
    scores: dict[Choice, float] = {}
    for choice in choices:
        set_ranges(model, histograms, _as_pair(choice))
        scores[choice] = checked_score(evaluate, model)
    ranked = dict(sorted(scores.items(), key=lambda pair: pair[1], reverse=True))
    set_ranges(model, histograms, _as_pair(next(iter(ranked))))
    return ranked


def _check_choices(model: nn.Module, choices: Sequence[tuple[str, float | None]]) -> None:
    """Check the choices before the batches are run, which may take long."""
    for precision in {part.precision for part in quantizers(model).values()}:
        for method, value in choices:
            check_method(method, value, precision)


def _to_device(device: torch.device, feeds: Any) -> dict[str, Tensor]:
    if not isinstance(feeds, Mapping) or not all(isinstance(value, Tensor) for value in feeds.values()):
        raise InputError(
            f"a {type(feeds).__name__} is not a batch: calibration takes a list of dictionaries of tensors",
            hint="[tokenizer(texts, padding=True, return_tensors='pt'), ...]",
        )
    return {name: value.to(device) for name, value in feeds.items()}


def _as_pair(choice: Choice) -> tuple[str, float | None]:
    return (choice, None) if isinstance(choice, str) else choice
