"""Convert padded PyTorch tensors to rows without padding, and outputs back; unpadded tensors are not copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hasten.core.errors import InputError
from hasten.core.tensors import ATTENTION_MASK, MASKS, Batch, BoolArray, FloatArray, IntArray, Signature, TensorSpec

IDS = "input_ids"
TYPES = "token_type_ids"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows without padding, and the position of each token."""

    batch: Batch
    # Shape (rows, width); None if no position is padding.
    is_real: BoolArray | None
    width: int


def check(inputs: Mapping[str, object], axes: tuple[str, ...]) -> None:
    """Raise an error unless all inputs are integer tensors of the same shape."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            hint = "tokenizer(…, return_tensors='pt')"
            raise InputError(f"{name} is {type(tensor).__name__}, not a tensor", hint=hint)
        if tensor.dim() != len(axes):
            raise InputError(f"{name} has {tensor.dim()} axes instead of {' × '.join(axes)}")
        if tensor.is_floating_point():
            raise InputError(f"{name} holds {tensor.dtype}, not integers")
        if tensor.shape != (ids := inputs[IDS]).shape:  # type: ignore[attr-defined]
            raise InputError(f"{name} is {_shape(tensor)}, and {IDS} is {_shape(ids)}")


def unpadded(inputs: Mapping[str, Tensor], signature: Signature, vocab_size: int | None = None) -> Rows:
    """Return the rows without padding, as views of the tensors if none is padded.

    Raise an error for token ids outside the vocabulary: some runtimes read arbitrary memory for them.
    """
    ids, is_real = _ids_and_real(inputs)
    rows, width = ids.shape
    lengths = np.full(rows, width, np.int32) if is_real is None else is_real.sum(axis=1, dtype=np.int32)
    longest = int(lengths.max())
    if longest > signature.max_length:
        raise InputError(
            f"a row has {longest} tokens, and the model's limit is {signature.max_length}",
            hint="tokenizer(…, truncation=True)",
        )
    values: dict[str, IntArray] = {}
    for name in (spec.name for spec in signature.inputs if spec.name != ATTENTION_MASK):
        column = _array(inputs[name]) if name in inputs else np.zeros_like(ids)
        values[name] = column.reshape(-1) if is_real is None else column[is_real]
    if vocab_size is not None and ((low := values[IDS].min()) < 0 or values[IDS].max() >= vocab_size):
        token = low if low < 0 else values[IDS].max()
        raise InputError(f"token id {token} is out of range: the vocabulary size is {vocab_size}")
    types = _array(inputs[TYPES]) if TYPES in inputs and TYPES not in values else np.zeros_like(ids)
    if (types if is_real is None else types[is_real]).any():
        raise InputError(f"{TYPES} must be zero: the model was built for a task with single texts")
    return Rows(Batch(values, lengths), is_real, width)


def rows_of(inputs: Mapping[str, Tensor]) -> list[list[int]]:
    """Return the tokens of each row, without padding."""
    ids, is_real = _ids_and_real(inputs)
    return [(row if is_real is None else row[is_real[index]]).tolist() for index, row in enumerate(ids)]


def padded(output: FloatArray, spec: TensorSpec, rows: Rows, mask_id: int | None) -> Tensor:
    """Return an output in the shape that PyTorch would return, with zeros for padding.

    Outputs that exist for mask tokens alone are NaN at all other tokens, so that they cannot be mistaken for answers.
    """
    is_per_mask, shape = MASKS in spec.shape, (len(rows.batch), rows.width, *output.shape[1:])
    if not spec.is_per_token and not is_per_mask:
        return torch.from_numpy(output)
    if rows.is_real is None and not is_per_mask:
        return torch.from_numpy(output.reshape(shape))
    whole = np.full(shape, np.nan if is_per_mask else 0, output.dtype)
    positions = np.ones(shape[:2], bool) if rows.is_real is None else rows.is_real.copy()
    if is_per_mask:
        positions[positions] = rows.batch.values[IDS] == mask_id
    whole[positions] = output
    return torch.from_numpy(whole)


def _ids_and_real(inputs: Mapping[str, Tensor]) -> tuple[IntArray, BoolArray | None]:
    """Return the token ids and which positions are not padding, None if all are; raise an error if there are none."""
    ids = _array(inputs[IDS])
    if not ids.size:
        raise InputError(f"{IDS} is empty: {ids.shape[0]} rows of {ids.shape[1]} tokens")
    mask: BoolArray | None = _array(inputs[ATTENTION_MASK]) != 0 if ATTENTION_MASK in inputs else None
    if mask is None or mask.all():
        return ids, None
    if not mask.any(axis=1).all():
        raise InputError(f"row {int(np.argmin(mask.any(axis=1))) + 1} contains only padding")
    # The span from the first to the last real token is longer than their number if padding lies between them.
    last = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
    if (last - mask.argmax(axis=1) != mask.sum(axis=1)).any():
        raise InputError(f"{ATTENTION_MASK} masks tokens inside a row: padding is supported on the left or right only")
    return ids, mask


def _array(tensor: Tensor) -> IntArray:
    """Return the tensor as an array, without a copy if it is on the CPU."""
    array: IntArray = tensor.detach().cpu().numpy()
    return array


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
