"""Ragged batches, and the input and output tensors of a model.

Rows stay unpadded and concatenated throughout the program. Only a session whose runtime needs rectangular tensors
pads its inputs (`pad`) and removes the padding from its outputs (`unpad`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.integer]
FloatArray: TypeAlias = npt.NDArray[np.floating]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

BATCH = "batch"
SEQUENCE = "sequence"
# The axis of an output with one entry per mask token.
MASKS = "masks"

# The one input that a padded session derives itself: it marks the positions that are not padding.
ATTENTION_MASK = "attention_mask"
# An optional input of embedders: it marks the tokens of a prompt that the pooling leaves out.
PROMPT_MASK = "prompt_mask"
# An optional input of multi-vector encoders: it marks the tokens that fill a query, to which no token attends.
EXPANSION_MASK = "expansion_mask"

# Outputs by name. A tensor per row has the shape (rows, …), one per token (tokens, …), one per mask token (masks, …),
# rows concatenated.
Outputs: TypeAlias = Mapping[str, FloatArray]


class DType(StrEnum):
    """The element type of a tensor."""

    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name, element type, shape and padding value of an input or output."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    pad: int = 0

    @property
    def is_per_token(self) -> bool:
        """Return whether the tensor has one entry per token."""
        return SEQUENCE in self.shape


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a graph; the same for every variant made from it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_length: int
    pads_left: bool = False
    # Whether padding leaves a row's outputs unchanged; some convolutions see padding even where it is masked.
    ignores_padding: bool = True
    # The id of the mask token, if the outputs have entries for mask tokens only.
    mask_id: int | None = None

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the outputs that a row has whatever its length."""
        specs = [spec for spec in self.outputs if BATCH in spec.shape and not spec.is_per_token]
        return sum(4 * math.prod(size for size in spec.shape if isinstance(size, int)) for spec in specs)

    def counts(self, output: TensorSpec, batch: Batch) -> IntArray:
        """Return the number of entries of an output that belong to each row."""
        if output.is_per_token:
            return batch.lengths
        if MASKS not in output.shape:
            return np.ones(len(batch), np.int32)
        rows = np.repeat(np.arange(len(batch)), batch.lengths)
        return np.bincount(rows[batch.values["input_ids"] == self.mask_id], minlength=len(batch))

    def count(self, output: TensorSpec, batch: Batch) -> int:
        """Return the number of entries of an output for all rows together."""
        if output.is_per_token:
            return batch.tokens
        if MASKS not in output.shape:
            return len(batch)
        return int(np.count_nonzero(batch.values["input_ids"] == self.mask_id))


class Layout(StrEnum):
    """The layout in which a session passes rows to its runtime."""

    PADDED = "padded"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The properties of a loaded variant."""

    signature: Signature
    layout: Layout
    device: str
    # The precision that the runtime actually computes in, read back from it instead of the variant's name.
    precision: str


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a batch: its rows, and the tokens of each."""

    batch: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.batch}×{self.sequence}"

    @property
    def tokens(self) -> int:
        """Return the number of tokens, padding included."""
        return self.batch * self.sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of different lengths: the concatenated values of each input, and the length of each row."""

    values: Mapping[str, IntArray]
    lengths: IntArray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all rows."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Return the length of the longest row."""
        # For the few rows of a batch this is faster than NumPy's max.
        return max(self.lengths.tolist(), default=0)

    @classmethod
    def from_rows(cls, rows: Mapping[str, Sequence[Sequence[int]]]) -> Batch:
        """Return a batch of lists of integers, one list per row, for each input."""
        first = next(iter(rows.values()))
        lengths = np.array([len(row) for row in first], np.int32)
        values = {name: np.array(list(chain.from_iterable(column)), np.int32) for name, column in rows.items()}
        return cls(values, lengths)

    @classmethod
    def concatenate(cls, batches: Sequence[Batch]) -> Batch:
        """Return one batch with the rows of all given batches, in order."""
        values = {name: np.concatenate([batch.values[name] for batch in batches]) for name in batches[0].values}
        return cls(values, np.concatenate([batch.lengths for batch in batches]))

    def take(self, rows: IntArray) -> Batch:
        """Return the given rows, in the given order."""
        lengths = self.lengths[rows]
        index = ranges_to_indices((np.cumsum(self.lengths) - self.lengths)[rows], lengths)
        return Batch({name: value[index] for name, value in self.values.items()}, lengths)

    def split(self, values: npt.NDArray[Scalar]) -> list[npt.NDArray[Scalar]]:
        """Split values per token into one array per row."""
        return np.split(values, np.cumsum(self.lengths)[:-1])


