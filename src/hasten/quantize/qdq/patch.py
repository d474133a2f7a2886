"""Rewritten classes in the place of the originals, for as long as a context lasts."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.variant import Precision
from hasten.quantize.qdq.constructs import Kind
from hasten.quantize.qdq.quantizer import LIMITS, QuantizedLinear, Quantizer
from hasten.quantize.qdq.rewrite import Options, Rewritten, is_rewritten, mapping, rewrite

logger = logging.getLogger("hasten")

_INIT = "__init__"
_HOOK = "__init_subclass__"
# What computes products in a class of torch's, and why no quantizer stands there.
_IN_FLOAT = {
    nn.Linear: "it is made where rewriting does not reach",
    nn.modules.conv._ConvNd: "convolutions are not quantized",
}
_CURRENT: ContextVar[_Patch | None] = ContextVar("patch", default=None)


@contextmanager
def patched(
    precision: str = Precision.INT8, *, products: bool = True, residuals: bool = False, embeddings: bool = False
) -> Iterator[None]:
    """Models of transformers that this thread makes inside come with quantizers, and keep them afterwards.

    Linear layers are quantized, and what is asked for: `products` of two activations, in attention; `residuals` and
    `embeddings`, the sums in front of norms, which save a GPU the most traffic and cost the most accuracy. Quantizers
    stand at all of them, so that `qdq.enable` can switch on later what was not asked for.
    """
    if precision not in LIMITS:
        raise PlanError(f"nobody quantizes to '{precision}' here", hint=f"one of {', '.join(LIMITS)}")
    asked = {Kind.PRODUCT: products, Kind.RESIDUAL: residuals, Kind.EMBEDDINGS: embeddings}
    options = Options(Precision(precision), frozenset(kind for kind, is_on in asked.items() if is_on))
    with _CONSTRUCTORS.redirected(), _made_by(_Patch(options)):
        yield


@contextmanager
def outside() -> Iterator[None]:
    """Models that are made inside are the originals, even where all of it is inside of `patched`."""
    with _made_by(None):
        yield


@contextmanager
def _made_by(patch: _Patch | None) -> Iterator[None]:
    before = _CURRENT.set(patch)
    try:
        yield
    finally:
        _CURRENT.reset(before)


class _Constructors:
    """Every class that makes models first asks which patch is the current one, for as long as somebody has one.

    One for the process: contexts of several threads end in any order, and the last of them puts the originals back.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._before: list[tuple[type, str, Any]] = []

    @contextmanager
    def redirected(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._redirect_all()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                while self._before and not self._users:
                    kind, name, value = self._before.pop()
                    setattr(kind, name, value)

    def _redirect_all(self) -> None:
        for kind in _family(PreTrainedModel):
            self._redirect(kind)
        # Auto classes import models when they are asked for.
        announce = vars(PreTrainedModel)[_HOOK]

        def announced(kind: type, /, **about: Any) -> None:
            announce.__get__(None, kind)(**about)
            with self._lock:
                if self._users:
                    self._redirect(kind)

        self._replace(PreTrainedModel, _HOOK, classmethod(announced))

    def _replace(self, kind: type, name: str, value: Any) -> None:
        self._before.append((kind, name, vars(kind)[name]))
        setattr(kind, name, value)

    def _redirect(self, kind: type) -> None:
        if _INIT in vars(kind) and not is_rewritten(kind):
            self._replace(kind, _INIT, _redirected(vars(kind)[_INIT]))


_CONSTRUCTORS = _Constructors()


def _redirected(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(model: Any, *args: Any, **kwargs: Any) -> None:
        patch = _CURRENT.get()
        if patch is None or is_rewritten(type(model)):
            original(model, *args, **kwargs)
            return
        model.__class__ = patch.rewritten(type(model))
        model.__init__(*args, **kwargs)
        patch.check_whole(model)

    return construct


@dataclass
class _Patch:
    """The rewritten classes of one context."""

    options: Options
    done: dict[str, Rewritten] = field(default_factory=dict)

    def rewritten(self, kind: type) -> type:
        """The class that stands for this one, its module rewritten the first time somebody asks."""
        found = self._module_of(kind)
        for base in kind.__mro__:
            if base.__module__ in self.done:
                self.done[base.__module__].check(base)
        if kind not in found.classes:
            raise UnsupportedError(
                f"{kind.__qualname__} is not written at the top of {found.file}",
                hint="neither inside of a function nor under an 'if'",
            )
        return found.classes[kind]

    def _module_of(self, kind: type) -> Rewritten:
        name = kind.__module__
        if name not in self.done:
            # A namespace that was never imported has no source either, and is refused as such.
            module = sys.modules.get(name, ModuleType(name))
            made = self.done[name] = rewrite(module, self.options, self._inherited)
            for each in made.classes.values():
                if issubclass(each, PreTrainedModel):
                    _complete(each)
        return self.done[name]

    def _inherited(self, base: type) -> type | None:
        """For a base from another file, as of people who build on a model of transformers: it is rewritten too."""
        is_model = issubclass(base, PreTrainedModel) and base is not PreTrainedModel
        if is_model or base.__module__.startswith("transformers.models."):
            return self._module_of(base).classes.get(base)
        return None

    def check_whole(self, model: nn.Module) -> None:
        """A part that is of the original's class came about in a way that we do not see, and computes in float."""
        known = mapping(self.done)
        changed = {kind for each in self.done.values() for kind in each.changed}
        for name, part in model.named_modules():
            if type(part) in known and not changed.isdisjoint(type(part).__mro__):
                raise UnsupportedError(
                    f"'{name}' of {type(model).__name__} is made where rewriting does not reach: a plain"
                    f" {type(part).__name__} ({sys.modules[type(part).__module__].__file__})"
                )
        for kind, why in _IN_FLOAT.items():
            plain = [
                name
                for name, part in model.named_modules()
                if isinstance(part, kind) and not isinstance(part, QuantizedLinear)
            ]
            if plain:
                logger.warning(
                    "'%s' of %s stays in float: %s; such layers: %d", plain[0], type(model).__name__, why, len(plain)
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
    kind._check_and_adjust_attn_implementation = _check_attention
    kind._supports_sdpa = kind._supports_flash_attn = kind._supports_flex_attn = False


def _check_attention(model: Any, asked: str | None, *_: Any, **__: Any) -> str:
    """Quantizers stand in the attention that is written out: any other would pass them by."""
    if asked not in (None, "eager"):
        raise UnsupportedError(
            f"quantizers of {type(model).__name__} stand in the attention that is written out: '{asked}' is another",
            hint="attn_implementation='eager', in the configuration too where it is given",
        )
    return "eager"
