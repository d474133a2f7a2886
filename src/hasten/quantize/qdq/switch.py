"""Which quantizers of a model are on, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import nn

from hasten.core.errors import PlanError
from hasten.quantize.qdq.quantizer import Quantizer


def quantizers(model: nn.Module) -> dict[str, Quantizer]:
    """All of a model's, by name: `bert.encoder.layer.0.attention.self.query.input_quantizer`."""
    found = {name: part for name, part in model.named_modules() if isinstance(part, Quantizer)}
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no quantizers", hint="make it inside 'with qdq.patched():', which puts them in"
        )
    return found


def disable(model: nn.Module, *patterns: str) -> list[str]:
    """Switch off those whose name one of the patterns fits (`*.layer.2.output.*`), all without; tells which."""
    return _switch(model, patterns, is_enabled=False)


def enable(model: nn.Module, *patterns: str) -> list[str]:
    return _switch(model, patterns, is_enabled=True)


@contextmanager
def switched(model: nn.Module, *, off: tuple[str, ...] = (), on: tuple[str, ...] = ()) -> Iterator[None]:
    """For a while: first these off, then those on."""
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
    """In evaluation for a while; afterwards each part as it was, frozen ones too."""
    before = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, is_training in before.items():
            part.training = is_training


def _switch(model: nn.Module, patterns: tuple[str, ...], *, is_enabled: bool) -> list[str]:
    known, names = quantizers(model), chosen(model, patterns or ("*",))
    for name in names:
        known[name].is_enabled = is_enabled
    return names


def chosen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The names that fit; each of the patterns has to be of some use."""
    known, names = quantizers(model), dict[str, None]()
    for pattern in patterns:
        fitting = [name for name in known if fnmatchcase(name, pattern)]
        if not fitting:
            raise PlanError(f"no quantizer is called '{pattern}'", hint=f"the first is called {next(iter(known))}")
        names |= dict.fromkeys(fitting)
    return list(names)
