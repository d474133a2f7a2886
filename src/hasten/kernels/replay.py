"""What runs once for each bucket is recorded in a CUDA graph, and from then on one launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hasten.core.tensors import IntArray
from hasten.kernels.packing import Bucket

# Each holds some of the driver's memory.
MOST_GRAPHS = 256
# Sessions of several threads record one at a time: what one allocates meanwhile would be an error in the other.
_recording = threading.Lock()


class Replay:
    """`compute` takes a bucket's array on the device to its results there. One thread's, on a stream of its own."""

    def __init__(self, compute: Callable[[Any, Bucket], Any], device: str) -> None:
        self._compute, self._device = compute, device
        # What buckets share beside the stream, with the libraries' workspaces: their memory.
        self.stream = torch.cuda.Stream() if device != "cpu" else None
        self._pool: Any = None
        # The one that was used last is last.
        self._graphs: dict[Bucket, _Graph] = {}

    def __call__(self, packed: IntArray, bucket: Bucket) -> Any:
        """The results on the host, until the next call; on the CPU, through Triton's interpreter, for tests."""
        if self.stream is None:
            with torch.inference_mode():
                return self._compute(torch.from_numpy(packed), bucket).numpy()
        return self._graph(bucket)(packed)

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _graph(self, bucket: Bucket) -> _Graph:
        """Those that were not used for long make room."""
        graph = self._graphs.pop(bucket, None)
        if graph is None:
            with _recording:
                graph = _Graph(self._compute, bucket, self.stream, self._pool)
            self._pool = graph.pool
        self._graphs[bucket] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        return graph

    @property
    def last(self) -> _Graph:
        return next(reversed(self._graphs.values()))


class _Graph:
    """One bucket: a place for the batch on both sides, what is computed from it, and a place for what comes back."""

    def __init__(self, compute: Callable[[Any, Bucket], Any], bucket: Bucket, stream: Any, pool: Any) -> None:
        here = torch.zeros(sum(bucket.sizes), dtype=torch.int32, pin_memory=True)
        there = torch.zeros_like(here, device=stream.device)
        with torch.inference_mode(), torch.cuda.stream(stream):
            # Kernels are compiled and libraries make their workspaces, which no graph may hold.
            for _ in range(2):
                result = compute(there, bucket)
            stream.synchronize()
            back = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._graph = torch.cuda.CUDAGraph()
            # cuBLAS's workspace must be the graph's own: others may give back the one there is (torch.compile does).
            torch._C._cuda_clearCublasWorkspaces()
            # Other threads go on replaying theirs.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                there.copy_(here, non_blocking=True)
                back.copy_(compute(there, bucket), non_blocking=True)
            torch._C._cuda_clearCublasWorkspaces()
        self.pool = self._graph.pool()
        self._stream, self._there = stream, there
        self._here, self._back = here.numpy(), back.numpy()

    def __call__(self, packed: IntArray) -> Any:
        self._here[:] = packed
        self.replay()
        self._stream.synchronize()
        return self._back

    def replay(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
