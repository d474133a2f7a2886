"""Values that fp16 cannot hold: which tensors of a graph leave its range on rows that are like those to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hasten.core.errors import StageError
from hasten.graph import read_graph
from hasten.quantize.session import open_changed, tensor_types

# Half of what fp16 holds: other texts may reach further than these.
_LIMIT = float(np.finfo(np.float16).max) / 2
# From here on a number stands for infinity in a mask. OpenVINO clips it to fp16's largest, and softmax makes the same
# nothing of that (tests/contract/test_overflow.py).
_INFINITY = 1e8
_ENDS = ("ReduceMax", "ReduceMin")
# How many operators a line for people names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Overflow:
    """An operator with a tensor, of its making or a weight it reads, that leaves the range."""

    operator: str
    tensor: str
    largest: float


class Fed(Protocol):
    """What a graph is run on."""

    def feeds(self) -> Iterable[Mapping[str, Any]]: ...


def overflows(graph: Path, calibration: Fed) -> tuple[Overflow, ...]:
    """Of a graph in fp32, in the order of its operators; memory does not grow with the number of rows."""
    model = read_graph(graph, with_weights=False)
    nodes = list(model.graph.node)
    weights = dict(_weights(model, graph.parent))
    activations: dict[str, float] = {}
    for name, size in _activations(model, graph.parent, calibration):
        activations[name] = max(size, activations.get(name, 0.0))
    found: dict[str, Overflow] = {}
    for node in nodes:
        sizes = [(name, weights.get(name, 0.0)) for name in node.input]
        sizes += [(name, activations.get(name, 0.0)) for name in node.output]
        for name, size in sizes:
            if size > _LIMIT:
                found.setdefault(name, Overflow(node.name or node.output[0], name, size))
    return tuple(found.values())


def describe(found: Sequence[Overflow]) -> str:
    """One line for people: how many operators, how far their values go, and the first of them."""
    operators = list(dict.fromkeys(one.operator for one in found))
    names = ", ".join(operators[:_NAMED]) + (", …" if len(operators) > _NAMED else "")
    what = "1 operator" if len(operators) == 1 else f"{len(operators)} operators"
    return f"{what} kept in fp32: values reach {max(one.largest for one in found):.1e} ({names})"


def _weights(model: Any, folder: Path) -> Iterator[tuple[str, float]]:
    from onnx import TensorProto, numpy_helper

    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            yield tensor.name, _size(numpy_helper.to_array(tensor, str(folder)))


def _size(values: Any) -> float:
    """The largest absolute value. Beside a mask's infinity stands nothing large that was not computed before it."""
    sizes = np.abs(values)
    return float(sizes.max(initial=0.0, where=sizes < _INFINITY))


def _activations(model: Any, folder: Path, calibration: Fed) -> Iterator[tuple[str, float]]:
    """The largest of every tensor in every batch, found in the graph itself: only single numbers leave it."""
    names = _measure(model, folder)
    try:
        session = open_changed(model, folder)
        taken = [entry.name for entry in session.get_inputs()]
        for feeds in calibration.feeds():
            ends = np.reshape(session.run(None, {name: feeds[name] for name in taken}), (-1, len(_ENDS)))
            yield from zip(names, map(_size, ends), strict=True)
    except Exception as error:  # the binding raises its own unrelated classes
        raise StageError(f"how large values become cannot be measured: {error}") from error


def _measure(model: Any, folder: Path) -> list[str]:
    """Give the graph other outputs: of each tensor of floats its two ends. Returns the names of those tensors."""
    import onnx

    kinds = tensor_types(model, folder)
    names = [name for node in model.graph.node for name in node.output if kinds.get(name) == "tensor(float)"]
    del model.graph.output[:]
    for place, name in enumerate(names):
        for kind in _ENDS:
            end = f"overflow/{place}/{kind}"
            model.graph.node.append(onnx.helper.make_node(kind, [name], [end], keepdims=0))
            model.graph.output.append(onnx.helper.make_tensor_value_info(end, onnx.TensorProto.FLOAT, []))
    return names
