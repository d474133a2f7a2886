"""`hasten.accelerate`: a transformers model on a GPU stays the module it is, and its encoder runs the fused kernels.

Only the bare model's `forward` is replaced, so that poolers, heads, losses and pipelines around it work as before.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any, TypeVar

import numpy as np

from hasten.backends.fused import BACKEND, HOPPER
from hasten.backends.fused.session import CUDA
from hasten.core.buckets import check_ids
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.hardware import this_machine
from hasten.core.tensors import Batch, BoolArray, IntArray, within

Model = TypeVar("Model")

logger = logging.getLogger("hasten")

_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
# What may be given without a word; anything else that is given is the original's business.
_TAKEN = frozenset((_IDS, _MASK, _TYPES, "return_dict", "use_cache"))
# Relative to the original on two short rows: far above what rounding does, far below another model.
_TOLERANCE = 0.05


def accelerate(model: Model, *, dtype: Any = None) -> Model:
    """Run the model's encoder with fused kernels, in fp16 or `dtype=torch.bfloat16`, until `hasten.restore(model)`.

    `model` is one of transformers, a SentenceTransformer or a CrossEncoder, on a CUDA device. Its weights stay, beside
    a copy of the encoder's in half precision. They are read now: after you change them, accelerate it again.
    """
    base = bare_model(model)
    devices = sorted({str(parameter.device) for parameter in base.parameters()})
    machine = this_machine()
    # The GPU that the model lies on, which need not be the first.
    support = BACKEND.probe(replace(machine, gpus=machine.gpus[_place(*devices[:1]) :]))
    if not support.ok:
        hint = support.hint or "the model computes as it did; hasten.build makes a fast one for this machine"
        raise UnsupportedError(f"accelerating needs the backend 'fused': {support.reason}", hint=hint)
    import torch

    chosen = torch.float16 if dtype is None else dtype
    if chosen not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"the fused kernels compute in torch.float16 or torch.bfloat16, not in {chosen}")
    if len(devices) != 1 or not devices[0].startswith(CUDA):
        raise UnsupportedError(f"the model lies on {', '.join(devices)}", hint="move it to one GPU: model.to('cuda')")
    attach(base, chosen)
    return model


def _place(device: str = "") -> int:
    name, _, place = device.partition(":")
    return int(place) if name == CUDA and place else 0


def restore(model: Model) -> Model:
    """Give the model its own forward back, and its copy of the weights to the garbage collector."""
    base = bare_model(model)
    forward = base.__dict__.get("forward")
    if isinstance(forward, FusedForward):
        del base.forward
        forward.close()
        if forward.replaced is not None:
            base.forward = forward.replaced
    return model


def bare_model(model: Any) -> Any:
    """The encoder of a transformers model, whatever head or library stands around it."""
    for module in model.modules() if hasattr(model, "modules") else ():
        if hasattr(type(module), "base_model_prefix"):
            return module.base_model
    raise UnsupportedError(f"there is no transformers model in {type(model).__name__}")


def attach(base: Any, dtype: Any) -> None:
    """On any device, the CPU through Triton's interpreter; refused where it does not answer like the original."""
    restore(base)
    if base.training:
        raise UnsupportedError("the model is in training mode", hint="model.eval() first")
    base.forward = FusedForward(base, dtype)


class _NotFusedError(Exception):
    """Why the original has to answer."""


