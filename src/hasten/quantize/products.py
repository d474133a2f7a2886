"""The matrix products of a graph whose weights are constant, and the feed-forward pairs among them.

Both are found by structure alone, in portable graphs and in those with ONNX Runtime's operators; no architecture is
known by name. What is built otherwise (gated feed-forwards, products inside of branches) is not found, and left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.tensors import FloatArray
from hasten.graph import attribute

# Operators of one value and constants: a channel of what they give depends on that channel of what they take alone.
_CHANNEL_BY_CHANNEL = (
    "Abs Add BiasGelu Clip Div Elu Erf Exp FastGelu Gelu HardSigmoid HardSwish Identity LeakyRelu Max Min Mish Mul Neg "
    "PRelu Pow QuickGelu Relu Selu Sigmoid Softplus Softsign Sqrt Sub Tanh"
)
_ALONE = frozenset(_CHANNEL_BY_CHANNEL.split())
_MATRIX = 2


@dataclass(frozen=True, slots=True)
class Product:
    """Goes by the name of its node."""

    name: str
    operator: str
    input: str
    weight: str
    # The channels of its input, and of what it gives.
    inputs: int
    outputs: int
    # Weights lie with a row for each channel that is given, not for each that is taken.
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Two products with nothing but channel by channel between them: each channel there could be computed by itself."""

    first: Product
    # Names of what the nodes between give: nodes may have no names of their own.
    between: tuple[str, ...]
    second: Product


class Wires:
    """Who makes and who reads each tensor of a graph, and which of them are constant."""

    def __init__(self, model: Any) -> None:
        from onnx import TensorProto

        self.graph = model.graph
        self.makers = {output: node for node in self.graph.node for output in node.output if output}
        self._constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self._originals: dict[str, str] = {}
        for node in self.graph.node:
            if node.op_type == "Constant" and isinstance(value := attribute(node, "value", None), TensorProto):
                self._constants[node.output[0]] = value
            # Exporters give a weight that is used twice a second name.
            if node.op_type == "Identity" and node.input[0] in self._constants:
                self._constants[node.output[0]] = self._constants[node.input[0]]
                self._originals[node.output[0]] = self.original(node.input[0])
        self.outputs = {entry.name for entry in self.graph.output}
        self._readers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                self._readers.setdefault(name, []).append(node)

    def readers(self, name: str) -> list[Any]:
        return self._readers.get(name, [])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a constant; None for what is computed."""
        return tuple(self._constants[name].dims) if name in self._constants else None

    def original(self, name: str) -> str:
        """The first name of a constant."""
        return self._originals.get(name, name)

    def values(self, name: str) -> FloatArray:
        from onnx import numpy_helper

        values: FloatArray = numpy_helper.to_array(self._constants[name])
        return values

    def is_float(self, name: str) -> bool:
        tensor = self._constants.get(name)
        return tensor is not None and tensor.data_type == tensor.FLOAT

    def add_constant(self, name: str, values: FloatArray) -> str:
        """Under this name, or one like it that is free."""
        from onnx import numpy_helper

        free, count = name, 1
        while free in self._constants:
            count += 1
            free = f"{name}_{count}"
        self._constants[free] = numpy_helper.from_array(values.copy(order="C"), free)
        self.graph.initializer.append(self._constants[free])
        return free


def find_products(model: Any) -> list[Product]:
    """In the order of the graph; needs no weights. A node without a name of its own could not be told about."""
    graph = model.graph
    if any(entry.HasField("g") or entry.graphs for node in graph.node for entry in node.attribute):
        return []  # branches may read any tensor without saying so
    wires = Wires(model)
    names = Counter(node.name for node in graph.node)
    found = (_product(node, wires) for node in graph.node if node.name and names[node.name] == 1)
    return [product for product in found if product is not None]


def _product(node: Any, wires: Wires) -> Product | None:
    is_gemm = node.op_type == "Gemm" and not attribute(node, "transA", 0)
    is_attention = node.op_type == "Attention" and node.domain == "com.microsoft"
    if not (node.op_type == "MatMul" or is_gemm or is_attention):
        return None
    taken, weight = node.input[0], node.input[1]
    shape = wires.shape(weight)
    if shape is None or len(shape) != _MATRIX or not wires.is_float(weight) or wires.shape(taken) is not None:
        return None
    is_transposed = is_gemm and bool(attribute(node, "transB", 0))
    inputs, outputs = shape[::-1] if is_transposed else shape
    return Product(node.name, node.op_type, taken, wires.original(weight), inputs, outputs, is_transposed)


def find_tables(model: Any) -> list[str]:
    """The lookups of tokens and their like in constant tables, by the names of their nodes."""
    wires = Wires(model)
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "EmbedLayerNormalization" or (node.op_type == "Gather" and wires.is_float(node.input[0]))
    ]


def find_pairs(model: Any, products: Sequence[Product]) -> list[Pair]:
    wires = Wires(model)
    nodes = {node.name: node for node in model.graph.node}
    places = {output: place for place, node in enumerate(model.graph.node) for output in node.output}
    makers = {nodes[product.name].output[0]: product for product in products if product.operator != "Attention"}
    pairs: list[Pair] = []
    for result, second in makers.items():
        walked = _walk_up(second, makers, wires)
        # One in the middle of three belongs to the pair before.
        if walked is None or any(pair.second == walked[0] for pair in pairs):
            continue
        first, between = walked
        within = {nodes[first.name].output[0], *between}
        read_by = {reader.output[0] for name in within for reader in wires.readers(name)}
        if read_by <= {result, *between} and not within & wires.outputs:
            pairs.append(Pair(first, tuple(sorted(between, key=places.__getitem__)), second))
    return pairs


def _walk_up(second: Product, makers: dict[str, Product], wires: Wires) -> tuple[Product, set[str]] | None:
    """The one product that all a second one takes comes from, channel by channel, and what is made on the way."""
    first: Product | None = None
    between: set[str] = set()
    waiting = [second.input]
    while waiting:
        name = waiting.pop()
        if name in makers:
            if first not in (None, makers[name]):
                return None
            first = makers[name]
            continue
        node = wires.makers.get(name)
        if node is None or node.op_type not in _ALONE or len(node.output) != 1:
            return None
        between.add(name)
        for taken in filter(None, node.input):
            shape = wires.shape(taken)
            if shape is None:
                waiting += [taken] if taken not in between else []
            elif shape and not (set(shape[:-1]) <= {1} and shape[-1] in (1, second.inputs)):
                return None
    return (first, between) if first is not None and first.outputs == second.inputs else None
