"""Capture a computation in one CUDA graph per bucket, and replay it with a single launch."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.tensors import IntArray
from hasten.kernels.cuda.graph_exec import GraphExec, capture_graph
from hasten.kernels.cuda.host_copy import host_copy
from hasten.kernels.cuda.packed_buckets import Bucket

# Writes a batch into a bucket's buffer, with `packing.pack`.
Fill = Callable[[IntArray], None]
# Computes a tensor on the device from the buffer of a bucket.
Compute = Callable[[Any, Bucket], Any]
# Each graph holds some of the driver's memory.
MAX_GRAPHS = 256


class GraphReplay:
    """Runs `compute` through CUDA graphs, one per bucket, on a stream of its own. Not thread-safe.

    `compute` takes the buffer of a bucket on the device and returns a tensor there. On the CPU, for tests, it runs
    through Triton's interpreter without graphs.
    """

    def __init__(self, compute: Compute, device: str, *, keep_results_on_device: bool = False) -> None:
        self._compute, self._device = compute, device
        # All buckets share the stream, with the libraries' workspaces, the memory pool and the result buffer.
        self.stream = torch.cuda.Stream(device) if device != "cpu" else None
        self._pool: Any = None
        self._result_buffer = _ResultBuffer({"device": device} if keep_results_on_device else {"pin_memory": True})
        # Least recently used first; without a GPU, buckets have no graphs.
        self._graphs: dict[Bucket, Any] = {}
        self._last_stream = self.stream
        self._results: Any = None

    def __call__(self, bucket: Bucket, fill: Fill) -> Any:
        """Return the results on the host; they are valid until the next call."""
        self.start(bucket, fill)
        return self.finish()

    def start(self, bucket: Bucket, fill: Fill) -> None:
        """Launch a batch without waiting for it."""
        if self.stream is None:
            self._results = self.on_device(bucket, fill).numpy()
        else:
            self._results = self._graph(bucket).start(fill)

    def finish(self) -> Any:
        """Wait for the batch that was started, and return its results on the host."""
        if self.stream is not None:
            self.stream.synchronize()
        return self._results

    def on_device(self, bucket: Bucket, fill: Fill) -> Any:
        """Queue a batch on the caller's stream and return its results there; they are valid until the next call."""
        if self.stream is None:
            buffer = np.zeros(sum(bucket.segment_sizes), np.int32)
            fill(buffer)
            self._graphs[bucket] = None
            with torch.inference_mode(), torch.autocast("cpu", enabled=False):
                return self._compute(torch.from_numpy(buffer), bucket)
        stream = torch.cuda.current_stream(self._device)
        if stream != self._last_stream:
            # All buckets share their memory, and the other stream may still use it.
            stream.wait_stream(self._last_stream)
            self._last_stream = stream
        if bucket not in self._graphs:
            # Warm-up runs before the capture, in the libraries' workspaces, which the caller's stream may still use.
            self.stream.wait_stream(stream)
        return self._graph(bucket).queue(fill, stream)

    def clear(self) -> None:
        """Free all graphs and their memory."""
        self._graphs.clear()
        self._pool = None

    def smallest_holding(self, bucket: Bucket, max_growth: float = math.inf) -> Bucket:
        """Return the smallest prepared bucket that holds this one, or this one if there is none.

        A larger bucket has at most `max_growth` times as many tokens.
        """
        if bucket in self._graphs:
            return bucket
        max_tokens = max_growth * bucket.tokens
        fitting = [other for other in self._graphs if other.holds(bucket) and other.tokens <= max_tokens]
        return min(fitting, key=lambda other: (other.tokens, other.sequences, other.picked), default=bucket)

    @property
    def last(self) -> BucketGraph:
        """Return the graph that was used last."""
        graph: BucketGraph = next(reversed(self._graphs.values()))
        return graph

    def _graph(self, bucket: Bucket) -> BucketGraph:
        graph: BucketGraph | None = self._graphs.pop(bucket, None)
        if graph is None:
            graph = BucketGraph(self._compute, bucket, self.stream, self._pool, self._result_buffer)
            self._pool = graph.pool
        self._graphs[bucket] = graph
        if len(self._graphs) > MAX_GRAPHS:
            with capture_lock.shared():
                del self._graphs[next(iter(self._graphs))]
        return graph


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection: freeing the graphs of an unclosed session during a capture would abort the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _ResultBuffer:
    """Receives the results of every bucket, since only the last ones are read.

    Its size doubles when needed; graphs that were captured before keep the old buffer.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._bytes: Any = None

    def view_like(self, result: Any) -> Any:
        size = result.numel() * result.element_size()
        if self._bytes is None or self._bytes.numel() < size:
            self._bytes = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, **self._options)
        return self._bytes[:size].view(result.dtype).view(result.shape)


class BucketGraph:
    """The CUDA graph of one bucket, with its input buffers on both sides."""

    def __init__(self, compute: Compute, bucket: Bucket, stream: Any, pool: Any, result_buffer: _ResultBuffer) -> None:
        # The graph serves all callers, whatever autocast mode this one has set.
        with torch.inference_mode(), torch.autocast("cuda", enabled=False), torch.cuda.stream(stream):
            # Warm-up, which may take seconds: kernels are compiled and libraries allocate workspaces, neither of which
            # may happen during a capture.
            with capture_lock.shared():
                host_input = torch.zeros(sum(bucket.segment_sizes), dtype=torch.int32, pin_memory=True)
                self.device_input = torch.zeros_like(host_input, device=stream.device)
                host_copy(host_input, self.device_input)
                for _ in range(2):
                    result = compute(self.device_input, bucket)
                self._results = result_buffer.view_like(result)
                host_copy(result, self._results)
                stream.synchronize()
            with capture_lock.exclusive(), gc_paused():
                # The graph needs its own cuBLAS workspace: others, such as torch.compile, may free the current one.
                torch._C._cuda_clearCublasWorkspaces()
                with capture_graph(stream, pool) as graph:
                    host_copy(host_input, self.device_input)
                    host_copy(compute(self.device_input, bucket), self._results)
                torch._C._cuda_clearCublasWorkspaces()
            with capture_lock.shared():
                self._exec = GraphExec(graph)
        self.pool = graph.pool()
        self._stream, self._host_input = stream, host_input.numpy()
        self._host_results = self._results.numpy() if self._results.is_pinned() else None
        self._is_done = torch.cuda.Event()

    def start(self, fill: Fill) -> Any:
        """Launch a batch on the graph's own stream and return the host array that will hold its results."""
        fill(self._host_input)
        self.replay()
        return self._host_results

    def queue(self, fill: Fill, stream: Any) -> Any:
        """Queue a batch on the stream, waiting only until the previous batch has been read."""
        self._is_done.synchronize()
        fill(self._host_input)
        self._exec.launch(stream)
        self._is_done.record(stream)
        return self._results

    def replay(self) -> None:
        """Launch the graph once more on the same input."""
        self._exec.launch(self._stream)
