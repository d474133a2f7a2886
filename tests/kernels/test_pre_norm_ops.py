"""The kernels of pre-norm encoders match their plain PyTorch references at awkward sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hasten.kernels.ops import activation, attention, embed_norm, fused_linear, glu, rms_linear, rms_norm, rotary
from hasten.kernels.ops.fused_linear import LINEAR_TILE_CONFIGS, LinearTileConfig, Norm, Rotation
from hasten.kernels.ops.small_batch import Tile
from support.tolerances import DEVICE, TOKENS, TOLERANCE, check, draw, starts_of

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
tokens = pytest.mark.parametrize("count", TOKENS)
FP32 = torch.float32 if torch.float32 in TOLERANCE else torch.float16
# With and without descriptors, with a depth that the tile's does not divide, and with several tiles per program.
TILE_CONFIGS = [
    LinearTileConfig(16, 32, 32, 4, 2),
    LinearTileConfig(32, 64, 64, 4, 2),
    LinearTileConfig(32, 32, 32, 4, 2, has_descriptors=True),
    LinearTileConfig(16, 32, 32, 4, 2, has_descriptors=True, persistent=2),
]
tile_configs = pytest.mark.parametrize("tile_config", TILE_CONFIGS, ids=str)
# Sequences shorter than the window, of one to three windows and at its edges.
WINDOW = 9
LENGTHS = [1, 8, 9, 10, 17, 18, 19, 27, 40]


def test_tile_configs_are_named() -> None:
    assert [LinearTileConfig.parse(str(each)) for each in (*TILE_CONFIGS, *LINEAR_TILE_CONFIGS)] == [
        *TILE_CONFIGS,
        *LINEAR_TILE_CONFIGS,
    ]


def rotation_of(count: int) -> Rotation:
    positions = torch.randint(0, 20, (count,), dtype=torch.int32, device=DEVICE)
    return Rotation(positions, rotary.Rotary.of(160000.0, 20, 16, DEVICE))


@dtypes
@tokens
def test_rotation_in_place(count: int, dtype: torch.dtype) -> None:
    qkv, rotation = draw(count, 3 * 96, dtype=dtype), rotation_of(count)
    expected = rotary.reference(qkv, rotation.positions, rotation.rotary)
    rotary.rotate(qkv, rotation.positions, rotation.rotary)
    check(qkv, expected, dtype)


@dtypes
@tokens
@pytest.mark.parametrize("kind", [activation.EXACT, activation.TANH])
def test_gated_activation(kind: str, count: int, dtype: torch.dtype) -> None:
    x = draw(count, 2 * 72, dtype=dtype)
    check(glu.gated_activation(x, kind), glu.reference(x, kind), dtype)


@dtypes
@tokens
def test_rms_norm_with_and_without_residual(count: int, dtype: torch.dtype) -> None:
    x, residual = draw(count, 96, dtype=dtype), draw(count, 96, dtype=dtype)
    for arguments in ((x, 1e-5), (x, 1e-5, residual)):
        for actual, expected in zip(rms_norm.rms_norm(*arguments), rms_norm.reference(*arguments), strict=True):
            check(actual, expected, dtype)
    square_sums = torch.full((count,), torch.nan, device=DEVICE)
    total, _ = rms_norm.reference(x, 1e-5, residual)
    check(rms_norm.add_and_sum_squares(x, residual, square_sums), total, dtype)
    check(square_sums, total.square().sum(1), FP32)


@dtypes
def test_normalized_embeddings_and_their_residual(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 50, (17,), dtype=torch.int32, device=DEVICE)
    words, weight = draw(50, 96, dtype=dtype), draw(96, dtype=dtype)
    actual = embed_norm.embed_norm(ids, words, weight, 1e-5)
    for value, expected in zip(actual, embed_norm.reference(ids, words, weight, 1e-5), strict=True):
        check(value, expected, dtype)


@dtypes
@tokens
@tile_configs
def test_linear_with_norm_and_rotation(tile_config: LinearTileConfig, count: int, dtype: torch.dtype) -> None:
    x, weight = draw(count, 96, dtype=dtype), draw(3 * 96, 96, dtype=dtype) * 0.1
    norm, rotation = Norm(x.float().square().sum(1), 1e-5), rotation_of(count)
    actual = fused_linear.norm_linear_rotary(x, weight, norm, rotation, tile_config)
    check(actual, fused_linear.reference(x, weight, norm, rotation), dtype)


@dtypes
@tokens
@tile_configs
@pytest.mark.parametrize("kind", [activation.EXACT, activation.TANH])
def test_linear_with_norm_and_gate(kind: str, tile_config: LinearTileConfig, count: int, dtype: torch.dtype) -> None:
    x, weight = draw(count, 96, dtype=dtype), draw(2 * 72, 96, dtype=dtype) * 0.1
    norm = Norm(x.float().square().sum(1), 1e-5)
    actual = fused_linear.norm_linear_glu(x, weight, norm, kind, tile_config)
    check(actual, fused_linear.reference(x, weight, norm, glu_kind=kind), dtype)


@dtypes
@tokens
@tile_configs
def test_linear_with_residual_and_sums_of_squares(
    tile_config: LinearTileConfig, count: int, dtype: torch.dtype
) -> None:
    x, weight, residual = draw(count, 72, dtype=dtype), draw(96, 72, dtype=dtype) * 0.1, draw(count, 96, dtype=dtype)
    expected = fused_linear.reference(x, weight) + residual.float()
    square_sums = torch.ones(count, device=DEVICE)
    actual = fused_linear.linear_residual(x, weight, residual, square_sums, tile_config)
    check(actual, expected, dtype)
    check(square_sums, 1 + expected.square().sum(1), FP32)
    check(fused_linear.linear_residual(x, weight, residual, None, tile_config), expected, dtype)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter needs minutes for tiles of this size")
@pytest.mark.parametrize("tile_config", LINEAR_TILE_CONFIGS, ids=str)
def test_tuned_tiles_match(tile_config: LinearTileConfig) -> None:
    x, weight = draw(1000, 768, dtype=torch.float16), draw(2304, 768, dtype=torch.float16) * 0.05
    norm = Norm(x.float().square().sum(1), 1e-5)
    rotation = Rotation(
        torch.randint(0, 8192, (1000,), dtype=torch.int32, device=DEVICE),
        rotary.Rotary.of(160000.0, 8192, 64, DEVICE),
    )
    for actual, expected in (
        (
            fused_linear.norm_linear_rotary(x, weight, norm, rotation, tile_config),
            fused_linear.reference(x, weight, norm, rotation),
        ),
        (
            fused_linear.norm_linear_glu(x, weight, norm, "gelu", tile_config),
            fused_linear.reference(x, weight, norm, glu_kind="gelu"),
        ),
    ):
        check(actual, expected, torch.float16)


@dtypes
@tokens
@pytest.mark.parametrize("has_norm", [True, False])
def test_small_batch_linear_with_norm(has_norm: bool, count: int, dtype: torch.dtype) -> None:
    x, weight = draw(count, 96), draw(3 * 96, 96, dtype=dtype) * 0.1
    norm, eps = (Norm(x.square().sum(1), 1e-5), 1e-5) if has_norm else (None, None)
    rotation = rotation_of(count)
    out = torch.full((count, 3 * 96), torch.nan).to(DEVICE, dtype)
    rms_linear.rms_linear(x, eps, weight, out, rotation, tile=Tile(16, 32, 4))
    check(out, fused_linear.reference(x, weight, norm, rotation), dtype)
    out = torch.full((count, 3 * 48), torch.nan).to(DEVICE, dtype)
    rms_linear.rms_linear(x, eps, weight, out, None, activation.EXACT, tile=Tile(16, 32, 4))
    check(out, fused_linear.reference(x, weight, norm, glu_kind=activation.EXACT), dtype)


@dtypes
@pytest.mark.parametrize("window", [0, 1, WINDOW, 16, 100])
@pytest.mark.parametrize(
    ("tile_config", "parts"),
    [
        (attention.AttentionTileConfig(16, 16, 1, 3), 1),
        (attention.AttentionTileConfig(16, 16, 1, 3), 2),
        (attention.AttentionTileConfig(32, 16, 4, 3), 1),
        (attention.AttentionTileConfig(16, 32, 4, 3), 1),
    ],
    ids=str,
)
def test_attention_within_window(
    tile_config: attention.AttentionTileConfig, parts: int, window: int, dtype: torch.dtype
) -> None:
    heads, size = 3, 32
    qkv = draw(sum(LENGTHS), 3 * heads * size, dtype=dtype)
    tiles = torch.from_numpy(attention.query_tiles(np.array(LENGTHS), parts * tile_config.rows)).to(DEVICE)
    actual = attention.attention(qkv, tiles, heads, window=window, tile_config=tile_config, parts=parts)
    check(actual, attention.reference(qkv, starts_of(LENGTHS), heads, window=window), dtype)


def test_attention_does_not_read_beyond_window() -> None:
    """A value far outside the window has no effect, even if it is not finite: its block is not visited."""
    qkv = draw(64, 3 * 32, dtype=FP32)
    qkv[40:, 64:] = torch.inf
    tiles = torch.from_numpy(attention.query_tiles(np.array([64]), 16)).to(DEVICE)
    config = attention.AttentionTileConfig(16, 16, 1, 3)
    assert attention.attention(qkv, tiles, 1, window=8, tile_config=config)[:24].isfinite().all()
    assert not attention.attention(qkv, tiles, 1, tile_config=config)[:24].isfinite().any()
