"""Find the matmuls of a graph that have constant weights, and the feed-forward pairs among them.

Both are recognised by structure, in portable graphs and in those with ONNX Runtime's operators, never by architecture.
Other structures (gated feed-forward layers, matmuls inside branches) are not recognised and stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.core.tensors import FloatArray
from hasten.onnx_graph import attribute

# Elementwise operators: a channel of the output depends on the same channel of the input and on constants only.
_ELEMENTWISE_NAMES = (
    "Abs Add BiasGelu Clip Div Elu Erf Exp FastGelu Gelu HardSigmoid HardSwish Identity LeakyRelu Max Min Mish Mul Neg "
    "PRelu Pow QuickGelu Relu Selu Sigmoid Softplus Softsign Sqrt Sub Tanh"
)
_ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_MATRIX_RANK = 2


@dataclass(frozen=True, slots=True)
class MatMul:
    """A matmul with constant weights, identified by the name of its node."""

    name: str
    operator: str
    input: str
    weight: str
    # The number of input and of output channels.
    inputs: int
    outputs: int
    # Whether the weights are stored with one row per output channel instead of one per input channel.
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class FeedForwardPair:
    """Two matmuls with only elementwise operators between them, so that the channels between are independent."""

    first: MatMul
    # The outputs of the nodes between, in the order of the graph: the nodes may have no names.
    between: tuple[str, ...]
    second: MatMul


class GraphIndex:
    """The producer and the consumers of each tensor of a graph, and its constants."""

    def __init__(self, model: Any) -> None:
        from onnx import TensorProto

        self.graph = model.graph
        self.producers = {output: node for node in self.graph.node for output in node.output if output}
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self._aliases: dict[str, str] = {}
        for node in self.graph.node:
            if node.op_type == "Constant" and isinstance(value := attribute(node, "value", None), TensorProto):
                self.constants[node.output[0]] = value
            # Exporters give a weight that is used twice a second name.
            if node.op_type == "Identity" and node.input[0] in self.constants:
                self.constants[node.output[0]] = self.constants[node.input[0]]
                self._aliases[node.output[0]] = self.resolve_alias(node.input[0])
        self.outputs = {entry.name for entry in self.graph.output}
        self._consumers: dict[str, list[Any]] = {}
        for node in self.graph.node:
            for name in dict.fromkeys(node.input):
                self._consumers.setdefault(name, []).append(node)

    def consumers(self, name: str) -> list[Any]:
        """Return the nodes that read a tensor."""
        return self._consumers.get(name, [])

    def constant_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a constant, or None for a tensor that is computed."""
        return tuple(self.constants[name].dims) if name in self.constants else None

    def resolve_alias(self, name: str) -> str:
        """Return the first name of a constant."""
        return self._aliases.get(name, name)

    def constant_values(self, name: str) -> FloatArray:
        """Return the values of a constant."""
        from onnx import numpy_helper

        values: FloatArray = numpy_helper.to_array(self.constants[name])
        return values

    def is_float_constant(self, name: str) -> bool:
        """Return whether a tensor is an fp32 constant."""
        tensor = self.constants.get(name)
        return tensor is not None and tensor.data_type == tensor.FLOAT

    def add_constant(self, name: str, values: FloatArray) -> str:
        """Add a constant to the graph and return its name, numbered if the name is taken."""
        from onnx import numpy_helper

        free, count = name, 1
        while free in self.constants:
            count += 1
            free = f"{name}_{count}"
        self.constants[free] = numpy_helper.from_array(values.copy(order="C"), free)
        self.graph.initializer.append(self.constants[free])
        return free

    def insert_nodes(self, before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]]) -> None:
        """Insert the nodes listed for each node name before and after that node."""
        nodes = [
            each for node in self.graph.node for each in (*before.get(node.name, ()), node, *after.get(node.name, ()))
        ]
        del self.graph.node[:]
        self.graph.node.extend(nodes)


def find_matmuls(model: Any) -> list[MatMul]:
    """Return the matmuls in the order of the graph, without those of unnamed nodes; needs no weights."""
    graph = model.graph
    if any(entry.HasField("g") or entry.graphs for node in graph.node for entry in node.attribute):
        return []  # branches may read any tensor without listing it as an input
    index = GraphIndex(model)
    names = Counter(node.name for node in graph.node)
    matmuls = (_as_matmul(node, index) for node in graph.node if node.name and names[node.name] == 1)
    return [matmul for matmul in matmuls if matmul is not None]


def _as_matmul(node: Any, index: GraphIndex) -> MatMul | None:
    is_gemm = node.op_type == "Gemm" and not attribute(node, "transA", 0)
    is_attention = node.op_type == "Attention" and node.domain == "com.microsoft"
    if not (node.op_type == "MatMul" or is_gemm or is_attention):
        return None
    activation, weight = node.input[0], node.input[1]
    shape = index.constant_shape(weight)
    if shape is None or len(shape) != _MATRIX_RANK or not index.is_float_constant(weight):
        return None
    if index.constant_shape(activation) is not None:
        return None
    is_transposed = is_gemm and bool(attribute(node, "transB", 0))
    inputs, outputs = shape[::-1] if is_transposed else shape
    return MatMul(node.name, node.op_type, activation, index.resolve_alias(weight), inputs, outputs, is_transposed)


def find_embedding_lookups(model: Any) -> list[str]:
    """Return the names of the nodes that look up rows of constant tables."""
    index = GraphIndex(model)
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "EmbedLayerNormalization"
        or (node.op_type == "Gather" and index.is_float_constant(node.input[0]))
    ]


def find_feed_forward_pairs(model: Any, matmuls: Sequence[MatMul]) -> list[FeedForwardPair]:
    """Return the pairs whose intermediate tensors nothing else reads."""
    index = GraphIndex(model)
    nodes = {node.name: node for node in model.graph.node}
    positions = {output: position for position, node in enumerate(model.graph.node) for output in node.output}
    by_output = {nodes[matmul.name].output[0]: matmul for matmul in matmuls if matmul.operator != "Attention"}
    pairs: list[FeedForwardPair] = []
    for output, second in by_output.items():
        origin = _find_first(second, by_output, index)
        # The middle one of three matmuls belongs to the pair before.
        if origin is None or any(pair.second == origin[0] for pair in pairs):
            continue
        first, between = origin
        within = {nodes[first.name].output[0], *between}
        read_by = {consumer.output[0] for name in within for consumer in index.consumers(name)}
        if read_by <= {output, *between} and not within & index.outputs:
            pairs.append(FeedForwardPair(first, tuple(sorted(between, key=positions.__getitem__)), second))
    return pairs


def _find_first(second: MatMul, by_output: dict[str, MatMul], index: GraphIndex) -> tuple[MatMul, set[str]] | None:
    """Return the only matmul whose output reaches `second`, elementwise, and the tensors between the two."""
    first: MatMul | None = None
    between: set[str] = set()
    pending = [second.input]
    while pending:
        name = pending.pop()
        if name in by_output:
            if first not in (None, by_output[name]):
                return None
            first = by_output[name]
            continue
        node = index.producers.get(name)
        if node is None or node.op_type not in _ELEMENTWISE or len(node.output) != 1:
            return None
        between.add(name)
        for operand in filter(None, node.input):
            shape = index.constant_shape(operand)
            if shape is None:
                pending += [operand] if operand not in between else []
            elif shape and not (set(shape[:-1]) <= {1} and shape[-1] in (1, second.inputs)):
                return None
    return (first, between) if first is not None and first.outputs == second.inputs else None
