"""Enable and disable a model's quantizers by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn

from hasten.core.errors import PlanError
from hasten.core.variant import Precision
from hasten.quantize.qdq.quantizer import Quantizer

logger = logging.getLogger("hasten")


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """Return a model's quantizers by name: `bert.encoder.layer.0.attention.self.query.input_quantizer`."""
    parts = {name: part for name, part in model.named_modules() if isinstance(part, Quantizer)}
    if not parts:
        raise PlanError(
            f"{type(model).__name__} has no quantizers",
            hint="construct it inside 'with qdq.patched():', which adds them",
        )
    return parts


def active_quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """Return the quantizers that are enabled and calibrated; raise if there are none."""
    active = {name: part for name, part in quantizers(model).items() if part.is_active}
    if not active:
        raise PlanError(f"no quantizer of {type(model).__name__} is enabled and calibrated", hint="calibrate it first")
    return active


def has_quantizers(model: nn.Module) -> bool:
    """Return whether any quantizer is enabled; raise if those that are enabled are not calibrated."""
    name = type(model).__name__
    if not any(part.is_enabled for part in quantizers(model).values()):
        logger.warning("all quantizers of %s are disabled: it is built as a float model", name)
        return False
    if quantized_precision(model) is None:
        raise PlanError(
            f"the quantizers of {name} are not calibrated",
            hint="calibrate them with qdq.calibration, or call qdq.disable(model) to build it as a float model",
        )
    return True


def quantized_precision(model: nn.Module) -> Precision | None:
    """Return the precision of the quantizers that are enabled and calibrated, or None if there are none."""
    return next((part.precision for part in quantizers(model).values() if part.is_active), None)


def disable(model: nn.Module, *patterns: str) -> list[str]:
    """Disable the quantizers that match a pattern (`*.layer.2.output.*`), or all; return their names."""
    return _switch(model, patterns, is_enabled=False)


def enable(model: nn.Module, *patterns: str) -> list[str]:
    """Enable the quantizers that match a pattern, or all; return their names."""
    return _switch(model, patterns, is_enabled=True)


@contextmanager
def switched(model: nn.Module, *, off: tuple[str, ...] = (), on: tuple[str, ...] = ()) -> Iterator[None]:
    """Disable quantizers, then enable others, for as long as the context lasts."""
    before = {part: part.is_enabled for part in quantizers(model).values()}
    try:
        if off:
            disable(model, *off)
        if on:
            enable(model, *on)
        yield
    finally:
        for part, is_enabled in before.items():
            part.is_enabled = is_enabled


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; restore the mode of each of its modules afterwards, frozen ones included."""
    before = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, is_training in before.items():
            part.training = is_training


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the quantizers that match; raise for a pattern that matches none."""
    known, names = quantizers(model), dict[str, None]()
    for pattern in patterns:
        matches = [name for name in known if fnmatchcase(name, pattern)]
        if not matches:
            raise PlanError(f"no quantizer matches '{pattern}'", hint=f"a name looks like {next(iter(known))}")
        names |= dict.fromkeys(matches)
    return list(names)


def _switch(model: nn.Module, patterns: tuple[str, ...], *, is_enabled: bool) -> list[str]:
    known, names = quantizers(model), matching(model, patterns or ("*",))
    for name in names:
        known[name].is_enabled = is_enabled
    return names
