"""Eight bits: every kernel that writes or multiplies them against plain PyTorch, at awkward sizes and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.kernels import activation, attend, attention, contract, embed, expand, multiply, norm, squeeze
from hasten.kernels.activation import EXACT, TANH
from hasten.kernels.multiply import Cut
from hasten.kernels.squeeze import FP8, INT8, LARGEST, Squeeze, squeeze_weight
from ops import DEVICE, MIXED, TOKENS, check, draw, sequence_of, starts_of

HALF = torch.float32 if DEVICE == "cpu" else torch.float16
# Relative to the whole: what differs is the order of sums, and on a GPU what halves round on the way; and of that what
# becomes another number of eight bits now and then.
ROUNDED = 2e-3 if DEVICE == "cpu" else 5e-3
CUT = Cut(32, 32, 32, 4, 2)
dtypes = pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
uniform = pytest.mark.parametrize("is_uniform", [True, False], ids=["one", "channels"])
tokens = pytest.mark.parametrize("count", TOKENS)


def how(dtype: Any, width: int, *, is_uniform: bool, most: float = 4.0) -> Squeeze:
    factors = torch.ones(1) if is_uniform else torch.rand(width) + 0.5
    return Squeeze((factors * LARGEST[dtype] / most).to(DEVICE), dtype)


def alike(found: Any, expected: Any) -> None:
    """The same numbers, but for a few that lie between two."""
    assert found.dtype == expected.dtype
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    assert difference.item() <= ROUNDED  # which no NaN is


def drawn(*shape: int, dtype: Any) -> Any:
    return (torch.randn(*shape) * LARGEST[dtype] / 4).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(DEVICE)


@dtypes
@uniform
@tokens
def test_squeezing_alone(count: int, is_uniform: bool, dtype: Any) -> None:
    x, by = draw(count, 96), how(dtype, 96, is_uniform=is_uniform)
    assert torch.equal(squeeze.squeeze(x, by).float(), squeeze.reference(x, by).float())


@dtypes
def test_what_is_too_large_is_cut_off_and_nothing_is_no_number(dtype: Any) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, 1e30, -1e30, torch.inf, -torch.inf, 65504.0] * 4]).to(DEVICE)
    largest = LARGEST[dtype]
    found = squeeze.squeeze(x, Squeeze(torch.ones(1, device=DEVICE), dtype)).float()
    assert found[0, :8].tolist() == [0, 0, 0, largest, -largest, largest, -largest, largest]


def test_small_numbers_of_fp8_are_rounded_right() -> None:
    x = torch.linspace(-0.04, 0.04, 512).view(4, 128).to(DEVICE)
    by = Squeeze(torch.ones(1, device=DEVICE), FP8)
    assert torch.equal(squeeze.squeeze(x, by).float(), x.to(FP8).float())


@dtypes
def test_weights_keep_their_size(dtype: Any) -> None:
    weight, factors = draw(48, 96), torch.rand(96).to(DEVICE) + 0.5
    weight[7], weight[3, 5] = 0.0, 40.0
    narrow, step = squeeze_weight(weight, factors, dtype)
    back = narrow.float() * step.view(-1, 1) * factors
    assert not back[7].any()
    assert (back - weight).norm() / weight.norm() <= (0.03 if dtype is FP8 else 0.02)
    assert step.numel() == (1 if dtype is FP8 else 48)


@dtypes
@uniform
@tokens
def test_norm_in_both_forms(count: int, is_uniform: bool, dtype: Any) -> None:
    x, residual = draw(count, 96, dtype=HALF), draw(count, 96, dtype=HALF)
    scale, shift, bias = (draw(96, dtype=HALF) for _ in range(3))
    # An outlier, and a row in which all are the same.
    x[0, 3] = 300.0
    x[-1], residual[-1] = -bias, 0.0
    by = how(dtype, 96, is_uniform=is_uniform)
    found, narrow = norm.layer_norms(x, scale, shift, 1e-5, bias, residual, by)
    expected = norm.reference(x, scale, shift, 1e-5, bias, residual)
    check(found, expected, HALF)
    alike(narrow, squeeze.reference(expected, by))


@dtypes
@uniform
@pytest.mark.parametrize("kind", [EXACT, TANH])
def test_gelu_into_eight_bits(kind: str, is_uniform: bool, dtype: Any) -> None:
    x, by = draw(17, 96, dtype=HALF) * 3, how(dtype, 96, is_uniform=is_uniform)
    before = x.clone()
    alike(activation.gelu_(x, kind, by), squeeze.reference(activation.reference(before, kind), by))
    assert torch.equal(x, before)


@dtypes
@pytest.mark.parametrize("lengths", MIXED, ids=str)
def test_attention_into_eight_bits(lengths: list[int], dtype: Any) -> None:
    heads, size = 3, 24
    qkv, by = draw(sum(lengths), 3 * heads * size, dtype=HALF), how(dtype, heads * size, is_uniform=False)
    work = torch.from_numpy(attention.tiles(torch.tensor(lengths).numpy(), 32)).to(DEVICE)
    found = attention.attention(qkv, work, heads, None, by, cut=attention.Cut(32, 32, 4, 3))
    alike(found, squeeze.reference(attention.reference(qkv, starts_of(lengths), heads), by))


@dtypes
@uniform
def test_embeddings_in_both_forms(is_uniform: bool, dtype: Any) -> None:
    ids, places = (torch.randint(0, most, (17,), dtype=torch.int32, device=DEVICE) for most in (50, 20))
    words, rest = draw(50, 96, dtype=HALF), draw(20, 96, dtype=HALF)
    norms, by = (draw(96, dtype=HALF), draw(96, dtype=HALF), 1e-5), how(dtype, 96, is_uniform=is_uniform)
    given = (ids, places, ids, words, rest, None, norms)
    found, narrow = embed.embed(*given, None, by)
    check(found, embed.reference(*given), HALF)
    alike(narrow, squeeze.reference(embed.reference(*given), by))


@dtypes
@tokens
@pytest.mark.parametrize("depth", [64, 80], ids=["even", "uneven"])
def test_products_are_those_of_the_very_numbers(depth: int, count: int, dtype: Any) -> None:
    """Against a sum in fp64 of the same eight bits: nothing is lost but what fp32 rounds."""
    x, weight = drawn(count, depth, dtype=dtype), drawn(48, depth, dtype=dtype)
    step, bias = torch.rand(48 if dtype is INT8 else 1).to(DEVICE) * 1e-3, draw(48, dtype=HALF)
    exact = (x.double() @ weight.double().T) * step.double() + bias.double()
    found = multiply.multiply(x, weight, step, bias, dtype=HALF, cut=CUT)
    assert ((found.double() - exact).norm() / exact.norm()).item() <= (1e-6 if DEVICE == "cpu" else 2e-3)
    check(found, multiply.reference(x, weight, step, bias), HALF)
    # Rows of nothing give the bias.
    x[0] = torch.zeros(depth).to(dtype)
    assert torch.equal(multiply.multiply(x, weight, step, bias, dtype=HALF, cut=CUT)[0], bias)


@dtypes
@uniform
@pytest.mark.parametrize("kind", [EXACT, TANH])
def test_products_through_gelu_into_eight_bits(kind: str, is_uniform: bool, dtype: Any) -> None:
    x, weight, by = drawn(33, 64, dtype=dtype), drawn(48, 64, dtype=dtype), how(dtype, 48, is_uniform=is_uniform)
    given = (x, weight, torch.full((1,), 2e-5).to(DEVICE), draw(48, dtype=HALF), kind, by)
    found = multiply.multiply(*given[:4], dtype=HALF, kind=kind, squeeze=by, cut=CUT)
    alike(found, multiply.reference(*given))


@dtypes
@uniform
@pytest.mark.parametrize("count", [1, 17])
def test_few_tokens_by_weights_of_eight_bits(count: int, is_uniform: bool, dtype: Any) -> None:
    """Only the weights are rounded: with those widened again, the kernels in full precision give the same."""
    by = how(dtype, 96, is_uniform=is_uniform, most=64.0)
    total, weight = draw(count, 96), draw(128, 96) * 0.1
    scale, shift, next_bias, bias = (draw(size, dtype=HALF) for size in (96, 96, 96, 128))
    narrow, step = squeeze_weight(weight, by.factors, dtype)
    wide = narrow.float() * step.view(-1, 1) * by.factors
    out, started = torch.full((count, 128), torch.nan).to(DEVICE, HALF), torch.full((count, 96), torch.nan).to(DEVICE)
    given = (total, scale, shift, 1e-5)
    expand.expand(*given, narrow, bias, next_bias, out, started, EXACT, step, by, columns=32, warps=4)
    expected = expand.reference(*given, wide, bias, next_bias, EXACT)
    check(out, expected[0], HALF)
    check(started, expected[1], HALF)

    x, more = draw(count, 96, dtype=HALF), draw(count, 128)
    expected = contract.reference(x, wide, more)
    contract.contract(x, narrow, more, step, by, columns=32, depth=32)
    check(more, expected, HALF)


@dtypes
@pytest.mark.parametrize("lengths", [[1], [5, 9, 3]], ids=str)
def test_attention_of_few_by_weights_of_eight_bits(lengths: list[int], dtype: Any) -> None:
    heads, width, count = 3, 96, sum(lengths)
    by = how(dtype, width, is_uniform=False)
    qkv, total = draw(count, 3 * width, dtype=HALF), draw(count, width)
    narrow, step = squeeze_weight(draw(width, width) * 0.1, by.factors, dtype)
    wide = narrow.float() * step.view(-1, 1) * by.factors
    expected = attend.reference(qkv, sequence_of(lengths), wide, total, heads)
    attend.attend(qkv, sequence_of(lengths), narrow, total, heads, None, step, by, columns=64)
    check(total, expected, HALF)
