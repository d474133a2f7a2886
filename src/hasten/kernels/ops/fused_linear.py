"""Half-precision GEMMs in Triton that include the kernels around them in a pre-norm layer.

Before the product: the norm, as a factor per row. After it: rotary embeddings, a gated activation, or the addition to
the residual together with the sum of squares that the next norm needs. Each saves a pass over the activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from hasten.kernels.ops.glu import gate
from hasten.kernels.ops.glu import reference as glu_reference
from hasten.kernels.ops.rotary import Rotary, rotate_pairs
from hasten.kernels.ops.rotary import reference as rotary_reference

# Rows of tiles that reuse the same weights while those are in the L2 cache.
_GROUP = 8
# The alignment of tensors that descriptors require.
_DESCRIPTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class LinearTileConfig:
    """The output tile of a program, the depth per iteration, warps and stages, and how tiles are loaded and run.

    Descriptors use Hopper's tensor memory accelerator. Persistent programs, so many per multiprocessor, compute several
    tiles, and load the next one while they finish one.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    has_descriptors: bool = False
    persistent: int = 0

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.columns}x{self.depth}x{self.warps}x{self.stages}"
        return f"{sizes}{'d' * self.has_descriptors}{f'p{self.persistent}' * (self.persistent > 0)}"

    @classmethod
    def parse(cls, text: str) -> LinearTileConfig:
        """Parse the form that `str` gives."""
        sizes, _, persistent = text.partition("p")
        is_descriptor = sizes.endswith("d")
        return cls(*map(int, sizes.rstrip("d").split("x")), is_descriptor, int(persistent or 0))


# With 128 × 128 and 8 warps two programs share a multiprocessor: one computes while the other loads or stores.
LINEAR_TILE_CONFIGS = (
    LinearTileConfig(128, 128, 64, 8, 3, has_descriptors=True),
    LinearTileConfig(128, 256, 64, 8, 3, has_descriptors=True),
    LinearTileConfig(128, 256, 64, 8, 3, has_descriptors=True, persistent=1),
    LinearTileConfig(128, 128, 64, 4, 3),
)


@dataclass(frozen=True, slots=True)
class Norm:
    """The sum of squares of each row of a GEMM's input, which is divided by its root mean square."""

    square_sums: Any
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of queries and keys: the position of each row, and the tables."""

    positions: Any
    rotary: Rotary


def reference(
    x: Any, weight: Any, norm: Norm | None = None, rotation: Rotation | None = None, glu_kind: str | None = None
) -> Any:
    """Compute the linear layer with its norm and epilogue in plain PyTorch."""
    y = x.float() @ weight.float().T
    if norm is not None:
        y = y * torch.rsqrt(norm.square_sums / x.shape[1] + norm.eps)[:, None]
    if rotation is not None:
        return rotary_reference(y, rotation.positions, rotation.rotary)
    return y if glu_kind is None else glu_reference(y, glu_kind)


def norm_linear_rotary(x: Any, weight: Any, norm: Norm, rotation: Rotation, tile_config: LinearTileConfig) -> Any:
    """Return queries, keys and values of the normalized x (tokens, width), rotated."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, tile_config, norm=norm, rotation=rotation)
    return out


def norm_linear_glu(x: Any, weight: Any, norm: Norm, glu_kind: str, tile_config: LinearTileConfig) -> Any:
    """Return GELU of the even columns times the odd columns of the normalized x times weightᵀ."""
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, tile_config, norm=norm, glu_kind=glu_kind)
    return out


def linear_residual(x: Any, weight: Any, residual: Any, square_sums: Any | None, tile_config: LinearTileConfig) -> Any:
    """Return x · weightᵀ + residual, and add the squares of each row to `square_sums` in fp32."""
    out = torch.empty_like(residual)
    _launch(x, weight, out, tile_config, residual=residual, square_sums=square_sums)
    return out


def _launch(
    x: Any,
    weight: Any,
    out: Any,
    tile_config: LinearTileConfig,
    *,
    norm: Norm | None = None,
    rotation: Rotation | None = None,
    glu_kind: str | None = None,
    residual: Any | None = None,
    square_sums: Any | None = None,
) -> None:
    (rows, depth), columns = x.shape, weight.shape[0]
    has_descriptors = tile_config.has_descriptors and _is_aligned(x) and _is_aligned(weight)
    if has_descriptors:
        x, weight = _descriptor(x, tile_config.rows, tile_config), _descriptor(weight, tile_config.columns, tile_config)
    rotary = None if rotation is None else rotation.rotary
    programs = triton.cdiv(rows, tile_config.rows) * triton.cdiv(columns, tile_config.columns)
    if tile_config.persistent:
        programs = min(programs, tile_config.persistent * _multiprocessors(out.device))
    _fused_linear[(programs,)](
        x, weight, out, rows, columns, depth,
        None if norm is None else norm.square_sums, 0.0 if norm is None else norm.eps,
        None if rotation is None else rotation.positions,
        None if rotary is None else rotary.table, residual, square_sums,
        head_size=0 if rotary is None else rotary.head_size, glu_kind=glu_kind, has_descriptors=has_descriptors,
        is_depth_divisible=depth % tile_config.depth == 0,
        is_rotation_masked=columns // 3 * 2 % tile_config.columns != 0,
        block_rows=tile_config.rows, block_columns=tile_config.columns, block_depth=tile_config.depth,
        group_rows=_GROUP, is_persistent=tile_config.persistent > 0,
        num_warps=tile_config.warps, num_stages=tile_config.stages,
    )  # fmt: skip


