"""`hasten.accelerate`: run the encoder of a transformers model on a GPU with the fused kernels.

Only the `forward` of the base model is replaced, so poolers, heads, losses and pipelines around it work as before.
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
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.gpu.padded_buckets import check_ids
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch, BoolArray, IntArray, ranges_to_indices

Model = TypeVar("Model")

logger = logging.getLogger("hasten")

_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
# With any other argument, the original forward runs.
_SUPPORTED_ARGUMENTS = frozenset((_IDS, _MASK, _TYPES, "return_dict", "use_cache"))
# Relative error on two short rows: far above rounding errors, far below the outputs of another function.
_TOLERANCE = 0.05


def accelerate(model: Model, *, dtype: Any = None) -> Model:
    """Run the model's encoder with fused kernels, in fp16 or `dtype=torch.bfloat16`, until `hasten.restore(model)`.

    `model` is a transformers model, a SentenceTransformer or a CrossEncoder on a CUDA device. The encoder's weights are
    copied in half precision, beside the originals. They are read now: accelerate the model again after you change them.
    """
    base = base_model_of(model)
    devices = sorted({str(parameter.device) for parameter in base.parameters()})
    machine = this_machine()
    # Probe the GPU that holds the model, which need not be the first.
    device, _, index = devices[0].partition(":") if devices else ("", "", "")
    support = BACKEND.probe(replace(machine, gpus=machine.gpus[int(index) if device == CUDA and index else 0 :]))
    if not support.ok:
        hint = support.hint or "the model is unchanged; hasten.build makes a fast one for this machine"
        raise UnsupportedError(f"accelerate needs the backend 'fused': {support.reason}", hint=hint)
    import torch

    dtype = torch.float16 if dtype is None else dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"the fused kernels compute in torch.float16 or torch.bfloat16, not in {dtype}")
    if len(devices) != 1 or not devices[0].startswith(CUDA):
        raise UnsupportedError(f"the model is on {', '.join(devices)}", hint="move it to one GPU: model.to('cuda')")
    attach(base, dtype)
    return model


def restore(model: Model) -> Model:
    """Restore the original forward of an accelerated model, and free the copy of its weights."""
    base = base_model_of(model)
    forward = base.__dict__.get("forward")
    if isinstance(forward, FusedForward):
        del base.forward
        forward.close()
        if forward.previous_override is not None:
            base.forward = forward.previous_override
    return model


def base_model_of(model: Any) -> Any:
    """Return the base model (the encoder) inside a transformers model or a library's wrapper of one."""
    for module in model.modules() if hasattr(model, "modules") else ():
        if hasattr(type(module), "base_model_prefix"):
            return module.base_model
    raise UnsupportedError(f"{type(model).__name__} contains no transformers model")


def attach(base: Any, dtype: Any) -> None:
    """Replace the forward of a base model, on a GPU or through Triton's interpreter on the CPU.

    Raise AccuracyError where its outputs differ from those of the original.
    """
    restore(base)
    if base.training:
        raise UnsupportedError("the model is in training mode", hint="model.eval() first")
    base.forward = FusedForward(base, dtype)


class _NotFusedError(Exception):
    """The reason why a call falls back to the original forward."""


