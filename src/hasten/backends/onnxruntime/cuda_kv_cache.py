"""Store the KV cache in GPU memory; rows are copied there by a small graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hasten.backends.onnxruntime.cuda import open_graph
from hasten.backends.onnxruntime.kv_cache import CacheLocation, KVCache
from hasten.core.errors import StageError
from hasten.core.onnx import onnx_bytes
from hasten.core.tensors import FloatArray

_FROM, _TO = "from.", "to."
_ONNX_TYPES = {np.float32: onnx_bytes.FLOAT, np.float16: onnx_bytes.FLOAT16}


class CudaKVCache(KVCache):
    """A KV cache in device memory."""

    def __init__(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None, device: str) -> None:
        super().__init__(prefix, inputs, rows, limit)
        self._device = device
        self._copier = open_graph(_copy_graph(self), device) if self.sizes else None

    def release(self) -> None:
        super().release()
        self._copier = None

    def put(self, row: int, values: Mapping[str, FloatArray], length: int) -> None:
        arrays = {name: self.allocate(name, None, 1, 0) for name in values}
        for name, value in values.items():
            arrays[name][0, :, :length] = value[0]
        on_device = {name: self._to_device(array) for name, array in arrays.items()}
        self._copy_from({name: value.data_ptr() for name, value in on_device.items()}, row)
        self.lengths[row] = length

    def locations(self, first: int, count: int) -> list[CacheLocation]:
        return [
            CacheLocation(name, self.dtypes[name], (count, *self._shape(name)), self._address(name, first))
            for name in self._buffers
        ]

    def _zeros(self, shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> FloatArray:
        # Copied to the device as a whole, so that pages on demand would gain nothing.
        return np.zeros(shape, dtype)

    def _grow_buffer(self, name: str, used_rows: int) -> None:
        """Grow through host memory: this happens only a few times per session."""
        previous = self._buffers.pop(name, None)
        host = None if previous is None else previous.numpy()
        self._buffers[name] = self._to_device(self.allocate(name, host, self._rows + 1, used_rows))

    def _copy_row(self, source: int, target: int) -> None:
        """Copy the whole row, however full: on a GPU that costs less than passing its length."""
        self._copy_from({name: self._address(name, source) for name in self._buffers}, target)

    def _copy_from(self, sources: Mapping[str, int], target: int) -> None:
        assert self._copier is not None
        binding = self._copier.io_binding()
        for name, address in sources.items():
            tensor = (self._device, 0, self.dtypes[name], (1, *self._shape(name)))
            binding.bind_input(_FROM + name, *tensor, address)
            binding.bind_output(_TO + name, *tensor, self._address(name, target))
        try:
            self._copier.run_with_iobinding(binding)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed to copy a row: {error}") from error

    def _to_device(self, array: FloatArray) -> Any:
        import onnxruntime

        try:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device, 0)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(
                f"the KV cache of {self._rows} rows of {self.capacity} tokens does not fit into GPU memory: {error}",
                hint="use fewer slots or shorter texts",
            ) from error

    def _shape(self, name: str) -> tuple[int, int, int]:
        heads, head_size = self.sizes[name]
        return heads, self.capacity, head_size

    def _address(self, name: str, row: int) -> int:
        row_bytes = int(np.prod(self._shape(name))) * np.dtype(self.dtypes[name]).itemsize
        return int(self._buffers[name].data_ptr()) + row * row_bytes


def _copy_graph(cache: KVCache) -> bytes:
    """Return a graph that copies one row of every buffer."""
    shapes = {name: (1, heads, "capacity", head_size) for name, (heads, head_size) in cache.sizes.items()}
    inputs, outputs = (
        [onnx_bytes.value(prefix + name, shape, _ONNX_TYPES[cache.dtypes[name]]) for name, shape in shapes.items()]
        for prefix in (_FROM, _TO)
    )
    nodes = [onnx_bytes.node("Identity", (_FROM + name,), _TO + name) for name in shapes]
    return onnx_bytes.model("copy", nodes, inputs, outputs)
