"""What runs once for each bucket is recorded in a CUDA graph, and from then on one launch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hasten.core.recording import recording
from hasten.core.tensors import IntArray
from hasten.kernels.across import across
from hasten.kernels.counters import recorded
from hasten.kernels.instances import fastest
from hasten.kernels.packing import Bucket
from hasten.kernels.products import Products

# Writes a batch into the array it is given, with `packing.pack`.
Fill = Callable[[IntArray], None]
# Each holds some of the driver's memory.
MOST_GRAPHS = 256


class Replay:
    """`compute` takes a bucket's array on the device to its results there. One thread's, on a stream of its own."""

    def __init__(
        self, compute: Callable[[Any, Bucket], Any], device: str, products: Products | None, *, stays: bool = False
    ) -> None:
        """`products` are those it computes with. Results come to the host, or stay on the device where `stays`."""
        self._compute, self._device, self._products = compute, device, products
        # What buckets share beside the stream, with the libraries' workspaces: their memory, and where results go.
        self.stream = torch.cuda.Stream(device) if device != "cpu" else None
        self._pool: Any = None
        self._outbox = _Outbox({"device": device} if stays else {"pin_memory": True})
        # The one that was used last is last.
        self._graphs: dict[Bucket, _Graph] = {}
        self._used_stream = self.stream
        self._results: Any = None

    def __call__(self, bucket: Bucket, fill: Fill) -> Any:
        """The results on the host, until the next call."""
        self.start(bucket, fill)
        return self.finish()

    def start(self, bucket: Bucket, fill: Fill) -> None:
        """The host may do something else meanwhile. On the CPU, for tests, through Triton's interpreter."""
        if self.stream is None:
            self._results = self.on_device(bucket, fill).numpy()
        else:
            self._results = self._graph(bucket).start(fill)

    def finish(self) -> Any:
        if self.stream is not None:
            self.stream.synchronize()
        return self._results

    def on_device(self, bucket: Bucket, fill: Fill) -> Any:
        """The results where they are, for what is queued next on the caller's stream, until the next call."""
        if self.stream is None:
            whole = np.zeros(sum(bucket.sizes), np.int32)
            fill(whole)
            with torch.inference_mode(), torch.autocast("cpu", enabled=False):
                return self._compute(torch.from_numpy(whole), bucket)
        stream = torch.cuda.current_stream(self._device)
        if stream != self._used_stream:
            # All buckets share their memory, and another stream may be at work in it.
            stream.wait_stream(self._used_stream)
            self._used_stream = stream
        if bucket not in self._graphs:
            # What is recorded is run before, and shares the libraries' workspaces with what may still be at work.
            self.stream.wait_stream(stream)
        return self._graph(bucket).queue(fill, stream)

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _graph(self, bucket: Bucket) -> _Graph:
        """Those that were not used for long make room."""
        graph = self._graphs.pop(bucket, None)
        if graph is None:
            graph = _Graph(self._compute, bucket, self.stream, self._products, self._pool, self._outbox)
            self._pool = graph.pool
        self._graphs[bucket] = graph
        if len(self._graphs) > MOST_GRAPHS:
            with recording.beside_others():
                del self._graphs[next(iter(self._graphs))]
        return graph

    @property
    def last(self) -> _Graph:
        return next(reversed(self._graphs.values()))


@contextmanager
def garbage_kept() -> Iterator[None]:
    """A session that nobody closed is freed with its graphs, in the middle of a recording if need be, which ends it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Outbox:
    """Where every bucket's results go, since only the last one's are read. It doubles; old graphs keep the old one."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where
        self._bytes: Any = None

    def like(self, result: Any) -> Any:
        size = result.numel() * result.element_size()
        if self._bytes is None or self._bytes.numel() < size:
            self._bytes = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, **self._where)
        return self._bytes[:size].view(result.dtype).view(result.shape)


class _Graph:
    """One bucket: a place for the batch on both sides, what is computed from it, and a place for what comes back."""

    def __init__(
        self,
        compute: Callable[[Any, Bucket], Any],
        bucket: Bucket,
        stream: Any,
        products: Products | None,
        pool: Any,
        outbox: _Outbox,
    ) -> None:
        # What is recorded is for all calls, whatever this one's caller has casts set to.
        with torch.inference_mode(), torch.autocast("cuda", enabled=False), torch.cuda.stream(stream):
            # Kernels are compiled and libraries make their workspaces, which no graph may hold; that may take seconds.
            with recording.beside_others():
                here = torch.zeros(sum(bucket.sizes), dtype=torch.int32, pin_memory=True)
                there = torch.zeros_like(here, device=stream.device)
                across(here, there)
                for _ in range(2):
                    result = compute(there, bucket)
                back = outbox.like(result)
                across(result, back)
                stream.synchronize()
            with recording.alone(), garbage_kept():
                # cuBLAS's workspace must be the graph's own: others may give back the one there is, as torch.compile.
                torch._C._cuda_clearCublasWorkspaces()
                with recorded(stream, products, pool) as graph:
                    across(here, there)
                    across(compute(there, bucket), back)
                torch._C._cuda_clearCublasWorkspaces()
            with recording.beside_others():
                self._instance = fastest(graph, stream)
        self.pool = graph.pool()
        self._stream, self._there = stream, there
        self._here, self._back = here.numpy(), back
        self._answers = back.numpy() if back.is_pinned() else None
        self._is_done = torch.cuda.Event()

    def start(self, fill: Fill) -> Any:
        fill(self._here)
        self.replay()
        return self._answers

    def queue(self, fill: Fill, stream: Any) -> Any:
        """On the current stream, without waiting for anything but that the batch before it was taken."""
        self._is_done.synchronize()
        fill(self._here)
        self._instance.launch(stream)
        self._is_done.record(stream)
        return self._back

    def replay(self) -> None:
        self._instance.launch(self._stream)
