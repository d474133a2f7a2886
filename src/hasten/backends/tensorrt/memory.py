"""Memory that host and GPU exchange: pinned on one side, as much on the other, copied on a stream of one's own."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.core.closing import Closing
from hasten.core.errors import StageError


class Stream(Closing):
    """Work on the GPU, in order, which waits for nobody else's."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._handle: Any = checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))

    @property
    def address(self) -> int:
        return int(self._handle)

    def wait(self) -> None:
        from cuda.bindings import runtime

        checked(runtime.cudaStreamSynchronize(self._handle))

    def close(self) -> None:
        from cuda.bindings import runtime

        if self._handle is not None:
            checked(runtime.cudaStreamDestroy(self._handle))
        self._handle = None


class Buffer(Closing):
    """So many bytes on the host and on the GPU, allocated once for the largest tensor that goes through them."""

    def __init__(self, size_bytes: int, stream: Stream) -> None:
        from cuda.bindings import runtime

        # CUDA allocates nothing for nothing, and a tensor may be empty.
        self._size, self._stream = max(1, size_bytes), stream
        self._host: int | None = int(checked(runtime.cudaMallocHost(self._size)))
        try:
            self.address = int(checked(runtime.cudaMalloc(self._size)))
        except StageError:
            checked(runtime.cudaFreeHost(self._host))
            raise

    def view(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The host's side as an array, until the next one."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        if count * kind.itemsize > self._size or self._host is None:
            raise StageError(f"a tensor of {shape} does not fit into {self._size} bytes")
        content = memoryview((ctypes.c_char * self._size).from_address(self._host))
        array: npt.NDArray[Any] = np.frombuffer(content, kind, count).reshape(shape)
        return array

    def to_gpu(self, array: npt.NDArray[Any]) -> None:
        from cuda.bindings import runtime

        self.view(array.dtype, array.shape)[...] = array
        self._copy(self.address, self._host, array.nbytes, runtime.cudaMemcpyKind.cudaMemcpyHostToDevice)

    def from_gpu(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """What will be there once the stream has been waited for."""
        from cuda.bindings import runtime

        array = self.view(dtype, shape)
        self._copy(self._host, self.address, array.nbytes, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
        return array

    def close(self) -> None:
        from cuda.bindings import runtime

        if self._host is not None:
            checked(runtime.cudaFree(self.address))
            checked(runtime.cudaFreeHost(self._host))
        self._host = None

    def _copy(self, target: int | None, source: int | None, size_bytes: int, kind: Any) -> None:
        from cuda.bindings import runtime

        checked(runtime.cudaMemcpyAsync(target, source, size_bytes, kind, self._stream.address))


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA gives beside its error, unless there is one."""
    from cuda.bindings import runtime

    error, *values = answer
    if error != runtime.cudaError_t.cudaSuccess:
        raise StageError(f"CUDA fails: {error.name}")
    return values[0] if values else None
