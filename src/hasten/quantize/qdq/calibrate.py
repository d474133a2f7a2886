"""Finding the range of every quantizer from rows that look like those to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hasten.core.errors import InputError, PlanError, StageError
from hasten.core.variant import Precision
from hasten.quantize.qdq.quantizer import QuantizedLinear
from hasten.quantize.qdq.ranges import Histogram, Method, check_method, find_range
from hasten.quantize.qdq.sensitivity import asked
from hasten.quantize.qdq.switch import evaluating, quantizers, switched

# What a model is called with, or a tokenizer's output.
Feeds: TypeAlias = Mapping[str, Any]
Choice: TypeAlias = str | tuple[str, float]

CHOICES: tuple[Choice, ...] = (
    Method.MAX,
    (Method.PERCENTILE, 99.9),
    (Method.PERCENTILE, 99.99),
    (Method.PERCENTILE, 99.999),
    Method.ENTROPY,
    Method.MSE,
)


@contextmanager
def calibration(method: str = Method.MSE, value: float | None = None) -> Iterator[Callable[..., None]]:
    """Gives `calibrate(model, batches)`, which leaves the model quantized; batches stream, none is kept."""
    check_method(method, value, Precision.INT8)

    def calibrate(model: nn.Module, batches: Iterable[Feeds]) -> None:
        _check_choices(model, [(method, value)])
        set_ranges(model, observe(model, batches), (method, value))

    yield calibrate


def observe(model: nn.Module, batches: Iterable[Feeds]) -> dict[str, Histogram]:
    """Histograms of what comes to every activation quantizer, while the model computes in float."""
    found = {name: part for name, part in quantizers(model).items() if part.channels is None}
    seen = {name: Histogram(name) for name in found}
    count, device = 0, next(model.parameters()).device
    try:
        for name, part in found.items():
            part.observer = seen[name]
        with torch.no_grad(), evaluating(model), switched(model, off=("*",)):  # ranges are those of the original
            for feeds in batches:
                model(**_on(device, feeds))
                count += 1
    finally:
        for part in found.values():
            part.observer = None
    if not count:
        raise InputError("there are no batches to calibrate on")
    return seen


def set_ranges(model: nn.Module, seen: Mapping[str, Histogram], choice: tuple[str, float | None]) -> None:
    """One way for all activations; of weights, the largest of each channel."""
    method, value = choice
    for name, part in quantizers(model).items():
        if part.channels is not None:
            continue
        # What the batches never came to (a branch for other inputs) stays in float.
        if seen[name].counts.sum():
            part.set_range(find_range(seen[name], method, value, part.precision))
    for name, part in model.named_modules():
        if isinstance(part, QuantizedLinear):
            if not part.weight.isfinite().all():
                raise StageError(f"the weights of {name} are not finite", hint="the model is broken in float already")
            part.measure_weight()


def grid_search(
    model: nn.Module,
    batches: Iterable[Feeds],
    evaluate: Callable[[nn.Module], float],
    choices: Sequence[Choice] | None = None,
) -> dict[Choice, float]:
    """Calibrate in each way, ask `evaluate` (more is better) about each, and keep the best: the first in the answer.

    Without `choices`, in all ways that there are to the precision of the quantizers.
    """
    if choices is None:
        is_even = all(part.precision is Precision.INT8 for part in quantizers(model).values())
        choices = [choice for choice in CHOICES if is_even or choice != Method.ENTROPY]
    if not choices:
        raise PlanError("there is nothing to choose among")
    _check_choices(model, [_apart(choice) for choice in choices])
    seen = observe(model, batches)
    values: dict[Choice, float] = {}
    for choice in choices:
        set_ranges(model, seen, _apart(choice))
        values[choice] = asked(evaluate, model)
    ranked = dict(sorted(values.items(), key=lambda pair: pair[1], reverse=True))
    set_ranges(model, seen, _apart(next(iter(ranked))))
    return ranked


def _check_choices(model: nn.Module, choices: Sequence[tuple[str, float | None]]) -> None:
    """Before the batches are seen, which may take long."""
    for precision in {part.precision for part in quantizers(model).values()}:
        for method, value in choices:
            check_method(method, value, precision)


def _on(device: torch.device, feeds: Any) -> dict[str, Tensor]:
    if not isinstance(feeds, Mapping) or not all(isinstance(value, Tensor) for value in feeds.values()):
        raise InputError(
            f"a {type(feeds).__name__} is no batch: calibration takes a list of dictionaries of tensors",
            hint="[tokenizer(texts, padding=True, return_tensors='pt'), ...]",
        )
    return {name: value.to(device) for name, value in feeds.items()}


def _apart(choice: Choice) -> tuple[str, float | None]:
    return (choice, None) if isinstance(choice, str) else choice
