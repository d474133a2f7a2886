"""What a graph that was given lacks, added to it without PyTorch: pooling, mask tokens alone, fp32 throughout.

The counterpart of builder/head.py, which does the same to modules. The graph's opset stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from hasten.builder.sentence_layout import SentenceLayout
from hasten.tasks import Pooling

# Below any activation, above the smallest float: padding never wins a maximum.
_NEVER = -1e9
# Since when an operator takes its axes as an input instead of an attribute.
_AXES_AS_INPUT = {"Unsqueeze": 13, "ReduceSum": 13, "ReduceMax": 18, "ReduceL2": 18}
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_PREFIX = "hasten/"


class Addition:
    """Nodes at the end of a graph, each named by what it gives."""

    def __init__(self, model: ModelProto) -> None:
        self.graph = model.graph
        self.opset = opset(model)
        self._count = 0

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self._count += 1
        name = f"{_PREFIX}{op}_{self._count}"
        self.graph.node.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        self._count += 1
        name = f"{_PREFIX}constant_{self._count}"
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def along(self, op: str, value: str, axis: int, **attributes: Any) -> str:
        if self.opset < _AXES_AS_INPUT[op]:
            return self.add(op, value, axes=[axis], **attributes)
        return self.add(op, value, self.constant([axis], np.int64), **attributes)

    def give(self, outputs: Mapping[str, str]) -> None:
        """These outputs and no others, each by its name and the tensor it is."""
        known = {info.name: info for info in self.graph.output}
        del self.graph.output[:]
        for name, tensor in outputs.items():
            if name == tensor:
                self.graph.output.append(known[name])
                continue
            self.graph.node.append(helper.make_node("Identity", [tensor], [name], name=f"{_PREFIX}{name}"))
            self.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))


def opset(model: ModelProto) -> int:
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def rename(graph: GraphProto, old: str, new: str) -> None:
    """Another name for a tensor, wherever it is made or read."""
    for node in _nodes(graph):
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
    for info in graph.value_info:
        if info.name == old:
            info.name = new


def zeros(model: ModelProto, name: str, like: str) -> None:
    """An input that nobody feeds becomes zeros."""
    kept = [info for info in model.graph.input if info.name != name]
    dtype = next(info.type.tensor_type.elem_type for info in model.graph.input if info.name == name)
    del model.graph.input[:]
    model.graph.input.extend(kept)
    nothing = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(dtype)))
    shape = f"{_PREFIX}{name}_shape"
    first = [
        helper.make_node("Shape", [like], [shape], name=shape),
        helper.make_node("ConstantOfShape", [shape], [name], name=f"{_PREFIX}{name}", value=nothing),
    ]
    nodes = [*first, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def widen(graph: GraphProto) -> None:
    """Every half-precision number in fp32, as weights are loaded too: no CPU computes in less for a graph."""
    for tensor in graph.initializer:
        _widen(tensor)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type in _HALVES:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _widen(attribute.t)
            elif attribute.type == AttributeProto.GRAPH:
                widen(attribute.g)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in _HALVES:
                attribute.i = TensorProto.FLOAT


def has_halves(model: ModelProto) -> bool:
    return any(tensor.data_type in _HALVES for tensor in model.graph.initializer)


def pooled(new: Addition, tokens: str, mask: str, layout: SentenceLayout) -> str:
    """Token vectors to one vector a text: as builder/head.py's PoolingHead does it."""
    vectors = [_pool(new, kind, tokens, mask) for kind in layout.pooling]
    result = vectors[0] if len(vectors) == 1 else new.add("Concat", *vectors, axis=-1)
    for layer in layout.dense:
        weights = {name: new.constant(value) for name, value in layer.arrays().items()}
        result = new.add("Gemm", result, weights["weight"], *([weights["bias"]] if "bias" in weights else []), transB=1)
        result = _activated(new, layer.activation, result)
    if layout.normalize:
        norm = new.along("ReduceL2", result, -1, keepdims=1)
        result = new.add("Div", result, new.add("Max", norm, new.constant(1e-12)))
    return result


def _pool(new: Addition, kind: Pooling, tokens: str, mask: str) -> str:
    if kind is Pooling.CLS:
        return new.add("Gather", tokens, new.constant(0, np.int64), axis=1)
    weights = new.along("Unsqueeze", new.add("Cast", mask, to=TensorProto.FLOAT), -1)
    one = new.constant(1.0)
    if kind is Pooling.MAX:
        masked = new.add("Mul", new.add("Sub", one, weights), new.constant(_NEVER))
        return new.along("ReduceMax", new.add("Add", tokens, masked), 1, keepdims=0)
    places = new.add(
        "CumSum", new.add("Add", new.add("Mul", weights, new.constant(0.0)), one), new.constant(1, np.int64)
    )
    if kind is Pooling.LAST_TOKEN:
        last = new.along("ReduceSum", weights, 1, keepdims=1)
        chosen = new.add("Cast", new.add("Equal", places, last), to=TensorProto.FLOAT)
        return new.along("ReduceSum", new.add("Mul", tokens, chosen), 1, keepdims=0)
    if kind is Pooling.WEIGHTED_MEAN:
        weights = new.add("Mul", weights, places)
    total = new.add("Max", new.along("ReduceSum", weights, 1, keepdims=0), new.constant(1e-9))
    summed = new.along("ReduceSum", new.add("Mul", tokens, weights), 1, keepdims=0)
    return new.add("Div", summed, new.add("Sqrt", total) if kind is Pooling.MEAN_SQRT_LEN else total)


def _activated(new: Addition, activation: str, value: str) -> str:
    if activation == "GELU":
        # As its definition says: the operator itself is newer than most graphs.
        bell = new.add("Erf", new.add("Mul", value, new.constant(2.0**-0.5)))
        half = new.add("Mul", value, new.constant(0.5))
        return new.add("Mul", half, new.add("Add", bell, new.constant(1.0)))
    return new.add({"ReLU": "Relu"}.get(activation, activation), value)


def at_masks(new: Addition, values: str, ids: str, mask_id: int, ids_dtype: Any) -> str:
    """Of values for all tokens, those for mask tokens, rows end to end."""
    places = new.add("NonZero", new.add("Equal", ids, new.constant(mask_id, ids_dtype)))
    return new.add("GatherND", values, new.add("Transpose", places, perm=[1, 0]))


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _HALVES:
        tensor.CopyFrom(numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
