"""The kernels of pre-norm encoders match their plain PyTorch references at awkward sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hasten.kernels.ops import activation, attention, embed_norm, glu, rms_linear, rms_norm, rotary
from hasten.kernels.ops.rotary import Rotation
from hasten.kernels.ops.small_batch import Tile
from support.tolerances import DEVICE, TOKENS, TOLERANCE, check, draw, starts_of

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
tokens = pytest.mark.parametrize("count", TOKENS)
FP32 = torch.float32 if torch.float32 in TOLERANCE else torch.float16
# Sequences shorter than the window, of one to three windows and at its edges.
WINDOW = 9
LENGTHS = [1, 8, 9, 10, 17, 18, 19, 27, 40]


def rotation_of(count: int) -> Rotation:
    positions = torch.randint(0, 20, (count,), dtype=torch.int32, device=DEVICE)
    return Rotation(positions, rotary.Rotary.of(160000.0, 20, 16, DEVICE))


@dtypes
@tokens
def test_rotation_in_place(count: int, dtype: torch.dtype) -> None:
    qkv, rotation = draw(count, 3 * 96, dtype=dtype), rotation_of(count)
    expected = rotary.reference(qkv, rotation)
    rotary.rotate(qkv, rotation)
    check(qkv, expected, dtype)


@dtypes
@tokens
@pytest.mark.parametrize("kind", [activation.EXACT, activation.TANH])
def test_gated_activation(kind: str, count: int, dtype: torch.dtype) -> None:
    x = draw(count, 2 * 72, dtype=dtype)
    check(glu.gated_activation(x, kind), glu.reference(x, kind), dtype)


@dtypes
@tokens
def test_rms_norm_with_residual(count: int, dtype: torch.dtype) -> None:
    x, residual = draw(count, 96, dtype=dtype), draw(count, 96, dtype=dtype)
    expected = rms_norm.reference(x, residual, 1e-5)
    for actual, value in zip(rms_norm.rms_norm(x, residual, 1e-5), expected, strict=True):
        check(actual, value, dtype)


@dtypes
def test_normalized_embeddings_and_their_residual(dtype: torch.dtype) -> None:
    ids = torch.randint(0, 50, (17,), dtype=torch.int32, device=DEVICE)
    words, weight = draw(50, 96, dtype=dtype), draw(96, dtype=dtype)
    actual = embed_norm.embed_norm(ids, words, weight, 1e-5)
    for value, expected in zip(actual, embed_norm.reference(ids, words, weight, 1e-5), strict=True):
        check(value, expected, dtype)


@dtypes
@tokens
@pytest.mark.parametrize("has_norm", [True, False])
def test_small_batch_linear_with_norm(has_norm: bool, count: int, dtype: torch.dtype) -> None:
    x, weight = draw(count, 96), draw(3 * 96, 96, dtype=dtype) * 0.1
    eps, rotation = 1e-5 if has_norm else None, rotation_of(count)
    out = torch.full((count, 3 * 96), torch.nan).to(DEVICE, dtype)
    rms_linear.rms_linear(x, eps, weight, out, rotation, tile=Tile(16, 32, 4))
    check(out, rms_linear.reference(x, eps, weight, rotation), dtype)
    out = torch.full((count, 3 * 48), torch.nan).to(DEVICE, dtype)
    rms_linear.rms_linear(x, eps, weight, out, None, activation.EXACT, tile=Tile(16, 32, 4))
    check(out, rms_linear.reference(x, eps, weight, None, activation.EXACT), dtype)


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