class FusedForward:
    """In the place of a bare model's `forward`: what it cannot do, and gradients, it leaves to that."""

    def __init__(self, base: Any, dtype: Any) -> None:
        import torch

        from hasten.kernels.dependent import shared_bytes
        from hasten.kernels.encoder import Encoder
        from hasten.kernels.packing import unpack
        from hasten.kernels.products import Products
        from hasten.kernels.replay import Replay
        from hasten.kernels.weights import cast, read

        # A forward of its own that someone else had given it.
        self.replaced = base.__dict__.get("forward")
        self._base, self._original = base, base.forward
        self._names = tuple(inspect.signature(base.forward).parameters)
        update_wrapper(self, base.forward)
        reading = cast(read(base), dtype)
        self._geometry, self._weights = reading.geometry, reading.weights
        self._device = self._weights["words"].device
        is_gpu = self._device.type == CUDA
        is_dependent = is_gpu and torch.cuda.get_device_capability(self._device) >= HOPPER
        self._on_device: Any = torch.cuda.device(self._device) if is_gpu else nullcontext()
        with self._on_device:
            # A handle of the library is the current device's.
            self._products = products = Products(dtype, self._device) if is_gpu else None
        shared = shared_bytes(self._device.index or 0) if is_gpu else None
        encoder = Encoder(
            self._geometry, self._weights, is_dependent=is_dependent, products=products, shared_bytes=shared
        )
        self._replay = Replay(
            lambda whole, bucket: encoder(unpack(whole, bucket)), str(self._device), products, stays=True
        )
        # Graphs share their memory: one call at a time.
        self._turn = threading.Lock()
        self._said: set[str] = set()
        self._kind = self._checked()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if len(given) < len(args) + len(kwargs):
            return self._original(*args, **kwargs)  # which says what is given twice, or too much
        try:
            self._check_call(given)
            hidden = self._hidden(given[_IDS], given.get(_MASK), given.get(_TYPES))
        except _NotFusedError as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                logger.warning("not accelerated, since %s: the original forward answers", error)
            return self._original(*args, **kwargs)
        pooled = self._pooled(hidden)
        outputs = self._kind(last_hidden_state=hidden, **({} if pooled is None else {"pooler_output": pooled}))
        is_dict = given.get("return_dict")
        return outputs if (self._base.config.return_dict if is_dict is None else is_dict) else outputs.to_tuple()

    def __reduce__(self) -> Any:
        raise UnsupportedError("an accelerated model cannot be copied or pickled", hint="hasten.restore(model) first")

    def close(self) -> None:
        """What the GPU and its library hold for it: of that the garbage collector knows nothing."""
        with self._turn:
            self._replay.clear()
            if self._products is not None:
                self._products.close()

    def _checked(self) -> Any:
        """The type of the original's outputs, once it was seen to answer the same."""
        import torch

        ids = (torch.arange(10, device=self._device) * 7 + 5).view(2, 5) % len(self._weights["words"])
        mask = torch.ones_like(ids)
        mask[1, 3:] = 0
        with torch.inference_mode():
            outputs = self._original(input_ids=ids, attention_mask=mask, return_dict=True)
            expected = outputs.last_hidden_state[mask.bool()].float()
            found = self._hidden(ids, mask, None)[mask.bool()].float()
            error = float((found - expected).norm() / expected.norm())
        if not error <= _TOLERANCE:
            raise AccuracyError(
                f"the fused kernels do not answer like the model: relative error {error:.1e}",
                hint="dtype=torch.bfloat16 has more range",
            )
        return type(outputs)

    def _check_call(self, given: Mapping[str, Any]) -> None:
        """What can be told without looking at the values."""
        import torch

        ids, config = given.get(_IDS), self._base.config
        if self._base.training:
            raise _NotFusedError("it is in training mode")
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise _NotFusedError("it is being compiled or exported")
        if self._device.type == CUDA and torch.cuda.is_current_stream_capturing():
            raise _NotFusedError("it is being recorded in a CUDA graph")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._base.parameters()):
            raise _NotFusedError("gradients are on (torch.inference_mode() turns them off)")
        for name, value in given.items():
            if name not in _TAKEN and value is not None and value is not False:
                raise _NotFusedError(f"'{name}' is given")
        if config.output_attentions or config.output_hidden_states:
            raise _NotFusedError("its config asks for attentions or hidden states")
        if ids is None or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            raise _NotFusedError(f"'{_IDS}' is no rectangle of tokens")
        for name in (_IDS, _MASK, _TYPES):
            tensor = given.get(name)
            if tensor is not None and (tensor.shape != ids.shape or tensor.device != self._device):
                raise _NotFusedError(f"'{name}' is of another shape than '{_IDS}', or not on {self._device}")

    def _hidden(self, ids: Any, mask: Any | None, types: Any | None) -> Any:
        """(rows, width, states) in the model's dtype, zero where the mask is."""
        import torch

        given = {_IDS: ids}
        if mask is not None:
            given[_MASK] = mask if mask.dtype == ids.dtype else (mask != 0).to(ids.dtype)
        if types is not None and "kinds" in self._weights:
            given[_TYPES] = types.to(ids.dtype)
        # To the host in one copy, which is the one wait: how tokens are packed is decided there.
        arrays: dict[str, IntArray] = dict(zip(given, torch.stack(list(given.values())).cpu().numpy(), strict=True))
        is_seen = arrays.pop(_MASK).astype(bool) if mask is not None else np.ones(ids.shape, bool)
        places = self._places(arrays[_IDS], is_seen)
        values = {name: array[is_seen] for name, array in arrays.items()}
        for name, table, found in (
            ("token", "words", values[_IDS]), ("place", "places", places), ("token type", "kinds", values.get(_TYPES)),
        ):  # fmt: skip
            if found is not None:
                check_ids(name, found, len(self._weights[table]))
        # In the caller's mode, who may go on with it as with any tensor.
        with torch.no_grad():
            shape, dtype = (ids.numel(), self._geometry.width), self._base.get_input_embeddings().weight.dtype
            whole = (torch.empty if is_seen.all() else torch.zeros)(shape, dtype=dtype, device=self._device)
            with self._turn, self._on_device:
                self._fill(whole, Batch(values, is_seen.sum(axis=1)), places, np.flatnonzero(is_seen))
            return whole.view(*ids.shape, -1)

    def _places(self, ids: IntArray, is_seen: BoolArray) -> IntArray:
        """Of each token that is seen, as the model counts them: padding on the left moves BERT's, and not RoBERTa's."""
        if "distances" in self._weights:
            begins = (is_seen[:, 1:] & ~is_seen[:, :-1]).sum(axis=1) + is_seen[:, 0]
            if (begins > 1).any():
                raise _NotFusedError("the mask has holes, and the model looks at how far apart tokens are")
        padding = self._geometry.first_place - 1
        if padding < 0:
            return np.nonzero(is_seen)[1]
        is_word = ids != padding
        counted: IntArray = np.cumsum(is_word, axis=1) * is_word + padding
        return counted[is_seen]

    def _fill(self, whole: Any, batch: Batch, places: IntArray, where: IntArray) -> None:
        """The states of all tokens into their rows of `whole`, as many at a time as may run at once."""
        import torch

        from hasten.kernels.packing import MOST_TOKENS, PART_TOKENS, Bucket, pack, parts

        together: list[IntArray | None] = [None]
        if batch.tokens > MOST_TOKENS:
            chosen = parts(batch.lengths, PART_TOKENS)
            starts = np.cumsum(batch.lengths) - batch.lengths
            order = np.concatenate([within(starts[rows], batch.lengths[rows]) for rows in chosen])
            places, where, together = places[order], where[order], [*chosen]
        is_whole = len(together) == 1 and len(where) == len(whole)
        index = None if is_whole else torch.from_numpy(where).to(self._device)
        begin = 0
        for rows in together:
            part = batch if rows is None else batch.take(rows)
            end, bucket = begin + part.tokens, Bucket.of(part.tokens, len(part))
            fill = partial(pack, batch=part, bucket=bucket, places=places[begin:end])
            states = self._replay.on_device(bucket, fill)[: part.tokens]
            if index is None:
                whole[begin:end] = states
            else:
                whole.index_copy_(0, index[begin:end], states.to(whole.dtype))
            begin = end

    def _pooled(self, hidden: Any) -> Any | None:
        pooler, activation = (getattr(self._base, name, None) for name in ("pooler", "pooler_activation"))
        if pooler is None:
            return None
        # ALBERT's are a bare layer and a bare activation.
        return pooler(hidden) if activation is None else activation(pooler(hidden[:, 0]))
