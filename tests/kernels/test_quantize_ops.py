"""Every kernel that writes or multiplies 8-bit values matches plain PyTorch, at awkward sizes and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.kernels.ops import (
    activation,
    attention,
    attention_out_proj,
    embed,
    gemm,
    linear_accumulate,
    norm,
    norm_linear,
    quantize,
)
from hasten.kernels.ops.activation import EXACT, TANH
from hasten.kernels.ops.gemm import TileConfig
from hasten.kernels.ops.quantize import FP8, INT8, MAX_VALUE, ActivationQuant, quantize_weight
from hasten.kernels.ops.small_batch import Tile
from support.tolerances import DEVICE, MIXED, TOKENS, check, draw, sequence_of, starts_of

HALF = torch.float32 if DEVICE == "cpu" else torch.float16
# Relative error: the order of additions differs, and on a GPU the rounding to fp16; a few values are quantized to the
# neighbouring 8-bit value.
# In the interpreter nothing differed (x86-64 with AVX-512, 2026-11). One neighbouring int8 value among 17 rows of 96 is
# 8e-4, which the order of additions of another CPU may cause.
TOLERANCE = 1e-3 if DEVICE == "cpu" else 5e-3
TILE_CONFIG = TileConfig(32, 32, 32, 4, 2)
dtypes = pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
granularities = pytest.mark.parametrize("is_per_tensor", [True, False], ids=["per tensor", "per channel"])
tokens = pytest.mark.parametrize("count", TOKENS)


def random_quant(dtype: Any, width: int, *, is_per_tensor: bool, max_abs: float = 4.0) -> ActivationQuant:
    inverse_scales = torch.ones(1) if is_per_tensor else torch.rand(width) + 0.5
    return ActivationQuant((inverse_scales * MAX_VALUE[dtype] / max_abs).to(DEVICE), dtype)


def check_quantized(actual: Any, expected: Any) -> None:
    """Assert equal values, but for a few that lie between two 8-bit values."""
    assert actual.dtype == expected.dtype
    difference = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert difference.item() <= TOLERANCE  # false for NaN


def draw_8bit(*shape: int, dtype: Any) -> Any:
    return (torch.randn(*shape) * MAX_VALUE[dtype] / 4).clamp(-MAX_VALUE[dtype], MAX_VALUE[dtype]).to(dtype).to(DEVICE)


@dtypes
@granularities
@tokens
def test_quantize_matches_reference(count: int, is_per_tensor: bool, dtype: Any) -> None:
    x, quant = draw(count, 96), random_quant(dtype, 96, is_per_tensor=is_per_tensor)
    assert torch.equal(activation.activate(x, None, quant).float(), quantize.reference(x, quant).float())


@dtypes
def test_out_of_range_values_are_clamped(dtype: Any) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, 1e30, -1e30, torch.inf, -torch.inf, 65504.0] * 4]).to(DEVICE)
    max_value = MAX_VALUE[dtype]
    actual = activation.activate(x, None, ActivationQuant(torch.ones(1, device=DEVICE), dtype)).float()
    assert actual[0, :8].tolist() == [0, 0, 0, max_value, -max_value, max_value, -max_value, max_value]


def test_fp8_subnormals_are_rounded_to_nearest() -> None:
    x = torch.linspace(-0.04, 0.04, 512).view(4, 128).to(DEVICE)
    quant = ActivationQuant(torch.ones(1, device=DEVICE), FP8)
    assert torch.equal(activation.activate(x, None, quant).float(), x.to(FP8).float())


@dtypes
def test_dequantized_weights_are_close(dtype: Any) -> None:
    weight, inverse_scales = draw(48, 96), torch.rand(96).to(DEVICE) + 0.5
    weight[7], weight[3, 5] = 0.0, 40.0
    quantized, scale = quantize_weight(weight, inverse_scales, dtype)
    dequantized = quantized.float() * scale.view(-1, 1) * inverse_scales
    assert not dequantized[7].any()
    assert (dequantized - weight).norm() / weight.norm() <= (0.03 if dtype is FP8 else 0.02)
    assert scale.numel() == (1 if dtype is FP8 else 48)


@dtypes
@granularities
@tokens
def test_norm_and_quantized_norm(count: int, is_per_tensor: bool, dtype: Any) -> None:
    x, residual = draw(count, 96, dtype=HALF), draw(count, 96, dtype=HALF)
    norm_weight, norm_bias, bias = (draw(96, dtype=HALF) for _ in range(3))
    # An outlier, and a row of equal values.
    x[0, 3] = 300.0
    x[-1], residual[-1] = -bias, 0.0
    quant = random_quant(dtype, 96, is_per_tensor=is_per_tensor)
    actual, quantized = norm.layer_norm(x, norm_weight, norm_bias, 1e-5, bias, residual, quant)
    expected = norm.reference(x, norm_weight, norm_bias, 1e-5, bias, residual)
    check(actual, expected, HALF)
    check_quantized(quantized, quantize.reference(expected, quant))


@dtypes
@granularities
@pytest.mark.parametrize("kind", [EXACT, TANH])
def test_quantized_gelu(kind: str, is_per_tensor: bool, dtype: Any) -> None:
    x, quant = draw(17, 96, dtype=HALF) * 3, random_quant(dtype, 96, is_per_tensor=is_per_tensor)
    before = x.clone()
    check_quantized(activation.activate(x, kind, quant), quantize.reference(activation.reference(before, kind), quant))
    assert torch.equal(x, before)


@dtypes
@pytest.mark.parametrize("lengths", MIXED, ids=str)
def test_quantized_attention(lengths: list[int], dtype: Any) -> None:
    heads, size = 3, 24
    qkv, quant = (
        draw(sum(lengths), 3 * heads * size, dtype=HALF),
        random_quant(dtype, heads * size, is_per_tensor=False),
    )
    tiles = torch.from_numpy(attention.query_tiles(torch.tensor(lengths).numpy(), 32)).to(DEVICE)
    actual = attention.attention(
        qkv, tiles, heads, None, quant, tile_config=attention.AttentionTileConfig(32, 32, 4, 3)
    )
    check_quantized(actual, quantize.reference(attention.reference(qkv, starts_of(lengths), heads), quant))


@dtypes
@granularities
def test_embeddings_and_quantized_embeddings(is_per_tensor: bool, dtype: Any) -> None:
    ids, positions = (torch.randint(0, max_abs, (17,), dtype=torch.int32, device=DEVICE) for max_abs in (50, 20))
    word_embeddings, position_embeddings = draw(50, 96, dtype=HALF), draw(20, 96, dtype=HALF)
    layer_norm, quant = (
        (draw(96, dtype=HALF), draw(96, dtype=HALF), 1e-5),
        random_quant(dtype, 96, is_per_tensor=is_per_tensor),
    )
    arguments = (ids, positions, ids, word_embeddings, position_embeddings, None, layer_norm)
    actual, quantized = embed.embed(*arguments, None, quant)
    check(actual, embed.reference(*arguments), HALF)
    check_quantized(quantized, quantize.reference(embed.reference(*arguments), quant))


@dtypes
@tokens
@pytest.mark.parametrize("depth", [64, 80], ids=["even", "uneven"])
def test_gemm_is_exact(depth: int, count: int, dtype: Any) -> None:
    """Compared with fp64 accumulation of the same 8-bit values, only fp32 rounding is lost."""
    x, weight = draw_8bit(count, depth, dtype=dtype), draw_8bit(48, depth, dtype=dtype)
    scale, bias = torch.rand(48 if dtype is INT8 else 1).to(DEVICE) * 1e-3, draw(48, dtype=HALF)
    exact = (x.double() @ weight.double().T) * scale.double() + bias.double()
    actual = gemm.gemm(x, weight, scale, bias, dtype=HALF, tile_config=TILE_CONFIG)
    # 4e-8 in the interpreter.
    assert ((actual.double() - exact).norm() / exact.norm()).item() <= (2e-7 if DEVICE == "cpu" else 2e-3)
    check(actual, gemm.reference(x, weight, scale, bias), HALF)
    # A row of zeros gives the bias.
    x[0] = torch.zeros(depth).to(dtype)
    assert torch.equal(gemm.gemm(x, weight, scale, bias, dtype=HALF, tile_config=TILE_CONFIG)[0], bias)


@dtypes
@granularities
@pytest.mark.parametrize("kind", [EXACT, TANH])
def test_gemm_with_gelu_and_quantized_output(kind: str, is_per_tensor: bool, dtype: Any) -> None:
    x, weight, quant = (
        draw_8bit(33, 64, dtype=dtype),
        draw_8bit(48, 64, dtype=dtype),
        random_quant(dtype, 48, is_per_tensor=is_per_tensor),
    )
    arguments = (x, weight, torch.full((1,), 2e-5).to(DEVICE), draw(48, dtype=HALF), kind, quant)
    actual = gemm.gemm(*arguments[:4], dtype=HALF, gelu_kind=kind, quant=quant, tile_config=TILE_CONFIG)
    check_quantized(actual, gemm.reference(*arguments))


@dtypes
@granularities
@pytest.mark.parametrize("count", [1, 17])
def test_small_batch_kernels_with_8bit_weights(count: int, is_per_tensor: bool, dtype: Any) -> None:
    """Only weights are rounded: the reference with dequantized weights gives the same."""
    quant = random_quant(dtype, 96, is_per_tensor=is_per_tensor, max_abs=64.0)
    total, weight = draw(count, 96), draw(128, 96) * 0.1
    norm_weight, norm_bias, next_bias, bias = (draw(size, dtype=HALF) for size in (96, 96, 96, 128))
    quantized, scale = quantize_weight(weight, quant.inverse_scales, dtype)
    dequantized = quantized.float() * scale.view(-1, 1) * quant.inverse_scales
    out, next_total = (
        torch.full((count, 128), torch.nan).to(DEVICE, HALF),
        torch.full((count, 96), torch.nan).to(DEVICE),
    )
    arguments = (total, norm_weight, norm_bias, 1e-5)
    norm_linear.norm_linear(
        *arguments, quantized, bias, next_bias, out, next_total, EXACT, scale, quant, tile=Tile(16, 32, 4)
    )
    expected = norm_linear.reference(*arguments, dequantized, bias, next_bias, EXACT)
    check(out, expected[0], HALF)
    check(next_total, expected[1], HALF)

    x, accumulated = draw(count, 96, dtype=HALF), draw(count, 128)
    expected = linear_accumulate.reference(x, dequantized, accumulated)
    linear_accumulate.linear_accumulate(x, quantized, accumulated, scale, quant, tile=Tile(16, 32, 4, 32))
    check(accumulated, expected, HALF)


@dtypes
@pytest.mark.parametrize("lengths", [[1], [5, 9, 3]], ids=str)
def test_attention_out_proj_with_8bit_weights(lengths: list[int], dtype: Any) -> None:
    heads, width, count = 3, 96, sum(lengths)
    quant = random_quant(dtype, width, is_per_tensor=False)
    qkv, total = draw(count, 3 * width, dtype=HALF), draw(count, width)
    quantized, scale = quantize_weight(draw(width, width) * 0.1, quant.inverse_scales, dtype)
    dequantized = quantized.float() * scale.view(-1, 1) * quant.inverse_scales
    expected = attention_out_proj.reference(qkv, sequence_of(lengths), dequantized, total, heads)
    attention_out_proj.attention_out_proj(
        qkv, sequence_of(lengths), quantized, total, heads, None, scale, quant, tile=Tile(16, 64, 4)
    )
    check(total, expected, HALF)
