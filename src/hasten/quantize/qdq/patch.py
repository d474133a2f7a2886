"""Replace model classes by rewritten ones for as long as a context lasts."""

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
from hasten.quantize.qdq.constructs import OperandKind
from hasten.quantize.qdq.quantizer import LIMITS, QuantizedLinear, Quantizer
from hasten.quantize.qdq.rewrite import RewriteOptions, Rewritten, is_rewritten, rewrite

logger = logging.getLogger("hasten")

_INIT = "__init__"
_HOOK = "__init_subclass__"
# torch's classes that compute matmuls and stay in float, with the reason.
_FLOAT_LAYERS = {
    nn.Linear: "it is constructed where rewriting does not reach",
    nn.modules.conv._ConvNd: "convolutions are not quantized",
}
_CURRENT: ContextVar[_Patch | None] = ContextVar("patch", default=None)


@contextmanager
def patched(
    precision: str = Precision.INT8, *, matmuls: bool = True, residuals: bool = False, embeddings: bool = False
) -> Iterator[None]:
    """Give the transformers models that this thread constructs in the context quantizers, which they keep.

    Linear layers are quantized, and optionally `matmuls` of two activations, in attention, and `residuals` and
    `embeddings`, the sums before norms, which save a GPU the most memory traffic and cost the most accuracy. All of
    these get quantizers, so that `qdq.enable` can enable the others later.
    """
    if precision not in LIMITS:
        raise PlanError(f"quantization to '{precision}' is not supported", hint=f"one of {', '.join(LIMITS)}")
    requested = {OperandKind.MATMUL: matmuls, OperandKind.RESIDUAL: residuals, OperandKind.EMBEDDINGS: embeddings}
    options = RewriteOptions(Precision(precision), frozenset(kind for kind, is_on in requested.items() if is_on))
    with _CONSTRUCTORS.redirected(), _constructing_with(_Patch(options)):
        yield


@contextmanager
def unpatched() -> Iterator[None]:
    """Construct models in the context without quantizers, even inside of `patched`."""
    with _constructing_with(None):
        yield


@contextmanager
def _constructing_with(patch: _Patch | None) -> Iterator[None]:
    token = _CURRENT.set(patch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class _Constructors:
    """The redirected constructors of all model classes, which look up the current patch while any is in use.

    There is one for the process: contexts of several threads end in any order, and the last restores the originals.
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
        for kind in _with_subclasses(PreTrainedModel):
            self._redirect(kind)
        # Auto classes import model classes lazily.
        original_hook = vars(PreTrainedModel)[_HOOK]

        def hook(kind: type, /, **kwargs: Any) -> None:
            original_hook.__get__(None, kind)(**kwargs)
            with self._lock:
                if self._users:
                    self._redirect(kind)

        self._replace(PreTrainedModel, _HOOK, classmethod(hook))

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
        patch.check_complete(model)

    return construct


@dataclass
class _Patch:
    """The rewritten classes of one context."""

    options: RewriteOptions
    modules: dict[str, Rewritten] = field(default_factory=dict)

    def rewritten(self, kind: type) -> type:
        """Return the rewritten form of a class; its module is rewritten on first use."""
        module = self._module_of(kind)
        for base in kind.__mro__:
            if base.__module__ in self.modules:
                self.modules[base.__module__].check(base)
        if kind not in module.classes:
            raise UnsupportedError(
                f"{kind.__qualname__} is not defined at the top level of {module.file}",
                hint="move it out of the function or 'if'",
            )
        return module.classes[kind]

    def _module_of(self, kind: type) -> Rewritten:
        name = kind.__module__
        if name not in self.modules:
            # A namespace that was never imported has no source, and is rejected for that reason.
            module = sys.modules.get(name, ModuleType(name))
            rewritten = self.modules[name] = rewrite(module, self.options, self._inherited)
            for each in rewritten.classes.values():
                if issubclass(each, PreTrainedModel):
                    _adapt(each)
        return self.modules[name]

    def _inherited(self, base: type) -> type | None:
        """Return the rewritten form of a base class from another module, as custom models on transformers have."""
        is_model = issubclass(base, PreTrainedModel) and base is not PreTrainedModel
        if is_model or base.__module__.startswith("transformers.models."):
            return self._module_of(base).classes.get(base)
        return None

    def check_complete(self, model: nn.Module) -> None:
        """Raise if a submodule has an original class: it would silently compute in float."""
        known = {original for each in self.modules.values() for original in each.classes}
        changed = {kind for each in self.modules.values() for kind in each.changed}
        for name, part in model.named_modules():
            if type(part) in known and not changed.isdisjoint(type(part).__mro__):
                raise UnsupportedError(
                    f"'{name}' of {type(model).__name__} is constructed where rewriting does not reach: a plain"
                    f" {type(part).__name__} ({sys.modules[type(part).__module__].__file__})"
                )
        for kind, reason in _FLOAT_LAYERS.items():
            layers = {name: part for name, part in model.named_modules() if isinstance(part, kind)}
            plain = [name for name, part in layers.items() if not isinstance(part, QuantizedLinear)]
            if plain:
                message = "'%s' of %s stays in float: %s (layers like it: %d)"
                logger.warning(message, plain[0], type(model).__name__, reason, len(plain))


def _with_subclasses(kind: type) -> list[type]:
    classes: dict[type, None] = {kind: None}
    derived: list[type] = type.__subclasses__(kind)
    for subclass in derived:
        classes |= dict.fromkeys(_with_subclasses(subclass))
    return list(classes)


def _adapt(kind: Any) -> None:
    """Adapt the hooks that transformers calls on a model class to quantizers."""
    initialize = kind._init_weights

    def initialize_weights(model: Any, module: nn.Module) -> None:
        if not isinstance(module, Quantizer):
            initialize(model, module)
        # With a checkpoint that has no quantizers, their ranges are uninitialised memory.
        elif not getattr(module.amax, "_is_hf_initialized", False):
            module.forget()

    expand = kind.get_expanded_tied_weights_keys

    def expanded(model: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        # Names are matched by prefix: the quantizer of a tied weight would be tied too.
        keys = expand(model, *args, **kwargs)
        return {name: source for name, source in keys.items() if not name.endswith("quantizer.amax")}

    kind.get_expanded_tied_weights_keys = expanded
    kind._init_weights = initialize_weights
    kind._keys_to_ignore_on_load_missing = [*(kind._keys_to_ignore_on_load_missing or ()), r"quantizer\.amax$"]
    kind._check_and_adjust_attn_implementation = _check_attention
    kind._supports_sdpa = kind._supports_flash_attn = kind._supports_flex_attn = False


def _check_attention(model: Any, requested: str | None, *_: Any, **__: Any) -> str:
    """Raise for attention other than eager, which would bypass the quantizers."""
    if requested not in (None, "eager"):
        raise UnsupportedError(
            f"the quantizers of {type(model).__name__} work only with eager attention, not with '{requested}'",
            hint="use attn_implementation='eager', also in the configuration",
        )
    return "eager"
