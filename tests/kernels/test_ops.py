"""Every kernel against the plain PyTorch beside it, at awkward sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hasten.kernels import across, activation, attend, attention, contract, embed, expand, head, norm, pool
from ops import DEVICE, MIXED, TOKENS, TOLERANCE, check, draw, sequence_of, starts_of

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
tokens = pytest.mark.parametrize("count", TOKENS)


@dtypes
@tokens
def test_norm_with_and_without_what_is_added(count: int, dtype: torch.dtype) -> None:
    x, residual = draw(count, 96, dtype=dtype), draw(count, 96, dtype=dtype)
    scale, shift, bias = (draw(96, dtype=dtype) for _ in range(3))
    check(norm.layer_norm(x, scale, shift, 1e-5), norm.reference(x, scale, shift, 1e-5), dtype)
    whole = (x, scale, shift, 1e-5, bias, residual)
    check(norm.layer_norm(*whole), norm.reference(*whole), dtype)


@dtypes
@tokens
@pytest.mark.parametrize("kind", [activation.EXACT, activation.TANH])
def test_gelu_in_place(kind: str, count: int, dtype: torch.dtype) -> None:
    x = draw(count, 96, dtype=dtype) * 3
    expected = activation.reference(x, kind)
    assert activation.gelu_(x, kind) is x
    check(x, expected, dtype)


@dtypes
@pytest.mark.parametrize("has_kinds", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
def test_embeddings(has_norm: bool, has_kinds: bool, dtype: torch.dtype) -> None:
    ids, places, kinds = (torch.randint(0, most, (17,), dtype=torch.int32, device=DEVICE) for most in (50, 20, 2))
    tables = [draw(most, 96, dtype=dtype) for most in (50, 20, 2)]
    chosen = (*tables[:2], tables[2] if has_kinds else None)
    how = (draw(96, dtype=dtype), draw(96, dtype=dtype), 1e-5) if has_norm else None
    check(embed.embed(ids, places, kinds, *chosen, how)[0], embed.reference(ids, places, kinds, *chosen, how), dtype)


@dtypes
@pytest.mark.parametrize("lengths", MIXED, ids=str)
@pytest.mark.parametrize("size", [32, 8])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("cut", [*attention.CUTS.values(), attention.LONG], ids=str)
def test_attention_over_mixed_lengths(
    cut: attention.Cut, has_bias: bool, size: int, lengths: list[int], dtype: torch.dtype
) -> None:
    heads = 3
    qkv = draw(sum(lengths), 3 * heads * size, dtype=dtype)
    bias = draw(heads, 301, dtype=dtype) if has_bias else None
    work = torch.from_numpy(attention.tiles(np.array(lengths), cut.rows)).to(DEVICE)
    found = attention.attention(qkv, work, heads, bias, cut=cut)
    check(found, attention.reference(qkv, starts_of(lengths), heads, bias), dtype)


@pytest.mark.parametrize("count", [1, 17, 2048, 5000, 600_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16], ids=str)
def test_copies_between_the_host_and_the_device(dtype: torch.dtype, count: int) -> None:
    here, back = (torch.zeros(count + 1, dtype=dtype, pin_memory=DEVICE == "cuda") for _ in range(2))
    here[:count] = torch.arange(1, count + 1).to(dtype)
    there = torch.zeros(count + 1, dtype=dtype, device=DEVICE)
    across.across(here[:count], there[:count])
    assert torch.equal(there.cpu(), here)
    across.across(there[:count], back[:count])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back, here)


def test_tiles_cover_every_token_once() -> None:
    lengths = np.array([1, 64, 65, 200])
    ends = np.cumsum(lengths)
    covered = [np.arange(own, min(own + 64, end)) for own, _, end in attention.tiles(lengths, 64)]
    assert np.array_equal(np.sort(np.concatenate(covered)), np.arange(ends[-1]))


def test_the_shorter_sequences_are_the_smaller_a_tile() -> None:
    cuts = [attention.cut_for(64 * mean, 64) for mean in range(1, 513)]
    assert {cuts[0], cuts[-1]} == {attention.CUTS[24], attention.LONG}
    assert [cut.rows * cut.keys for cut in cuts] == sorted(cut.rows * cut.keys for cut in cuts)


@dtypes
@tokens
@pytest.mark.parametrize("kind", [None, activation.EXACT, activation.TANH])
def test_expansion_and_the_start_of_the_next_sum(kind: str | None, count: int, dtype: torch.dtype) -> None:
    total, weight = draw(count, 96), draw(128, 96, dtype=dtype) * 0.1
    scale, shift, next_bias = (draw(96, dtype=dtype) for _ in range(3))
    bias = draw(128, dtype=dtype)
    out, started = torch.full((count, 128), torch.nan).to(DEVICE, dtype), torch.full((count, 96), torch.nan).to(DEVICE)
    given = (total, scale, shift, 1e-5, weight, bias, next_bias)
    expand.expand(*given, out, started, kind, columns=32, warps=4)
    expected = expand.reference(*given, kind)
    check(out, expected[0], dtype)
    check(started, expected[1], torch.float32 if torch.float32 in TOLERANCE else dtype)


@dtypes
@tokens
def test_contraction_adds_to_what_is_there(count: int, dtype: torch.dtype) -> None:
    x, weight, total = draw(count, 128, dtype=dtype), draw(96, 128, dtype=dtype) * 0.1, draw(count, 96)
    expected = contract.reference(x, weight, total)
    contract.contract(x, weight, total, columns=32, depth=64)
    check(total, expected, dtype)


@dtypes
@pytest.mark.parametrize("lengths", [[1], [17], [5, 9, 3]], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_attention_of_few_with_its_product(has_bias: bool, lengths: list[int], dtype: torch.dtype) -> None:
    heads, width = 3, 96
    count = sum(lengths)
    qkv, weight, total = draw(count, 3 * width, dtype=dtype), draw(width, width, dtype=dtype) * 0.1, draw(count, width)
    bias = draw(heads, 301, dtype=dtype) if has_bias else None
    expected = attend.reference(qkv, sequence_of(lengths), weight, total, heads, bias)
    attend.attend(qkv, sequence_of(lengths), weight, total, heads, bias, columns=64)
    check(total, expected, dtype)


@dtypes
@pytest.mark.parametrize("kind", [pool.MEAN, pool.MAX, pool.SQRT, pool.WEIGHTED])
@pytest.mark.parametrize("lengths", MIXED, ids=str)
def test_pooling(lengths: list[int], kind: str, dtype: torch.dtype) -> None:
    x = draw(sum(lengths), 96, dtype=dtype)
    check(pool.pool(x, starts_of(lengths), kind), pool.reference(x, starts_of(lengths), kind), dtype)


@dtypes
@pytest.mark.parametrize("count", [17, 129])
@pytest.mark.parametrize(
    ("has_rows", "activation"), [(False, ""), (True, ""), (True, "tanh"), (True, "relu"), (True, "gelu")]
)
def test_layer_behind_the_encoder(has_rows: bool, activation: str, count: int, dtype: torch.dtype) -> None:
    # What comes from the encoder is in its precision, what comes from another layer is not.
    x, weight, bias = draw(count, 300, dtype=dtype), draw(3, 300, dtype=dtype) / 17, draw(3)
    rows = torch.tensor([0, 5, count - 1, count], dtype=torch.int32, device=DEVICE) if has_rows else None
    check(
        head.dense(x.float(), rows, weight, bias, activation), head.reference(x, rows, weight, bias, activation), dtype
    )
    check(head.dense(x, rows, weight, bias, activation), head.reference(x, rows, weight, bias, activation), dtype)


@dtypes
@pytest.mark.parametrize(("count", "columns"), [(1, 3), (17, 3), (1, 70), (17, 70), (129, 70), (300, 70)])
def test_layer_in_fp32_behind_an_encoder_in_halves(count: int, columns: int, dtype: torch.dtype) -> None:
    """Its weights are not rounded, however it is cut; nor is what comes from a layer before."""
    x, weight, bias = draw(count, 300, dtype=dtype), draw(columns, 300) / 17, draw(columns)
    for states in (x, x.float() + 1e-4 * draw(count, 300)):
        found, expected = head.dense(states, None, weight, bias), head.reference(states, None, weight, bias)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_layer_of_few_columns_over_many_rows() -> None:
    x, weight, bias = draw(1030, 300, dtype=torch.float16), draw(3, 300) / 17, draw(3)
    found, expected = head.dense(x, None, weight, bias), head.reference(x, None, weight, bias)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
