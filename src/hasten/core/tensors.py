"""Ragged batches and the tensors a model takes and gives.

Rows travel unpadded, end to end, through the whole program. Only a session whose runtime needs rectangles
pads them (`pad`), and takes the padding out of what comes back (`unpad`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer]
FloatArray: TypeAlias = npt.NDArray[np.floating]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

BATCH = "batch"
SEQUENCE = "sequence"
# The axis of an output that has an entry for each mask token, and for no other.
MASKS = "masks"

# The one input a padded session derives itself: it says which positions are real.
ATTENTION_MASK = "attention_mask"

# Named outputs. A tensor per row has shape (rows, …); one per token (tokens, …), one per mask token (masks, …), rows
# end to end.
Outputs: TypeAlias = Mapping[str, FloatArray]


class DType(StrEnum):
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    pad: int = 0

    @property
    def is_per_token(self) -> bool:
        return SEQUENCE in self.shape


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph takes and gives; the same for every variant made from it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_length: int
    pads_left: bool = False
    # Whether a row is answered alike with padding beside it; some convolutions see it, whatever the mask says.
    ignores_padding: bool = True
    # The mask token, where outputs are of it alone.
    mask_id: int | None = None

    def counts(self, output: TensorSpec, batch: Batch) -> IntArray:
        """How many entries of an output belong to each row."""
        if output.is_per_token:
            return batch.lengths
        if MASKS not in output.shape:
            return np.ones(len(batch), np.int32)
        rows = np.repeat(np.arange(len(batch)), batch.lengths)
        return np.bincount(rows[batch.values["input_ids"] == self.mask_id], minlength=len(batch))

    def count(self, output: TensorSpec, batch: Batch) -> int:
        """Of all rows together."""
        if output.is_per_token:
            return batch.tokens
        if MASKS not in output.shape:
            return len(batch)
        return int(np.count_nonzero(batch.values["input_ids"] == self.mask_id))


class Layout(StrEnum):
    PADDED = "padded"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a loaded variant says about itself."""

    signature: Signature
    layout: Layout
    device: str
    # The precision the runtime really computes in, read back from it, not from the variant's name.
    precision: str


@dataclass(frozen=True, slots=True)
class Shape:
    batch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.batch}×{self.sequence}"

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of different lengths: each input's values end to end, and how long each row is."""

    values: Mapping[str, IntArray]
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @classmethod
    def from_rows(cls, rows: Mapping[str, Sequence[Sequence[int]]]) -> Batch:
        first = next(iter(rows.values()))
        lengths = np.array([len(row) for row in first], np.int32)
        values = {name: np.array(list(chain.from_iterable(column)), np.int32) for name, column in rows.items()}
        return cls(values, lengths)

    @classmethod
    def concatenate(cls, batches: Sequence[Batch]) -> Batch:
        values = {name: np.concatenate([batch.values[name] for batch in batches]) for name in batches[0].values}
        return cls(values, np.concatenate([batch.lengths for batch in batches]))

    def take(self, rows: IntArray) -> Batch:
        """The given rows, in the given order."""
        lengths = self.lengths[rows]
        index = within((np.cumsum(self.lengths) - self.lengths)[rows], lengths)
        return Batch({name: value[index] for name, value in self.values.items()}, lengths)


def within(starts: IntArray, lengths: IntArray) -> IntArray:
    """The places of pieces that begin there and are so long, end to end."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


def tiled(rows: Batch, lengths: IntArray, mask_id: int | None = None) -> Batch:
    """Rows of these lengths from the same tokens, end to end; where outputs are of masks, each has one in its middle.

    But not a row of two tokens: those are the ones around a text.
    """
    values = {name: np.resize(column, int(lengths.sum())) for name, column in rows.values.items()}
    if mask_id is not None:
        middles = np.cumsum(lengths) - (lengths + 1) // 2
        values["input_ids"][middles[lengths > 2]] = mask_id
    return Batch(values, lengths.astype(np.int32))


def pad(batch: Batch, signature: Signature) -> dict[str, IntArray]:
    """Rectangles as long as the longest row, one per input of the signature."""
    rows, width = len(batch), int(batch.lengths.max(initial=0))
    is_ragged = bool((batch.lengths != width).any())
    mask = real_positions(batch.lengths, width, signature.pads_left) if is_ragged else None
    feeds: dict[str, IntArray] = {}
    for spec in signature.inputs:
        dtype = np.dtype(spec.dtype.value)
        if spec.name == ATTENTION_MASK:
            feeds[spec.name] = np.ones((rows, width), dtype) if mask is None else mask.astype(dtype)
        elif mask is None:
            feeds[spec.name] = batch.values[spec.name].reshape(rows, width).astype(dtype, copy=False)
        else:
            feed = np.full((rows, width), spec.pad, dtype)
            feed[mask] = batch.values[spec.name]
            feeds[spec.name] = feed
    return feeds


def unpad(outputs: Mapping[str, FloatArray], batch: Batch, signature: Signature) -> dict[str, FloatArray]:
    """Drop the padding of per-token outputs; per-row outputs pass unchanged."""
    width = int(batch.lengths.max(initial=0))
    per_token = {spec.name for spec in signature.outputs if spec.is_per_token}
    if not per_token:
        return dict(outputs)
    mask = real_positions(batch.lengths, width, signature.pads_left)
    return {name: value[mask] if name in per_token else value for name, value in outputs.items()}


def repad(output: FloatArray, lengths: IntArray, width: int, pads_left: bool = False) -> FloatArray:
    """An output per token as (rows, width, …) again, zeros where there is no token."""
    whole = np.zeros((len(lengths), width, *output.shape[1:]), output.dtype)
    whole[real_positions(lengths, width, pads_left)] = output
    return whole


def real_positions(lengths: IntArray, width: int, pads_left: bool = False) -> BoolArray:
    mask: BoolArray = np.arange(width) < lengths[:, None]
    return mask[:, ::-1] if pads_left else mask


def gather(parts: Iterable[tuple[IntArray, Outputs]], batch: Batch, signature: Signature) -> dict[str, FloatArray]:
    """Put the outputs of several batches back into the order of the rows they were taken from."""
    collected = list(parts)
    result: dict[str, FloatArray] = {}
    for spec in signature.outputs:
        counts = signature.counts(spec, batch)
        starts = np.cumsum(counts) - counts
        first = collected[0][1][spec.name]
        whole = np.empty((int(counts.sum()), *first.shape[1:]), first.dtype)
        for rows, outputs in collected:
            whole[within(starts[rows], counts[rows])] = outputs[spec.name]
        result[spec.name] = whole
    return result


def divide(outputs: Outputs, batches: Sequence[Batch], signature: Signature) -> list[Outputs]:
    """What belongs to each of several batches that ran as one."""
    counts = {spec.name: [signature.count(spec, batch) for batch in batches] for spec in signature.outputs}
    parts = {name: np.split(outputs[name], np.cumsum(own)[:-1]) for name, own in counts.items()}
    return [{name: part[place] for name, part in parts.items()} for place in range(len(batches))]
