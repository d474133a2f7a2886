"""Rewritten classes in the place of the originals, for as long as a context lasts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.variant import Precision
from hasten.quantize.qdq.constructs import Kind
from hasten.quantize.qdq.quantizer import LIMITS, Quantizer
from hasten.quantize.qdq.rewrite import Options, Rewritten, is_rewritten, mapping, rewrite

_INIT = "__init__"
_HOOK = "__init_subclass__"
_IS_OUTSIDE = ContextVar("is_outside", default=False)


@contextmanager
def patched(
    precision: str = Precision.INT8, *, products: bool = True, residuals: bool = False, embeddings: bool = False
) -> Iterator[None]:
    """Models of transformers that are made inside come with quantizers, and keep them afterwards.

    Linear layers are quantized, and what is asked for: `products` of two activations, in attention; `residuals` and
    `embeddings`, the sums in front of norms, which save a GPU the most traffic and cost the most accuracy. Quantizers
    stand at all of them, so that `qdq.enable` can switch on later what was not asked for.
    """
    if precision not in LIMITS:
        raise PlanError(f"nobody quantizes to '{precision}' here", hint=f"one of {', '.join(LIMITS)}")
    asked = {Kind.PRODUCT: products, Kind.RESIDUAL: residuals, Kind.EMBEDDINGS: embeddings}
    options = Options(Precision(precision), frozenset(kind for kind, is_on in asked.items() if is_on))
    with _Patch(options).in_place():
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Models that are made inside are the originals, even where all of it is inside of `patched`."""
    before = _IS_OUTSIDE.set(True)
    try:
        yield
    finally:
        _IS_OUTSIDE.reset(before)


@dataclass
class _Patch:
    """Every class that makes models is given a constructor that first turns to the rewritten class."""

    options: Options
    done: dict[str, Rewritten] = field(default_factory=dict)
    _before: list[tuple[type, str, Any]] = field(default_factory=list)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            for kind in _family(PreTrainedModel):
                self._redirect(kind)
            # Auto classes import models when they are asked for.
            announce = vars(PreTrainedModel)[_HOOK]

            def announced(kind: type, /, **about: Any) -> None:
                announce.__get__(None, kind)(**about)
                self._redirect(kind)

            self._replace(PreTrainedModel, _HOOK, classmethod(announced))
            yield
        finally:
            while self._before:
                kind, name, value = self._before.pop()
                setattr(kind, name, value)

    def _replace(self, kind: type, name: str, value: Any) -> None:
        self._before.append((kind, name, vars(kind)[name]))
        setattr(kind, name, value)

    def _redirect(self, kind: type) -> None:
        if _INIT in vars(kind) and not is_rewritten(kind):
            self._replace(kind, _INIT, self._redirected(vars(kind)[_INIT]))

    def _redirected(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def construct(model: Any, *args: Any, **kwargs: Any) -> None:
            if is_rewritten(type(model)) or _IS_OUTSIDE.get():
                original(model, *args, **kwargs)
                return
            model.__class__ = self.rewritten(type(model))
            model.__init__(*args, **kwargs)
            self._check_whole(model)

        return construct

    def rewritten(self, kind: type) -> type:
        """The class that stands for this one, its module rewritten the first time somebody asks."""
        if kind.__module__ not in self.done:
            made = self.done[kind.__module__] = rewrite(sys.modules[kind.__module__], self.options)
            for each in made.classes.values():
                if issubclass(each, PreTrainedModel):
                    _complete(each)
        found = self.done[kind.__module__]
        if kind not in found.classes:
            raise UnsupportedError(f"{kind.__qualname__} is not written at the top of {found.file}")
        found.check(kind)
        return found.classes[kind]

    def _check_whole(self, model: nn.Module) -> None:
        """A part that is of the original's class came about in a way that we do not see, and computes in float."""
        known = mapping(self.done)
        for name, part in model.named_modules():
            if type(part) in known:
                raise UnsupportedError(
                    f"'{name}' of {type(model).__name__} is made where rewriting does not reach: a plain"
                    f" {type(part).__name__} ({sys.modules[type(part).__module__].__file__})"
                )


def _family(kind: type) -> list[type]:
    found: dict[type, None] = {kind: None}
    below: list[type] = type.__subclasses__(kind)
    for derived in below:
        found |= dict.fromkeys(_family(derived))
    return list(found)


def _complete(kind: Any) -> None:
    """What transformers asks a model's class about, answered for one with quantizers."""
    initialize = kind._init_weights

    def initialize_weights(model: Any, module: nn.Module) -> None:
        if not isinstance(module, Quantizer):
            initialize(model, module)
        # Of a checkpoint that does not know of quantizers, their numbers are whatever was in memory.
        elif not getattr(module.amax, "_is_hf_initialized", False):
            module.forget()

    expand = kind.get_expanded_tied_weights_keys

    def expanded(model: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        # By how names begin, the quantizer of a weight that is tied would be tied too.
        found = expand(model, *args, **kwargs)
        return {name: source for name, source in found.items() if not name.endswith("quantizer.amax")}

    kind.get_expanded_tied_weights_keys = expanded
    kind._init_weights = initialize_weights
    kind._keys_to_ignore_on_load_missing = [*(kind._keys_to_ignore_on_load_missing or ()), r"quantizer\.amax$"]
    # Quantizers stand in the attention that is written out: any other would pass them by.
    kind._supports_sdpa = kind._supports_flash_attn = kind._supports_flex_attn = False
