"""Products that count in one workspace, each in its own place, which is set to zero once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from encoders import DEVICE
from hasten.kernels import counters
from hasten.kernels.counters import _Memset, _zeroes, recorded
from hasten.kernels.products import Product, Products

COUNTERS = range(4096, 4096 + 4 * 256, 256)
_TIMES = 4


@pytest.mark.parametrize(
    ("memset", "is_of_one"),
    [
        (_Memset(4096, 0, 0, 1, 4, 1), True),
        (_Memset(4096 + 3 * 256, 0, 0, 4, 64, 1), True),
        (_Memset(4096 + 256, 0, 7, 1, 4, 1), False),
        (_Memset(4096, 0, 0, 4, 65, 1), False),
        (_Memset(4096, 512, 0, 1, 4, 2), False),
        (_Memset(4092, 0, 0, 1, 4, 1), False),
        (_Memset(4096 + 4 * 256, 0, 0, 1, 4, 1), False),
    ],
    ids=["four bytes", "all of the last one's", "not to zero", "two products'", "two rows", "before", "behind"],
)
def test_what_sets_one_products_counters_to_zero(memset: _Memset, is_of_one: bool) -> None:
    assert _zeroes(memset, COUNTERS) == is_of_one


@pytest.mark.skipif(DEVICE == "cpu", reason="products of cuBLASLt need a GPU")
@pytest.mark.parametrize("takes", ["", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(8192, 768, 768), (144, 384, 1536)])
def test_they_are_set_to_zero_once_and_nothing_changes(takes: str, rows: int, columns: int, depth: int) -> None:
    products, what = Products(torch.float16), Product(rows, columns, depth, takes=takes)
    operands = products._drawn(what)
    expected = operands.x.float() @ operands.weight.float().T
    launches = [partial(products.multiply, what, operands, algorithm) for algorithm in products.proposals(what)]
    before = [check(launch, products, expected) for launch in launches]
    # Otherwise nothing was shown.
    assert max(before) == _TIMES or rows < 8192


def check(launch: Callable[[], Any], products: Products, expected: Any) -> int:
    """How often counters were set to zero before."""
    stream, plain = torch.cuda.Stream(), torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    products.rewind()
    with torch.cuda.graph(plain, stream=stream):
        for _ in range(_TIMES):
            launch()
    with recorded(stream, products) as graph:
        answers = [launch() for _ in range(_TIMES)]
    before = memsets(plain, products)
    assert memsets(graph, products) == min(1, before)
    for _ in range(2):
        for answer in answers:
            answer.zero_()
        graph.replay()
        torch.cuda.synchronize()
        wrong = [((answer.float() - expected).norm() / expected.norm()).item() for answer in answers]
        assert max(wrong) <= 2e-3
    return before


def memsets(graph: Any, products: Products) -> int:
    """Of counters: one product's, or those of several at once."""
    first, last = products.counters.start, products.counters.stop
    return sum(first <= memset.address < last for _, memset in counters.memsets(graph.raw_cuda_graph()))