class FusedForward:
    """Replaces the forward of a base model; unsupported calls and gradients fall back to the original. Thread-safe."""

    def __init__(self, base: Any, dtype: Any) -> None:
        import torch

        from hasten.kernels.architectures import encoder_class
        from hasten.kernels.cuda.replay import GraphReplay
        from hasten.kernels.gemm.cublaslt import CublasLtGemms
        from hasten.kernels.ops.pdl import shared_bytes
        from hasten.kernels.packing import unpack
        from hasten.kernels.weights import cast, read

        # An instance attribute `forward` that other code had set before.
        self.previous_override = base.__dict__.get("forward")
        self._base, self._original = base, base.forward
        self._names = tuple(inspect.signature(base.forward).parameters)
        update_wrapper(self, base.forward)
        model = cast(read(base), dtype)
        self._geometry, self._weights = model.geometry, model.weights
        self._max_positions = getattr(self._geometry, "positions", None)
        self._has_relative_positions = self._max_positions is not None or "relative_position_bias" in self._weights
        self._device = self._weights["word_embeddings"].device
        is_gpu = self._device.type == CUDA
        use_pdl = is_gpu and torch.cuda.get_device_capability(self._device) >= HOPPER
        self._on_device: Any = torch.cuda.device(self._device) if is_gpu else nullcontext()
        with self._on_device:
            # The handle belongs to the current device.
            self._cublaslt = cublaslt = CublasLtGemms(dtype, self._device) if is_gpu else None
        shared = shared_bytes(self._device.index or 0) if is_gpu else None
        encoder = encoder_class(self._geometry)(
            self._geometry, self._weights, use_pdl=use_pdl, cublaslt=cublaslt, shared_bytes=shared
        )
        self._replay = GraphReplay(
            lambda buffer, bucket: encoder(unpack(buffer, bucket)), str(self._device), keep_results_on_device=True
        )
        # The graphs share their memory, so one call runs at a time.
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._output_type = self._check_outputs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        if len(arguments) < len(args) + len(kwargs):
            return self._original(*args, **kwargs)  # it raises the TypeError for duplicate or extra arguments
        try:
            self._check_call(arguments)
            hidden = self._hidden_states(arguments[_IDS], arguments.get(_MASK), arguments.get(_TYPES))
        except _NotFusedError as error:
            if str(error) not in self._logged:
                self._logged.add(str(error))
                logger.warning("this call is not accelerated, since %s: the original forward runs", error)
            return self._original(*args, **kwargs)
        pooler, activation = (getattr(self._base, name, None) for name in ("pooler", "pooler_activation"))
        pooled = None
        if pooler is not None:
            # ALBERT has a plain linear layer and an activation.
            pooled = pooler(hidden) if activation is None else activation(pooler(hidden[:, 0]))
        outputs = self._output_type(last_hidden_state=hidden, **({} if pooled is None else {"pooler_output": pooled}))
        is_dict = arguments.get("return_dict")
        return outputs if (self._base.config.return_dict if is_dict is None else is_dict) else outputs.to_tuple()

    def __reduce__(self) -> Any:
        raise UnsupportedError("an accelerated model cannot be copied or pickled", hint="hasten.restore(model) first")

    def close(self) -> None:
        """Free the graphs and the cuBLASLt handle now: the garbage collector does not know about them."""
        with self._lock:
            self._replay.clear()
            if self._cublaslt is not None:
                self._cublaslt.close()

    def _check_outputs(self) -> Any:
        """Compare with the original forward, and return the type of its outputs."""
        import torch

        ids = (torch.arange(10, device=self._device) * 7 + 5).view(2, 5) % len(self._weights["word_embeddings"])
        mask = torch.ones_like(ids)
        mask[1, 3:] = 0
        with torch.inference_mode():
            outputs = self._original(input_ids=ids, attention_mask=mask, return_dict=True)
            expected = outputs.last_hidden_state[mask.bool()].float()
            actual = self._hidden_states(ids, mask, None)[mask.bool()].float()
            error = float((actual - expected).norm() / expected.norm())
        if not error <= _TOLERANCE:
            raise AccuracyError(
                f"the fused kernels do not match the model: relative error {error:.1e}",
                hint="use dtype=torch.bfloat16, which has more range",
            )
        return type(outputs)

    def _check_call(self, arguments: Mapping[str, Any]) -> None:
        """Raise _NotFusedError for unsupported calls, as far as that is known without reading the values."""
        import torch

        ids, config = arguments.get(_IDS), self._base.config
        if self._base.training:
            raise _NotFusedError("the model is in training mode")
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            raise _NotFusedError("the model is being compiled or exported")
        if self._device.type == CUDA and torch.cuda.is_current_stream_capturing():
            raise _NotFusedError("the call is being captured in a CUDA graph")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self._base.parameters()):
            raise _NotFusedError("gradients are enabled (torch.inference_mode() disables them)")
        for name, value in arguments.items():
            if name not in _SUPPORTED_ARGUMENTS and value is not None and value is not False:
                raise _NotFusedError(f"'{name}' is not supported")
        if config.output_attentions or config.output_hidden_states:
            raise _NotFusedError("the config requests attentions or hidden states")
        if ids is None or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            raise _NotFusedError(f"'{_IDS}' is not a matrix of token ids")
        for name in (_IDS, _MASK, _TYPES):
            tensor = arguments.get(name)
            if tensor is not None and (tensor.shape != ids.shape or tensor.device != self._device):
                raise _NotFusedError(f"'{name}' has another shape than '{_IDS}' or is not on {self._device}")

    def _hidden_states(self, ids: Any, mask: Any | None, types: Any | None) -> Any:
        """Return the hidden states (rows, length, width) in the model's dtype, zero where the mask is zero."""
        import torch

        inputs = {_IDS: ids}
        if mask is not None:
            inputs[_MASK] = mask if mask.dtype == ids.dtype else (mask != 0).to(ids.dtype)
        if types is not None and "token_type_embeddings" in self._weights:
            inputs[_TYPES] = types.to(ids.dtype)
        # A single copy to the host, the only synchronization: the host decides how tokens are packed.
        arrays: dict[str, IntArray] = dict(zip(inputs, torch.stack(list(inputs.values())).cpu().numpy(), strict=True))
        is_seen = arrays.pop(_MASK).astype(bool) if mask is not None else np.ones(ids.shape, bool)
        positions = self._positions(arrays[_IDS], is_seen)
        values = {name: array[is_seen] for name, array in arrays.items()}
        for name, table, indices in (
            ("token", "word_embeddings", values[_IDS]),
            ("position", "position_embeddings", positions),
            ("token type", "token_type_embeddings", values.get(_TYPES)),
        ):
            if indices is not None and table in self._weights:
                check_ids(name, indices, len(self._weights[table]))
        # Not inference_mode: the caller may use the result in autograd like any other tensor.
        with torch.no_grad():
            shape, dtype = (ids.numel(), self._geometry.width), self._base.get_input_embeddings().weight.dtype
            states = (torch.empty if is_seen.all() else torch.zeros)(shape, dtype=dtype, device=self._device)
            with self._lock, self._on_device:
                self._compute(states, Batch(values, is_seen.sum(axis=1)), positions, np.flatnonzero(is_seen))
            return states.view(*ids.shape, -1)

    def _positions(self, ids: IntArray, is_seen: BoolArray) -> IntArray:
        """Return the position of each unmasked token: left padding shifts BERT's positions, but not RoBERTa's."""
        if self._has_relative_positions:
            begins = (is_seen[:, 1:] & ~is_seen[:, :-1]).sum(axis=1) + is_seen[:, 0]
            if (begins > 1).any():
                raise _NotFusedError("the mask has holes, and the model has relative positions")
        if self._max_positions is not None and ids.shape[1] > self._max_positions:
            raise _NotFusedError(f"rows are longer than {self._max_positions} tokens")
        padding = self._geometry.position_offset - 1
        if padding < 0:
            return np.nonzero(is_seen)[1]
        is_token = ids != padding
        positions: IntArray = np.cumsum(is_token, axis=1) * is_token + padding
        return positions[is_seen]

    def _compute(self, states: Any, batch: Batch, positions: IntArray, target: IntArray) -> None:
        """Write the hidden states of all tokens to their `target` rows of `states`, splitting large batches."""
        import torch

        from hasten.kernels.cuda.packed_buckets import Bucket
        from hasten.kernels.packing import MAX_TOKENS, PART_TOKENS, pack, split_rows

        parts: list[IntArray | None] = [None]
        if batch.tokens > MAX_TOKENS:
            split = split_rows(batch.lengths, PART_TOKENS)
            starts = np.cumsum(batch.lengths) - batch.lengths
            order = np.concatenate([ranges_to_indices(starts[rows], batch.lengths[rows]) for rows in split])
            positions, target, parts = positions[order], target[order], [*split]
        is_contiguous = len(parts) == 1 and len(target) == len(states)
        index = None if is_contiguous else torch.from_numpy(target).to(self._device)
        begin = 0
        for rows in parts:
            part = batch if rows is None else batch.take(rows)
            end, bucket = begin + part.tokens, Bucket.of(part.tokens, len(part))
            fill = partial(pack, batch=part, bucket=bucket, positions=positions[begin:end])
            part_states = self._replay.on_device(bucket, fill)[: part.tokens]
            if index is None:
                states[begin:end] = part_states
            else:
                states.index_copy_(0, index[begin:end], part_states.to(states.dtype))
            begin = end
