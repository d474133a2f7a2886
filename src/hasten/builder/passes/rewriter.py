"""Edit an ONNX graph: look up producers, readers and known values, add nodes, replace tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.builder.passes.axes import AxisShape
from hasten.builder.passes.prune import ROWS, TOKENS
from hasten.onnx_graph import attribute, drop_unused

MICROSOFT = "com.microsoft"
# Operators that keep the value of a size that is computed at run time.
_SAME_VALUE = ("Cast", "Identity", "Squeeze", "Unsqueeze")
# A larger constant is a weight; it may be in an external file.
_MAX_CONSTANT_BYTES = 2**16

Array = npt.NDArray[Any]


class GraphRewriter:
    """A graph with the shapes of its tensors; replaced nodes disappear in `finish`, as nothing reads them."""

    def __init__(self, model: Any, shapes: Mapping[str, AxisShape]) -> None:
        self.graph = model.graph
        self._model = model
        self._shapes = shapes
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {output: node for node in model.graph.node for output in node.output}
        self._outputs = {entry.name for entry in model.graph.output}
        self._readers: dict[str, list[Any]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._added: list[Any] = []
        self._replaced: dict[str, str] = {}

    def producer(self, name: str, *op_types: str) -> Any:
        """Return the node that computes a tensor, or None if it is of another type."""
        node = self._producers.get(self._current(name))
        return node if node is not None and (not op_types or node.op_type in op_types) else None

    def readers(self, name: str) -> list[Any]:
        """Return the nodes that read a tensor."""
        return self._readers.get(name, [])

    def only_reader(self, name: str, op_type: str) -> Any:
        """Return the node that alone reads a tensor, or None if there is another one, or it is of another type."""
        readers = self.readers(name)
        is_only = len(readers) == 1 and name not in self._outputs and readers[0].op_type == op_type
        return readers[0] if is_only else None

    def shape(self, name: str) -> AxisShape | None:
        """Return the inferred shape of a tensor."""
        return self._shapes.get(name)

    def weight(self, name: str) -> Any:
        """Return the stored tensor of this name, or None."""
        return self._weights.get(name)

    def constant(self, name: str) -> Array | None:
        """Return the value of a small constant, or None for other tensors."""
        from onnx import TensorProto, numpy_helper

        tensor, node = self._weights.get(name), self._producers.get(name)
        if node is not None and node.op_type == "Constant":
            tensor = attribute(node, "value", None)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL or tensor.ByteSize() > _MAX_CONSTANT_BYTES:
            return None
        value: Array = numpy_helper.to_array(tensor)
        return value

    def scalar(self, name: str) -> float | None:
        """Return the value of a constant with one element."""
        value = self.constant(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def known_size(self, name: str) -> int | None:
        """Return an integer that the graph computes from constants and widths of tensors, or None if it varies."""
        value, node = self.constant(name), self._producers.get(name)
        if value is not None:
            return int(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind == "i" else None
        if node is None:
            return None
        if node.op_type in _SAME_VALUE:
            return self.known_size(node.input[0])
        if node.op_type == "Gather" and (source := self.producer(node.input[0], "Shape")) is not None:
            shape, axis = self.shape(source.input[0]), self.known_size(node.input[1])
            is_width = shape is not None and axis in (-1, len(shape) - 1)
            return _static(shape[-1]) if is_width and shape is not None else None
        if node.op_type not in ("Add", "Div", "Mul", "Sub"):
            return None
        left, right = map(self.known_size, node.input)
        if left is None or right is None or (node.op_type == "Div" and right == 0):
            return None
        results = {"Add": left + right, "Sub": left - right, "Mul": left * right}
        return left // right if node.op_type == "Div" else results[node.op_type]

    def bounds(self, node: Any) -> tuple[int, int] | None:
        """Return the start and end of a slice of the last axis; None for another node, axis or step."""
        shape = self.shape(node.input[0]) if node is not None and node.op_type == "Slice" else None
        if shape is None or len(node.input) < 4 or (width := _static(shape[-1])) is None:
            return None
        start, end, axis, *steps = map(self.known_size, node.input[1:])
        if start is None or end is None or axis not in (-1, len(shape) - 1) or steps not in ([], [1]):
            return None
        return start, min(end, width)

    def add(self, op_type: str, inputs: Sequence[str], output: str = "", *, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        from onnx import helper

        output = output or f"attend/{op_type}_{len(self._added)}"
        node = helper.make_node(op_type, list(inputs), [output], output, domain=domain, **attributes)
        self._added.append(node)
        self._producers[output] = node
        return output

    def add_constant(self, value: Any, dtype: npt.DTypeLike = np.int64) -> str:
        """Store a constant, equal ones once, and return its name."""
        array = np.asarray(value, dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"attend/constant_{len(self._constants)}"
            self.add_weight(array, self._constants[key])
        return self._constants[key]

    def add_weight(self, value: Array, name: str) -> str:
        """Store a weight and return its name."""
        from onnx import numpy_helper

        tensor = numpy_helper.from_array(np.asarray(value, order="C"), name)
        self.graph.initializer.append(tensor)
        self._weights[name] = tensor
        return name

    def replace(self, old: str, new: str) -> None:
        """Let all readers of a tensor read another one."""
        self._replaced[old] = new

    def _current(self, name: str) -> str:
        """Return the tensor that stands for a replaced one."""
        while name in self._replaced:
            name = self._replaced[name]
        return name

    def finish(self) -> None:
        """Apply the replacements, sort the nodes and drop those that nothing reads."""
        if all(entry.domain != MICROSOFT for entry in self._model.opset_import):
            self._model.opset_import.add(domain=MICROSOFT, version=1)
        nodes = [*self.graph.node, *self._added]
        for node in nodes:
            node.input[:] = [self._current(name) for name in node.input]
        del self.graph.node[:]
        self.graph.node.extend(sort_nodes(nodes))
        drop_unused(self.graph)


def _static(size: int | None) -> int | None:
    """Return a size that does not depend on the batch or the length of texts, which shapes were inferred with."""
    return None if size is None or size % ROWS == 0 or size % TOKENS == 0 else size


def sort_nodes(nodes: Sequence[Any]) -> list[Any]:
    """Return the nodes in an order in which every tensor is computed before it is read."""
    producers = {output: node for node in nodes for output in node.output if output}
    result: list[Any] = []
    done: set[int] = set()
    for root in nodes:
        stack = [(root, False)]
        while stack:
            node, has_inputs = stack.pop()
            if id(node) in done:
                continue
            if has_inputs:
                done.add(id(node))
                result.append(node)
                continue
            stack.append((node, True))
            stack += [(producers[name], False) for name in node.input if name in producers]
    return result
