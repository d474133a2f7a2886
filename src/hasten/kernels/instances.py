"""A recorded graph is made ready for launches several times, and the fastest of those stays.

Each time the driver puts what it needs for the launches somewhere else, and of the shortest graphs there are two kinds
then, a tenth apart, whatever memory they compute in (`benchmarks/instances.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from ctypes import byref, c_uint64, c_void_p
from typing import Any, TypeVar

import torch

from hasten.core.errors import StageError
from hasten.kernels.driver import call, library

T = TypeVar("T")
# The faster kind is about every third.
_MOST = 8
# The least of several times: who else is at work on the GPU is not to look like another kind.
_LAUNCHES, _TIMES = 4, 4
# Times of one kind are a hundredth apart.
_APART = 1.05
# On an H200 graphs that take longer are all of one kind.
_SHORT_S = 0.1e-3
# The first launch takes some as well to bring the instance to the device.
_LONG_S = 4 * _SHORT_S
# As PyTorch does: what an allocator may have recorded is freed before it is allocated again.
_FREES_ON_LAUNCH = 1


class Instance:
    """A graph that the driver can launch; PyTorch's own way takes longer, since it has to change streams and back."""

    def __init__(self, graph: Any) -> None:
        self._handle, recorded = c_void_p(), c_void_p(graph.raw_cuda_graph())
        call("cuGraphInstantiateWithFlags", byref(self._handle), recorded, c_uint64(_FREES_ON_LAUNCH))
        # PyTorch keeps the memory that was recorded for as long as it has the graph.
        self._graph = graph
        weakref.finalize(self, library().cuGraphExecDestroy, self._handle).atexit = False

    def launch(self, stream: Any) -> None:
        call("cuGraphLaunch", self._handle, c_void_p(stream.cuda_stream))

    def seconds(self, stream: Any) -> float:
        """Of the device, for one of several in a row; where the first says that it takes long, that one's."""
        first = self.took(stream)
        if first > _LONG_S:
            return first
        return min(self.took(stream, _LAUNCHES) for _ in range(_TIMES)) / _LAUNCHES

    def took(self, stream: Any, launches: int = 1) -> float:
        """Seconds of the device for all of them."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(launches):
            self.launch(stream)
        end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def fastest(graph: Any, stream: Any) -> Instance:
    """Of what PyTorch has recorded and keeps. It is launched there for this, with whatever its inputs hold."""
    return chosen(_timed(graph, stream))


def _timed(graph: Any, stream: Any) -> Iterator[tuple[Instance, float]]:
    for place in range(_MOST):
        try:
            instance = Instance(graph)
        except StageError:
            if place == 0:
                raise
            # Of what CUDA's own allocator has recorded there can be one at a time.
            return
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
