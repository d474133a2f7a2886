"""What cuBLASLt counts in is set to zero once in a graph, not before every product.

Many of its algorithms count in the first bytes of their workspace and have them set to zero first: a launch of its own
for four bytes, before nearly every product. `Products` gives each product of a recording a place of its own to count
in, so that the first of those launches can do it for all, and the others are taken out of the graph.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from hasten.kernels.driver import call, library
from hasten.kernels.products import Products

_MEMSET = 2  # the driver's name of such a node


class _Memset(ctypes.Structure):
    _fields_ = (
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_bytes", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )

    @property
    def end(self) -> int:
        return int(self.address + self.element_bytes * self.width)


class _Edge(ctypes.Structure):
    """Of what kind the order of two nodes is; all zeros is the usual one."""

    _fields_ = (("kind", c_ubyte * 8),)


@contextmanager
def recorded(stream: Any, products: Products | None, pool: Any = None) -> Iterator[Any]:
    """A CUDA graph of what is launched on the stream meanwhile, some of it by `products`; not yet ready to launch."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    if products is not None:
        products.rewind()
    # Other threads may go on meanwhile: what they do is not recorded.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph
    if products is not None:
        _zero_once(graph.raw_cuda_graph(), products.counters)


def _zero_once(graph: int, counters: range) -> None:
    if not _is_able():
        return
    found = [(node, memset) for node, memset in memsets(graph) if _zeroes(memset, counters)]
    # A place that had to be given twice is left as it is.
    uses = Counter(memset.address for _, memset in found)
    lone = sorted((pair for pair in found if uses[pair[1].address] == 1), key=lambda pair: -int(pair[1].address))
    if len(lone) < 2:
        return
    # Places are given downwards: the highest is the first one's.
    (first, memset), others = lone[0], lone[1:]
    lowest = others[-1][1].address
    call("cuGraphMemsetNodeSetParams", c_void_p(first), byref(_Memset(lowest, 0, 0, 1, memset.end - lowest, 1)))
    for node, _ in others:
        _take_out(graph, node)


def _zeroes(memset: _Memset, counters: range) -> bool:
    """Whether it sets some of one product's counters to zero, and nothing else."""
    is_inside = counters.start <= memset.address and memset.end <= counters.stop
    is_of_one = (memset.address - counters.start) // counters.step == (memset.end - 1 - counters.start) // counters.step
    return is_inside and is_of_one and memset.value == 0 and memset.height == 1


def _is_able() -> bool:
    """Drivers before CUDA 12.3 cannot say how nodes depend on each other where kernels overlap."""
    return hasattr(library(), "cuGraphAddDependencies_v2")


def memsets(graph: int) -> Iterator[tuple[int, _Memset]]:
    count, kind = c_size_t(), c_int()
    call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
    nodes = (c_void_p * count.value)()
    call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
    for node in filter(None, nodes):
        call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value == _MEMSET:
            memset = _Memset()
            call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(memset))
            yield node, memset


def _take_out(graph: int, node: int) -> None:
    """What came after it comes after what was before it."""
    before = _neighbours("cuGraphNodeGetDependencies_v2", node)
    after = _neighbours("cuGraphNodeGetDependentNodes_v2", node)
    call("cuGraphDestroyNode", c_void_p(node))
    for one in before:
        for other in after:
            ends = byref(c_void_p(one)), byref(c_void_p(other))
            call("cuGraphAddDependencies_v2", c_void_p(graph), *ends, byref(_Edge()), c_size_t(1))


def _neighbours(name: str, node: int) -> list[int]:
    count = c_size_t()
    call(name, c_void_p(node), None, None, byref(count))
    nodes, edges = (c_void_p * count.value)(), (_Edge * count.value)()
    if count.value:
        call(name, c_void_p(node), nodes, edges, byref(count))
    return list(filter(None, nodes))
