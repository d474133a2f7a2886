"""Complete an ONNX graph for its task without PyTorch: pooling, selection of mask tokens, widening to fp32.

The counterpart of export_wrapper.py, which does the same to modules. The graph keeps its opset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

from hasten.builder.sources.sentence_layout import DenseLayer, SentenceLayout
from hasten.core.errors import UnsupportedError
from hasten.onnx_graph import all_nodes, opset_version
from hasten.tasks import Pooling

# Below any activation, above the smallest float: padding is never the maximum.
_MASKED_VALUE = -1e9
# The opset from which an operator takes its axes as an input instead of an attribute.
_AXES_AS_INPUT = {"Unsqueeze": 13, "ReduceSum": 13, "ReduceMax": 18, "ReduceL2": 18}
_HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_PREFIX = "hasten/"


class GraphAddition:
    """Appends nodes to a graph; each node is named after its output."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.opset = opset_version(model)
        self._count = 0

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node and return its output."""
        self._count += 1
        name = f"{_PREFIX}{op}_{self._count}"
        self.graph.node.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Add an initializer and return its name."""
        self._count += 1
        name = f"{_PREFIX}constant_{self._count}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add_along(self, op: str, value: str, axis: int, **attributes: Any) -> str:
        """Append a node that works along one axis, in the form of the graph's opset."""
        if self.opset < _AXES_AS_INPUT[op]:
            return self.add(op, value, axes=[axis], **attributes)
        return self.add(op, value, self.constant([axis], np.int64), **attributes)

    def set_outputs(self, outputs: Mapping[str, str]) -> None:
        """Replace the graph's outputs; the keys are the new names, the values the tensors."""
        existing = {info.name: info for info in self.graph.output}
        del self.graph.output[:]
        for name, tensor in outputs.items():
            if name == tensor:
                self.graph.output.append(existing[name])
                continue
            self.graph.node.append(helper.make_node("Identity", [tensor], [name], name=f"{_PREFIX}{name}"))
            self.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def rename_tensor(graph: GraphProto, old: str, new: str) -> None:
    """Rename a tensor in every node that computes or reads it, subgraphs included."""
    for node in all_nodes(graph):
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
    for info in graph.value_info:
        if info.name == old:
            info.name = new


def replace_input_with_zeros(graph: GraphProto, name: str, like: str) -> None:
    """Replace an input that is not fed by zeros in the shape of another input."""
    info = next(info for info in graph.input if info.name == name)
    zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)))
    shape = f"{_PREFIX}{name}_shape"
    graph.input.remove(info)
    graph.node.insert(0, helper.make_node("Shape", [like], [shape], name=shape))
    graph.node.insert(1, helper.make_node("ConstantOfShape", [shape], [name], name=f"{_PREFIX}{name}", value=zero))


def widen_to_fp32(graph: GraphProto) -> None:
    """Convert fp16 and bf16 to fp32, as loaded weights are too: no CPU runtime computes a whole graph in less."""
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type in _HALF_TYPES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == AttributeProto.GRAPH:
                widen_to_fp32(attribute.g)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in _HALF_TYPES:
                attribute.i = TensorProto.FLOAT


def has_half_precision(model: ModelProto) -> bool:
    """Return whether the graph stores weights in fp16 or bf16."""
    return any(tensor.data_type in _HALF_TYPES for tensor in model.graph.initializer)


def add_pooling(new: GraphAddition, tokens: str, mask: str, layout: SentenceLayout) -> str:
    """Add the pooling that export_wrapper.PoolingHead computes, and return its output."""
    vectors = [_pool(new, kind, tokens, mask) for kind in layout.pooling]
    result = vectors[0] if len(vectors) == 1 else new.add("Concat", *vectors, axis=-1)
    for layer in layout.dense:
        if not isinstance(layer, DenseLayer):
            raise UnsupportedError("a LayerNorm after the pooling needs the model's weights, and it comes as a graph")
        weights = {name: new.constant(value) for name, value in layer.arrays().items()}
        result = new.add("Gemm", result, weights["weight"], *([weights["bias"]] if "bias" in weights else []), transB=1)
        result = _add_activation(new, layer.activation, result)
    if layout.normalize:
        norm = new.add_along("ReduceL2", result, -1, keepdims=1)
        result = new.add("Div", result, new.add("Max", norm, new.constant(1e-12)))
    return result


def _pool(new: GraphAddition, kind: Pooling, tokens: str, mask: str) -> str:
    if kind is Pooling.CLS:
        return new.add("Gather", tokens, new.constant(0, np.int64), axis=1)
    weights = new.add_along("Unsqueeze", new.add("Cast", mask, to=TensorProto.FLOAT), -1)
    ones = new.constant(1.0)
    if kind is Pooling.MAX:
        masked = new.add("Mul", new.add("Sub", ones, weights), new.constant(_MASKED_VALUE))
        return new.add_along("ReduceMax", new.add("Add", tokens, masked), 1, keepdims=0)
    ones_by_token = new.add("Add", new.add("Mul", weights, new.constant(0.0)), ones)
    positions = new.add("CumSum", ones_by_token, new.constant(1, np.int64))
    if kind is Pooling.LAST_TOKEN:
        last = new.add_along("ReduceSum", weights, 1, keepdims=1)
        is_last = new.add("Cast", new.add("Equal", positions, last), to=TensorProto.FLOAT)
        return new.add_along("ReduceSum", new.add("Mul", tokens, is_last), 1, keepdims=0)
    if kind is Pooling.WEIGHTED_MEAN:
        weights = new.add("Mul", weights, positions)
    total = new.add("Max", new.add_along("ReduceSum", weights, 1, keepdims=0), new.constant(1e-9))
    summed = new.add_along("ReduceSum", new.add("Mul", tokens, weights), 1, keepdims=0)
    return new.add("Div", summed, new.add("Sqrt", total) if kind is Pooling.MEAN_SQRT_LEN else total)


def _add_activation(new: GraphAddition, activation: str, value: str) -> str:
    if activation != "GELU":
        return new.add({"ReLU": "Relu"}.get(activation, activation), value)
    # By its definition: the Gelu operator is newer than most graphs.
    erf = new.add("Erf", new.add("Mul", value, new.constant(2.0**-0.5)))
    return new.add("Mul", new.add("Mul", value, new.constant(0.5)), new.add("Add", erf, new.constant(1.0)))


def gather_mask_tokens(new: GraphAddition, values: str, ids: str, mask_id: int, ids_dtype: Any) -> str:
    """Select the values of mask tokens from those of all tokens, with the rows concatenated."""
    indices = new.add("NonZero", new.add("Equal", ids, new.constant(mask_id, ids_dtype)))
    return new.add("GatherND", values, new.add("Transpose", indices, perm=[1, 0]))


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in _HALF_TYPES:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
