"""A recorded graph is made ready for launches several times, and the fastest of those stays.

Each time the driver puts what it needs for the launches somewhere else, and of the shortest graphs there are two kinds
then, a tenth apart, whatever memory they compute in (`benchmarks/instances.py`).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator
from ctypes import byref, c_uint64, c_void_p
from typing import Any, TypeVar

import torch

from hasten.core.errors import StageError

T = TypeVar("T")
# The faster kind is about every third.
_MOST = 8
_LAUNCHES, _TIMES = 5, 2
# Times of one kind are a hundredth apart.
_APART = 1.05
# On an H200 graphs that take longer are all of one kind.
_SHORT_S = 0.1e-3
# As PyTorch does: what an allocator may have recorded is freed before it is allocated again.
_FREES_ON_LAUNCH = 1


class Instance:
    """A graph that the driver can launch; PyTorch's own way takes longer, since it has to change streams and back."""

    def __init__(self, graph: Any) -> None:
        driver, handle = ctypes.CDLL("libcuda.so.1"), c_void_p()
        recorded = c_void_p(graph.raw_cuda_graph())
        status = driver.cuGraphInstantiateWithFlags(byref(handle), recorded, c_uint64(_FREES_ON_LAUNCH))
        if status != 0:
            raise StageError(f"cuGraphInstantiateWithFlags failed with status {status}")
        self._launch, self._handle = driver.cuGraphLaunch, handle
        # PyTorch keeps the memory that was recorded for as long as it has the graph.
        self._graph = graph
        weakref.finalize(self, driver.cuGraphExecDestroy, handle).atexit = False

    def launch(self, stream: Any) -> None:
        status = self._launch(self._handle, c_void_p(stream.cuda_stream))
        if status != 0:
            raise StageError(f"cuGraphLaunch failed with status {status}")

    def seconds(self, stream: Any) -> float:
        """Of the device, for one of several in a row."""
        self.launch(stream)
        return min(self._several(stream) for _ in range(_TIMES)) / _LAUNCHES

    def _several(self, stream: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(_LAUNCHES):
            self.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def fastest(graph: Any, stream: Any) -> Instance:
    """Of what PyTorch has recorded and keeps. It is launched there for this, with whatever its inputs hold."""
    return chosen(_timed(graph, stream))


def _timed(graph: Any, stream: Any) -> Iterator[tuple[Instance, float]]:
    for _ in range(_MOST):
        instance = Instance(graph)
        yield instance, instance.seconds(stream)


def chosen(timed: Iterable[tuple[T, float]]) -> T:
    """The fastest; when both kinds were seen, or where one takes long, no more are made."""
    seen: list[tuple[T, float]] = []
    for one in timed:
        seen.append(one)
        times = [seconds for _, seconds in seen]
        if max(times) > min(_SHORT_S, _APART * min(times)):
            break
    return min(seen, key=lambda one: one[1])[0]