def _is_aligned(tensor: Any) -> bool:
    return tensor.data_ptr() % _DESCRIPTOR_BYTES == 0 == tensor.stride(0) * tensor.element_size() % _DESCRIPTOR_BYTES


@cache
def _multiprocessors(device: Any) -> int:
    """Return the number of multiprocessors; the interpreter's few let tests run several tiles in a program."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _descriptor(tensor: Any, rows: int, tile_config: LinearTileConfig) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, [rows, tile_config.depth])


@triton.jit
def _fused_linear(
    x, weight, out, rows, columns, depth, norm_square_sums, eps, positions, table, residual, square_sums,
    head_size: tl.constexpr, glu_kind: tl.constexpr, has_descriptors: tl.constexpr, is_depth_divisible: tl.constexpr,
    is_rotation_masked: tl.constexpr, is_persistent: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_depth: tl.constexpr, group_rows: tl.constexpr,
):  # fmt: skip
    if is_persistent:
        tiles = tl.cdiv(rows, block_rows) * tl.cdiv(columns, block_columns)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tile(
                tile, x, weight, out, rows, columns, depth, norm_square_sums, eps, positions, table, residual,
                square_sums, head_size, glu_kind, has_descriptors, is_depth_divisible, is_rotation_masked,
                block_rows, block_columns, block_depth, group_rows,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), x, weight, out, rows, columns, depth, norm_square_sums, eps, positions, table, residual,
            square_sums, head_size, glu_kind, has_descriptors, is_depth_divisible, is_rotation_masked,
            block_rows, block_columns, block_depth, group_rows,
        )  # fmt: skip


@triton.jit
def _tile(
    tile, x, weight, out, rows, columns, depth, norm_square_sums, eps, positions, table, residual, square_sums,
    head_size: tl.constexpr, glu_kind: tl.constexpr, has_descriptors: tl.constexpr, is_depth_divisible: tl.constexpr,
    is_rotation_masked: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr, block_depth: tl.constexpr, group_rows: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(columns, block_columns)
    first_group_row = tile // (group_rows * column_tiles) * group_rows
    group_size = tl.minimum(tl.cdiv(rows, block_rows) - first_group_row, group_rows)
    first_row = (first_group_row + tile % (group_rows * column_tiles) % group_size) * block_rows
    first_column = tile % (group_rows * column_tiles) // group_size * block_columns
    row, column = first_row + tl.arange(0, block_rows), first_column + tl.arange(0, block_columns)
    total = tl.zeros((block_rows, block_columns), tl.float32)
    if has_descriptors:
        for start in range(0, depth, block_depth):
            total = tl.dot(x.load([first_row, start]), weight.load([first_column, start]).T, total)
    else:
        k = tl.arange(0, block_depth)
        # Indices past an end wrap around and are never stored: loads without masks are faster.
        x_at = x + (row % rows)[:, None].to(tl.int64) * depth + k[None, :]
        weight_at = weight + (column % columns)[None, :].to(tl.int64) * depth + k[:, None]
        for start in range(0, depth, block_depth):
            if is_depth_divisible:
                values, weights = tl.load(x_at), tl.load(weight_at)
            else:
                values = tl.load(x_at, mask=(start + k < depth)[None, :], other=0.0)
                weights = tl.load(weight_at, mask=(start + k < depth)[:, None], other=0.0)
            total = tl.dot(values, weights, total)
            x_at += block_depth
            weight_at += block_depth
    is_row = row < rows
    if norm_square_sums is not None:
        square_sum = tl.load(norm_square_sums + row, mask=is_row, other=1.0)
        total *= tl.rsqrt(square_sum / depth + eps)[:, None]
    if positions is not None:
        rotated_columns = columns // 3 * 2
        if first_column < rotated_columns:
            total = rotate_pairs(
                total, row % rows, column, rotated_columns, positions, table,
                is_rotation_masked, head_size, block_rows, block_columns,
            )  # fmt: skip
    if glu_kind is not None:
        gated = gate(total, glu_kind, block_rows, block_columns)
        half = first_column // 2 + tl.arange(0, block_columns // 2)
        at = out + row[:, None].to(tl.int64) * (columns // 2) + half[None, :]
        tl.store(at, gated.to(out.dtype.element_ty), mask=is_row[:, None] & (half < columns // 2)[None, :])
    else:
        is_inside = is_row[:, None] & (column < columns)[None, :]
        at = row[:, None].to(tl.int64) * columns + column[None, :]
        if residual is not None:
            total += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=is_inside)
        if square_sums is not None:
            squares = tl.sum(tl.where(is_inside, total * total, 0.0), axis=1)
            tl.atomic_add(square_sums + row, squares, mask=is_row, sem="relaxed")
