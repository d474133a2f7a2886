"""Finding the range of every quantizer from rows that look like those to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from hasten.core.errors import InputError, PlanError, StageError
from hasten.core.variant import Precision
from hasten.quantize.qdq.quantizer import QuantizedLinear, Quantizer
from hasten.quantize.qdq.ranges import Histogram, Method, check_method, find_range
from hasten.quantize.qdq.switch import quantizers

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
        seen = observe(model, batches)
        set_ranges(model, seen, (method, value))

    yield calibrate


def observe(model: nn.Module, batches: Iterable[Feeds]) -> dict[str, Histogram]:
    """Histograms of what comes to every activation quantizer, while the model computes in float."""
    found = {name: part for name, part in quantizers(model).items() if part.channels is None}
    seen = {name: Histogram() for name in found}
    was_training = model.training
    model.eval()
    count, device = 0, next(model.parameters()).device
    try:
        for name, part in found.items():
            part.observer = seen[name]
        with torch.no_grad(), _off(model):
            for feeds in batches:
                model(**{name: value.to(device) for name, value in feeds.items()})
                count += 1
    finally:
        for part in found.values():
            part.observer = None
        model.train(was_training)
    if not count:
        raise InputError("there are no batches to calibrate on")
    return seen


def set_ranges(model: nn.Module, seen: Mapping[str, Histogram], choice: tuple[str, float | None]) -> None:
    """One way for all activations; of weights, the largest of each channel."""
    method, value = choice
    for name, part in quantizers(model).items():
        if part.channels is not None:
            continue
        check_method(method, value, part.precision)
        # What the batches never came to (a branch for other inputs) stays in float.
        if seen[name].counts.sum():
            try:
                part.set_range(find_range(seen[name], method, value, part.precision))
            except StageError as error:
                raise StageError(f"{name}: {error.message}") from error
    for part in model.modules():
        if isinstance(part, QuantizedLinear):
            part.measure_weight()


def grid_search(
    model: nn.Module,
    batches: Iterable[Feeds],
    evaluate: Callable[[nn.Module], float],
    choices: Sequence[Choice] = CHOICES,
) -> dict[Choice, float]:
    """Calibrate in each way, ask `evaluate` (more is better) about each, and keep the best: the first in the answer."""
    if not choices:
        raise PlanError("there is nothing to choose among")
    seen = observe(model, batches)
    values: dict[Choice, float] = {}
    for choice in choices:
        set_ranges(model, seen, _apart(choice))
        values[choice] = evaluate(model)
    ranked = dict(sorted(values.items(), key=lambda pair: pair[1], reverse=True))
    set_ranges(model, seen, _apart(next(iter(ranked))))
    return ranked


def _apart(choice: Choice) -> tuple[str, float | None]:
    return (choice, None) if isinstance(choice, str) else choice


@contextmanager
def _off(model: nn.Module) -> Iterator[None]:
    """Weights in float: ranges are those of the original."""
    before = {part: part.is_enabled for part in model.modules() if isinstance(part, Quantizer)}
    for part in before:
        part.is_enabled = False
    try:
        yield
    finally:
        for part, is_enabled in before.items():
            part.is_enabled = is_enabled
