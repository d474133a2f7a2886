"""Rotary position embeddings of queries and keys, in place, or inside the small-batch GEMM that computes them.

The channels of a pair are adjacent: `weights` reorders the columns of queries and keys, whose products do not depend on
the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 8, 256


@dataclass(frozen=True, slots=True)
class Rotary:
    """The cosine and sine of each channel pair of a head, side by side: (positions, channels)."""

    table: Any

    @classmethod
    def of(cls, theta: float, positions: int, head_size: int, device: Any, dtype: Any = torch.float32) -> Rotary:
        """Compute the table on the CPU in fp32, like transformers, and copy it to the device.

        For encoders in fp16 or bf16 it is in fp16, which rounds no more than the queries and keys themselves.
        """
        frequencies = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        angles = torch.arange(positions).float()[:, None] * frequencies
        table_dtype = torch.float32 if dtype == torch.float32 else torch.float16
        return cls(torch.stack([angles.cos(), angles.sin()], -1).flatten(1).to(device, table_dtype))

    @property
    def head_size(self) -> int:
        """Return the number of channels of a head."""
        return int(self.table.shape[1])


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of a batch: the position of each token, and the table."""

    positions: Any
    rotary: Rotary


def reference(qkv: Any, rotation: Rotation) -> Any:
    """Rotate in plain PyTorch."""
    rotary, (tokens, columns) = rotation.rotary, qkv.shape
    pairs = qkv.float()[:, : columns // 3 * 2].reshape(tokens, -1, rotary.head_size // 2, 2)
    cosines, sines = rotary.table.float()[rotation.positions.long()].view(tokens, 1, -1, 2).unbind(-1)
    first, second = pairs.unbind(-1)
    rotated = torch.stack([first * cosines - second * sines, second * cosines + first * sines], -1)
    return torch.cat([rotated.reshape(tokens, -1), qkv.float()[:, columns // 3 * 2 :]], 1)


def rotate(qkv: Any, rotation: Rotation) -> None:
    """Rotate the queries and keys of qkv (tokens, 3 × width) in place."""
    rows, columns = qkv.shape
    rotated_columns = columns // 3 * 2
    _rotate[(triton.cdiv(rotated_columns, _COLUMNS), triton.cdiv(rows, _ROWS))](
        qkv, rotation.positions, rotation.rotary.table, rows, columns, rotated_columns,
        head_size=rotation.rotary.head_size, block_rows=_ROWS, block_columns=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit
def rotate_pairs(
    value, row, column, rotated_columns, positions, table,
    is_masked: tl.constexpr, head_size: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """Rotate neighboring columns of a block, of valid rows; if it `is_masked`, only the first columns are rotated."""
    position = tl.load(positions + row)
    at = table + position[:, None] * head_size + (column % head_size)[None, :]
    if is_masked:
        is_rotated = (column < rotated_columns)[None, :]
        # The identity is a cosine of one and a sine of zero.
        factors = tl.where(is_rotated, tl.load(at).to(tl.float32), tl.where(column % 2 == 0, 1.0, 0.0)[None, :])
    else:
        factors = tl.load(at).to(tl.float32)
    cosine, sine = tl.split(tl.reshape(factors, (block_rows, block_columns // 2, 2)))
    first, second = tl.split(tl.reshape(value, (block_rows, block_columns // 2, 2)))
    rotated = tl.join(first * cosine - second * sine, second * cosine + first * sine)
    return tl.reshape(rotated, (block_rows, block_columns))


@triton.jit
def _rotate(
    qkv, positions, table, rows, columns, rotated_columns,
    head_size: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    # From the end, which was written last and is still in the cache.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    is_row = row < rows
    is_inside = is_row[:, None] & (column < rotated_columns)[None, :]
    at = qkv + row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    value = rotate_pairs(
        value, tl.where(is_row, row, 0), column, rotated_columns, positions, table,
        False, head_size, block_rows, block_columns,
    )  # fmt: skip
    tl.store(at, value.to(qkv.dtype.element_ty), mask=is_inside)
