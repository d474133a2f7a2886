"""PyTorch's padded tensors to ragged rows, and what comes back to padded tensors; unpadded ones are not copied."""

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
    """Rows without padding, and where each token stood."""

    batch: Batch
    # (rows, width); None where every position is real.
    is_real: BoolArray | None
    width: int


def check(given: Mapping[str, object], axes: tuple[str, ...]) -> None:
    """Refuse what is no tensor of integers, all of one shape."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            hint = "tokenizer(…, return_tensors='pt')"
            raise InputError(f"{name} is {type(tensor).__name__}, not a tensor", hint=hint)
        if tensor.dim() != len(axes):
            raise InputError(f"{name} has {tensor.dim()} axes instead of {' × '.join(axes)}")
        if tensor.is_floating_point():
            raise InputError(f"{name} holds {tensor.dtype}, not integers")
        if tensor.shape != (ids := given[IDS]).shape:  # type: ignore[attr-defined]
            raise InputError(f"{name} is {_times(tensor)}, and {IDS} is {_times(ids)}")


def unpadded(given: Mapping[str, Tensor], signature: Signature, vocabulary: int | None = None) -> Rows:
    """Views of the tensors' own memory where there is no padding; of padded ones, the real positions.

    Tokens past the vocabulary are refused, where it is known: some runtimes answer for them with whatever they find.
    """
    ids = _array(given[IDS])
    rows, width = ids.shape
    if not rows or not width:
        raise InputError(f"{IDS} is empty: {rows} rows of {width} tokens")
    is_real = _real(given)
    lengths = np.full(rows, width, np.int32) if is_real is None else is_real.sum(axis=1, dtype=np.int32)
    longest = int(lengths.max())
    if longest > signature.max_length:
        raise InputError(
            f"a row has {longest} tokens, and the model takes {signature.max_length}",
            hint="tokenizer(…, truncation=True)",
        )
    values: dict[str, IntArray] = {}
    for name in (spec.name for spec in signature.inputs if spec.name != ATTENTION_MASK):
        column = _array(given[name]) if name in given else np.zeros_like(ids)
        values[name] = column.reshape(-1) if is_real is None else column[is_real]
    if vocabulary is not None and ((low := values[IDS].min()) < 0 or values[IDS].max() >= vocabulary):
        token = low if low < 0 else values[IDS].max()
        raise InputError(f"there is no token {token}: the model knows {vocabulary}")
    types = _array(given[TYPES]) if TYPES in given and TYPES not in values else np.zeros_like(ids)
    if (types if is_real is None else types[is_real]).any():
        raise InputError(f"{TYPES} other than zero: the model was built for a task of one text, and leaves them out")
    return Rows(Batch(values, lengths), is_real, width)


def rows_of(given: Mapping[str, Tensor]) -> list[list[int]]:
    """Each row's own tokens."""
    ids, is_real = _array(given[IDS]), _real(given)
    if not ids.size:
        raise InputError(f"{IDS} is empty: {ids.shape[0]} rows of {ids.shape[1]} tokens")
    return [(row if is_real is None else row[is_real[place]]).tolist() for place, row in enumerate(ids)]


def padded(output: FloatArray, spec: TensorSpec, rows: Rows, mask_id: int | None) -> Tensor:
    """As the module would give it. Zeros stand where it computes padding, which nobody reads.

    What answers for mask tokens alone has NaN at all others: no program can take them for an answer.
    """
    if MASKS in spec.shape:
        whole = np.full((len(rows.batch), rows.width, *output.shape[1:]), np.nan, output.dtype)
        is_real = np.ones((len(rows.batch), rows.width), bool) if rows.is_real is None else rows.is_real
        places = np.zeros_like(is_real)
        places[is_real] = rows.batch.values[IDS] == mask_id
        whole[places] = output
        return torch.from_numpy(whole)
    if not spec.is_per_token:
        return torch.from_numpy(output)
    if rows.is_real is None:
        return torch.from_numpy(output.reshape(len(rows.batch), rows.width, *output.shape[1:]))
    whole = np.zeros((len(rows.batch), rows.width, *output.shape[1:]), output.dtype)
    whole[rows.is_real] = output
    return torch.from_numpy(whole)


def _real(given: Mapping[str, Tensor]) -> BoolArray | None:
    """Which positions are no padding; None for all of them."""
    if ATTENTION_MASK not in given:
        return None
    mask: BoolArray = _array(given[ATTENTION_MASK]) != 0
    if mask.all():
        return None
    if not mask.any(axis=1).all():
        raise InputError(f"row {int(np.argmin(mask.any(axis=1))) + 1} is nothing but padding")
    # From the first real token to the last: as many as are real, unless padding stands between them.
    last = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
    if (last - mask.argmax(axis=1) != mask.sum(axis=1)).any():
        raise InputError(f"{ATTENTION_MASK} hides tokens between others: rows may be padded left or right, not inside")
    return mask


def _array(tensor: Tensor) -> IntArray:
    """Of the same memory, where that is the CPU's."""
    found: IntArray = tensor.detach().cpu().numpy()
    return found


def _times(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape))
