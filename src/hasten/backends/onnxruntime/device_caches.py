"""Keys and values of rows in progress in a GPU's own memory: only graphs touch them, and rows are copied by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hasten.backends.onnxruntime.caches import Caches, Place
from hasten.backends.onnxruntime.cuda import open_graph
from hasten.core import onnx_wire
from hasten.core.errors import StageError
from hasten.core.tensors import FloatArray

_FROM, _TO = "from.", "to."
_WIRED = {np.float32: onnx_wire.FLOAT, np.float16: onnx_wire.FLOAT16}


class DeviceCaches(Caches):
    """One row more than there are, through which rows change places."""

    def __init__(self, prefix: str, inputs: Sequence[Any], rows: int, limit: int | None, device: str) -> None:
        super().__init__(prefix, inputs, rows, limit)
        self._device = device
        self._copier = open_graph(_copying(self), device) if self.sizes else None

    def drop(self) -> None:
        super().drop()
        self._copier = None

    def put(self, row: int, values: Mapping[str, FloatArray], length: int) -> None:
        given = {name: self.larger(name, None, 1, 0) for name in values}
        for name, value in values.items():
            given[name][0, :, :length] = value[0]
        held = {name: self._moved(array) for name, array in given.items()}
        self._run({name: value.data_ptr() for name, value in held.items()}, row)
        self.lengths[row] = length

    def places(self, first: int, count: int) -> list[Place]:
        return [
            Place(name, self.kinds[name], (count, *self._shape(name)), self._address(name, first))
            for name in self._buffers
        ]

    def _enlarge(self, name: str, held: int) -> None:
        """By way of the processor: it happens a few times in a session's life."""
        before = self._buffers.pop(name, None)
        rows = self._rows + 1
        self._buffers[name] = self._moved(self.larger(name, None if before is None else before.numpy(), rows, held))

    def _copy(self, rows: Mapping[int, int]) -> None:
        """Whole rows, whatever they hold: that is less for a GPU than to be told how much."""
        if self._buffers:
            for target, source in in_turn(rows, self._rows):
                self._run({name: self._address(name, source) for name in self._buffers}, target)

    def _run(self, sources: Mapping[str, int], target: int) -> None:
        assert self._copier is not None
        binding = self._copier.io_binding()
        for name, address in sources.items():
            about = (self._device, 0, self.kinds[name], (1, *self._shape(name)))
            binding.bind_input(_FROM + name, *about, address)
            binding.bind_output(_TO + name, *about, self._address(name, target))
        try:
            self._copier.run_with_iobinding(binding)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(f"ONNX Runtime failed to copy a row: {error}") from error

    def _moved(self, array: FloatArray) -> Any:
        import onnxruntime

        try:
            return onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device, 0)
        except Exception as error:  # the binding raises its own unrelated classes
            raise StageError(
                f"the GPU has no room for {self._rows} rows of {self.capacity} tokens: {error}",
                hint="fewer slots, or shorter texts",
            ) from error

    def _shape(self, name: str) -> tuple[int, int, int]:
        heads, width = self.sizes[name]
        return heads, self.capacity, width

    def _address(self, name: str, row: int) -> int:
        size = int(np.prod(self._shape(name))) * np.dtype(self.kinds[name]).itemsize
        return int(self._buffers[name].data_ptr()) + row * size


def in_turn(rows: Mapping[int, int], spare: int) -> list[tuple[int, int]]:
    """Copies (target, source) one after another that come to the same as all at once, circles by way of a spare row."""
    waiting = {target: source for target, source in rows.items() if target != source}
    made: list[tuple[int, int]] = []
    while waiting:
        target = next((row for row in waiting if row not in waiting.values()), None)
        if target is None:
            kept = next(iter(waiting))
            made.append((spare, kept))
            waiting = {to: spare if source == kept else source for to, source in waiting.items()}
        else:
            made.append((target, waiting.pop(target)))
    return made


def _copying(caches: Caches) -> bytes:
    """A graph that copies a row of every buffer."""
    shapes = {name: (1, heads, "capacity", width) for name, (heads, width) in caches.sizes.items()}
    ends = [
        [onnx_wire.value(side + name, shape, _WIRED[caches.kinds[name]]) for name, shape in shapes.items()]
        for side in (_FROM, _TO)
    ]
    nodes = [onnx_wire.node("Identity", (_FROM + name,), _TO + name) for name in shapes]
    return onnx_wire.model("copy", nodes, ends[0], ends[1])