def ranges_to_indices(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the concatenated indices of the ranges with these starts and lengths."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


def tile_rows(rows: Batch, lengths: IntArray, mask_id: int | None = None) -> Batch:
    """Return a batch with these row lengths, filled by repeating the tokens of `rows`.

    With `mask_id`, each row gets a mask token in its middle, except rows of two tokens: those are both special tokens.
    """
    values = {name: np.resize(column, int(lengths.sum())) for name, column in rows.values.items()}
    if mask_id is not None:
        middles = np.cumsum(lengths) - (lengths + 1) // 2
        values["input_ids"][middles[lengths > 2]] = mask_id
    return Batch(values, lengths.astype(np.int32))


def pad(batch: Batch, signature: Signature, bucket: Shape | None = None) -> dict[str, IntArray]:
    """Return a rectangular array per input, padded to the longest row or to a bucket.

    Rows of the bucket beyond those of the batch consist of a single padding token.
    """
    rows, lengths = len(batch), batch.lengths
    shape = bucket or Shape(rows, batch.longest)
    if rows < shape.batch:
        lengths = np.concatenate([lengths, np.ones(shape.batch - rows, lengths.dtype)])
    is_full = rows == shape.batch and set(lengths.tolist()) <= {shape.sequence}
    mask = None if is_full else real_positions(lengths, shape.sequence, signature.pads_left)
    feeds: dict[str, IntArray] = {}
    for spec in signature.inputs:
        dtype, size = np.dtype(spec.dtype.value), (shape.batch, shape.sequence)
        if spec.name == ATTENTION_MASK:
            feeds[spec.name] = np.ones(size, dtype) if mask is None else mask.astype(dtype)
        elif mask is None:
            feeds[spec.name] = batch.values[spec.name].reshape(size).astype(dtype, copy=False)
        else:
            feeds[spec.name] = np.full(size, spec.pad, dtype)
            feeds[spec.name][:rows][mask[:rows]] = batch.values[spec.name]
    return feeds


def unpad(
    outputs: Mapping[str, FloatArray], batch: Batch, signature: Signature, bucket: Shape | None = None
) -> dict[str, FloatArray]:
    """Return the outputs that belong to the rows of the batch, without padding."""
    unpadded = dict(outputs)
    for spec in signature.outputs:
        # Outputs per mask token need no selection: the padding contains no mask tokens.
        if BATCH in spec.shape and spec.name in outputs:
            # Without a bucket there are no other rows, and a graph that returns some is wrong: its loader sees them.
            if bucket is not None:
                unpadded[spec.name] = unpadded[spec.name][: len(batch)]
            if spec.is_per_token:
                width = bucket.sequence if bucket else batch.longest
                real = real_positions(batch.lengths, width, signature.pads_left)
                unpadded[spec.name] = unpadded[spec.name][real]
    return unpadded


def repad(output: FloatArray, lengths: IntArray, width: int, pads_left: bool = False) -> FloatArray:
    """Return a per-token output as a padded array (rows, width, …), zeros in the padding."""
    padded = np.zeros((len(lengths), width, *output.shape[1:]), output.dtype)
    padded[real_positions(lengths, width, pads_left)] = output
    return padded


def real_positions(lengths: IntArray, width: int, pads_left: bool = False) -> BoolArray:
    """Return a mask (rows, width) that is true for tokens and false for padding."""
    mask: BoolArray = np.arange(width) < lengths[:, None]
    return mask[:, ::-1] if pads_left else mask


def gather(parts: Iterable[tuple[IntArray, Outputs]], batch: Batch, signature: Signature) -> dict[str, FloatArray]:
    """Merge the outputs of several batches into one, in the row order of the batch they were taken from."""
    collected = list(parts)
    result: dict[str, FloatArray] = {}
    for spec in signature.outputs:
        counts = signature.counts(spec, batch)
        starts = np.cumsum(counts) - counts
        first = collected[0][1][spec.name]
        merged = np.empty((int(counts.sum()), *first.shape[1:]), first.dtype)
        for rows, outputs in collected:
            merged[ranges_to_indices(starts[rows], counts[rows])] = outputs[spec.name]
        result[spec.name] = merged
    return result


def check_counts(outputs: Outputs, batch: Batch, signature: Signature) -> None:
    """Raise ValueError if an output has more or fewer entries than belong to the batch."""
    for spec in signature.outputs:
        count, expected = len(outputs[spec.name]), signature.count(spec, batch)
        if count != expected:
            raise ValueError(f"the output '{spec.name}' has {count} entries instead of {expected}")


def divide(outputs: Outputs, batches: Sequence[Batch], signature: Signature) -> list[Outputs]:
    """Split the outputs of several batches that ran as one."""
    counts = {spec.name: [signature.count(spec, batch) for batch in batches] for spec in signature.outputs}
    parts = {name: np.split(outputs[name], np.cumsum(sizes)[:-1]) for name, sizes in counts.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(len(batches))]
