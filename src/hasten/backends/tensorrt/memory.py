"""Exchange tensors between pinned host memory and GPU memory on a CUDA stream."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.core.errors import StageError
from hasten.core.system.closing import Closing


def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime


class Stream(Closing):
    """A CUDA stream that does not synchronize with the default stream."""

    def __init__(self) -> None:
        self._handle: Any = checked(_runtime().cudaStreamCreateWithFlags(_runtime().cudaStreamNonBlocking))

    @property
    def address(self) -> int:
        """Return the handle of the stream."""
        return int(self._handle)

    def wait(self) -> None:
        """Wait until all work on the stream is done."""
        checked(_runtime().cudaStreamSynchronize(self._handle))

    def close(self) -> None:
        if self._handle is not None:
            checked(_runtime().cudaStreamDestroy(self._handle))
        self._handle = None


class Buffer(Closing):
    """Pinned host memory and GPU memory of equal size, allocated once for the largest tensor they carry."""

    def __init__(self, size_bytes: int, stream: Stream) -> None:
        # CUDA does not allocate zero bytes, and a tensor may be empty.
        self._size, self._stream = max(1, size_bytes), stream
        self._host: int | None = int(checked(_runtime().cudaMallocHost(self._size)))
        try:
            self.address = int(checked(_runtime().cudaMalloc(self._size)))
        except StageError:
            checked(_runtime().cudaFreeHost(self._host))
            raise

    def view(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Return the host memory as an array, valid until the buffer is used again."""
        element = np.dtype(dtype)
        count = int(np.prod(shape))
        if count * element.itemsize > self._size or self._host is None:
            raise StageError(f"a tensor of {shape} does not fit into {self._size} bytes")
        content = memoryview((ctypes.c_char * self._size).from_address(self._host))
        array: npt.NDArray[Any] = np.frombuffer(content, element, count).reshape(shape)
        return array

    def to_gpu(self, array: npt.NDArray[Any]) -> None:
        """Enqueue a copy of an array to the GPU."""
        self.view(array.dtype, array.shape)[...] = array
        self._copy(self.address, self._host, array.nbytes, _runtime().cudaMemcpyKind.cudaMemcpyHostToDevice)

    def from_gpu(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Enqueue a copy from the GPU and return the array, which is valid after `Stream.wait`."""
        array = self.view(dtype, shape)
        self._copy(self._host, self.address, array.nbytes, _runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost)
        return array

    def close(self) -> None:
        if self._host is not None:
            checked(_runtime().cudaFree(self.address))
            checked(_runtime().cudaFreeHost(self._host))
        self._host = None

    def _copy(self, target: int | None, source: int | None, size_bytes: int, kind: Any) -> None:
        checked(_runtime().cudaMemcpyAsync(target, source, size_bytes, kind, self._stream.address))


def checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a CUDA call, or raise its error."""
    error, *values = result
    if error != _runtime().cudaError_t.cudaSuccess:
        raise StageError(f"CUDA failed: {error.name}")
    return values[0] if values else None
