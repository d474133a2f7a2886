"""Write the precision of every tensor into a graph: matmuls in half precision, norms and softmax in fp32.

TensorRT takes all types from the graph (a strongly typed network; since 11 there is no other kind). A precision is
therefore a rewrite of the graph, which is done once and is the same for every version.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.backends.tensorrt.rewrites import replace_eye_like
from hasten.core.errors import StageError
from hasten.core.variant import Precision

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# The largest finite value of each type. A mask's minus infinity, stored as the lowest fp32 value, exceeds both.
HALF_PRECISIONS = {Precision.FP16: 65504.0, Precision.BF16: 3.3895313892515355e38}
# protobuf's limit is 2 GiB.
_ONE_FILE_BYTES = 2**31 - 2**27
# TensorRT takes the operators of these domains, except for other forms of quantization than quantize/dequantize pairs.
_ONNX_DOMAINS = ("", "ai.onnx")
_INTEGER_OPERATORS = ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul")
_MATMULS = ("MatMul", "Gemm", "Conv")
_DATA_MOVEMENT = (
    "Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
    "Unsqueeze",
)  # fmt: skip
_ELEMENTWISE = ("Add", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Sub", "Where")
_ACTIVATIONS = ("Erf", "Gelu", "LeakyRelu", "Relu", "Sigmoid", "Tanh")
_LOOKUPS = ("Gather", "GatherElements", "GatherND")
_QDQ = ("QuantizeLinear", "DequantizeLinear")
# Operators that may run in half precision; all others, among them sums, norms and softmax, stay in fp32.
_HALF_OPERATORS = {*_MATMULS, *_DATA_MOVEMENT, *_ELEMENTWISE, *_ACTIVATIONS, *_LOOKUPS, *_QDQ, "Einsum"}
# The first opset with scales in half precision. A dequantized tensor has the type of its scale: with an fp32 scale, the
# matmul behind it would run in fp32, or a cast between the two would keep it from running in 8 bits.
_HALF_SCALES_OPSET = 19
# The largest relative rounding error of a scale: half a quantization step at the end of the 8-bit range.
_SCALE_TOLERANCE = 1 / 256
# Their neighbours stay in fp32 too: a decomposed norm loses as much precision in its subtraction as in its sum.
_REDUCTIONS = ("Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sqrt")
# The operators before a softmax stay in fp32 too, because they may add a mask's minus infinity to the scores. So do the
# operators before a cast to integers, such as the buckets of relative positions: a rounding error changes the bucket.
_SOFTMAX = ("LogSoftmax", "Softmax")
_TRACED_BACK = {*_ELEMENTWISE, *_DATA_MOVEMENT, *_REDUCTIONS, "Abs", "Ceil", "Exp", "Floor", "Log", "Round"}
# Reductions that take their axes as an input, as in ONNX since opset 18: ONNX Runtime's shape inference supports only
# the mean of these, which has the same output shape.
_MEAN = "ReduceMean"
_SAME_SHAPE_AS_MEAN = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip


def write_typed(
    graph: Path, target: Path, precision: Precision, overflow_tensors: frozenset[str] = frozenset()
) -> Precision:
    """Write the graph with the types of a precision and the shapes of its tensors; quantized graphs get fp16 types.

    Return the precision of the matmuls, which is fp32 if all values of the graph exceed the range of fp16.
    """
    import onnx

    try:
        model = onnx.load(graph)
    except Exception as error:  # protobuf raises its own classes, and external weights may be missing
        raise StageError(f"{graph} is not an ONNX graph: {error}") from error
    for node in model.graph.node:
        if node.domain not in _ONNX_DOMAINS or node.op_type in _INTEGER_OPERATORS:
            hint = "it takes QuantizeLinear and DequantizeLinear; build tensorrt-int8+qdq@cuda from the model's weights"
            raise StageError(f"TensorRT has no operator {node.op_type}", hint=hint)
    stored = weight_precision(model)
    expected = Precision.FP32 if precision in HALF_PRECISIONS else precision
    if stored is not expected:
        raise StageError(
            f"a graph with {stored} weights cannot be typed in {precision}",
            hint="most of its weights are not quantized: use tensorrt-fp16@cuda" if stored is Precision.FP32 else None,
        )
    _normalize_initializers(model)
    _add_shapes(model)
    replace_eye_like(model.graph)
    if precision in HALF_PRECISIONS:
        _Retyping(model, precision, overflow_tensors).apply()
    elif precision is not Precision.FP32 and _opset(model) >= _HALF_SCALES_OPSET:
        _Retyping(model, Precision.FP16, overflow_tensors).apply()
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    try:
        onnx.save_model(model, target, save_as_external_data=size > _ONE_FILE_BYTES, location=f"{target.name}.data")
        onnx.checker.check_model(target, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise StageError(f"the graph cannot be typed in {precision}: {error}") from error
    return weight_precision(model)


def _opset(model: ModelProto) -> int:
    return int(next(entry.version for entry in model.opset_import if entry.domain in _ONNX_DOMAINS))


def weight_precision(model: ModelProto) -> Precision:
    """Return the precision of most matmul weights, traced back through quantization and data movement."""
    from onnx import TensorProto

    precisions = {
        TensorProto.FLOAT: Precision.FP32,
        TensorProto.FLOAT16: Precision.FP16,
        TensorProto.BFLOAT16: Precision.BF16,
        TensorProto.INT8: Precision.INT8,
        TensorProto.FLOAT8E4M3FN: Precision.FP8,
    }
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    counts: Counter[Precision] = Counter()

    def count(name: str, quantized_type: int | None = None) -> None:
        if name in weights:
            data_type = quantized_type or weights[name].data_type
            if data_type in precisions and len(weights[name].dims) > 1:
                counts[precisions[data_type]] += math.prod(weights[name].dims)
        elif (node := producers.get(name)) is not None and node.op_type in (*_DATA_MOVEMENT, "DequantizeLinear"):
            count(node.input[0], quantized_type)
        elif node is not None and node.op_type == "QuantizeLinear":
            zero_point = weights.get(node.input[2]) if len(node.input) > 2 else None
            count(node.input[0], zero_point.data_type if zero_point is not None else TensorProto.UINT8)

    for node in model.graph.node:
        if node.op_type in _MATMULS:
            for name in node.input:
                count(name)
    return counts.most_common(1)[0][0] if counts else Precision.FP32


class _Retyping:
    """Uses half precision wherever it is safe and inserts casts at the borders; inputs and outputs keep their types.

    Operators that write or read one of `overflow_tensors` stay in fp32. The model must have the types of all tensors.
    """

    def __init__(self, model: ModelProto, precision: Precision, overflow_tensors: frozenset[str]) -> None:
        from onnx import TensorProto

        self.graph: GraphProto = model.graph
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.opset = _opset(model)
        self.suffix, self.max_value = precision.value, HALF_PRECISIONS[precision]
        self.overflow_tensors = overflow_tensors
        self.fp32 = int(TensorProto.FLOAT)
        self.half = int(TensorProto.FLOAT16 if precision is Precision.FP16 else TensorProto.BFLOAT16)
        self.weights = {tensor.name: tensor for tensor in self.graph.initializer if tensor.data_type == self.fp32}
        entries = (*self.graph.input, *self.graph.value_info, *self.graph.output)
        typed = {entry.name for entry in entries if entry.type.tensor_type.elem_type == self.fp32}
        self.floats = {*self.weights, *typed}
        # The new type of each float tensor, and the names of copies in the other type.
        self.types: dict[str, int] = {}
        self.converted: dict[tuple[str, int], str] = {}
        self.new_nodes: list[NodeProto] = []

    def apply(self) -> None:
        """Rewrite the graph in place."""
        from onnx import helper

        in_fp32 = self._nodes_in_fp32()
        for index, node in enumerate(self.nodes):
            data_type = self.fp32 if index in in_fp32 else self.half
            if node.op_type != "Cast":
                for position, name in enumerate(node.input):
                    if name in self.floats:
                        node.input[position] = self._as(name, data_type)
            elif data_type == self.half and node.output[0] in self.floats:
                del node.attribute[:]
                node.attribute.append(helper.make_attribute("to", self.half))
            self.types.update((name, data_type) for name in node.output if name in self.floats)
            self.new_nodes.append(node)
        self._cast_outputs_to_fp32()
        del self.graph.node[:]
        self.graph.node.extend(self.new_nodes)
        used = {name for node in _all_nodes(self.graph) for name in node.input}
        used_weights = [tensor for tensor in self.graph.initializer if tensor.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(used_weights)
        for entry in self.graph.value_info:
            if self.types.get(entry.name) == self.half:
                entry.type.tensor_type.elem_type = self.half

    def _as(self, name: str, data_type: int) -> str:
        """Return the name of the tensor in this type: itself, a converted weight, or the output of a cast."""
        from onnx import helper, numpy_helper

        if self.types.get(name, self.fp32) == data_type:
            return name
        if (name, data_type) not in self.converted:
            copy = self.converted[name, data_type] = f"{name}/{self.suffix if data_type == self.half else 'fp32'}"
            if name in self.weights:
                values = numpy_helper.to_array(self.weights[name])
                stored = values.astype(helper.tensor_dtype_to_np_dtype(data_type))
                self.graph.initializer.append(numpy_helper.from_array(stored, copy))
            else:
                self.new_nodes.append(helper.make_node("Cast", [name], [copy], name=f"{copy}/cast", to=data_type))
        return self.converted[name, data_type]

    def _cast_outputs_to_fp32(self) -> None:
        from onnx import helper

        for entry in self.graph.output:
            name = entry.name
            if self.types.get(name) != self.half:
                continue
            inner = f"{name}/{self.suffix}"
            for node in self.new_nodes:
                for names in (node.input, node.output):
                    for position, other in enumerate(names):
                        if other == name:
                            names[position] = inner
            self.new_nodes.append(helper.make_node("Cast", [inner], [name], name=f"{name}/cast", to=self.fp32))

    def _nodes_in_fp32(self) -> set[int]:
        """Return the indices of the nodes that stay in fp32."""
        from onnx import numpy_helper

        consumers: defaultdict[str, list[int]] = defaultdict(list)
        producers: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            producers.update(dict.fromkeys(node.output, index))
            for name in node.input:
                consumers[name].append(index)
        branches = [branch for node in self.nodes for branch in _branches(node)]
        in_branches = {entry.name for branch in branches for entry in branch.output}
        in_branches |= {name for branch in branches for node in _all_nodes(branch) for name in node.input}
        weights = ((name, numpy_helper.to_array(tensor)) for name, tensor in self.weights.items())
        large = {name for name, values in weights if np.abs(values).max(initial=0.0) > self.max_value}
        scales = self.weights.keys() & {node.input[1] for node in self.nodes if node.op_type in _QDQ}
        inexact_scales = {name for name in scales if not self._is_representable(self.weights[name])}
        fp32_tensors = in_branches | large | self.overflow_tensors | inexact_scales
        in_fp32 = set()
        for index, node in enumerate(self.nodes):
            if not fp32_tensors.isdisjoint((*node.input, *node.output)) or not self._allows_half(node):
                in_fp32.add(index)
            if node.op_type in _REDUCTIONS:
                neighbours = [producers[name] for name in node.input if name in producers]
                neighbours += [consumer for name in node.output for consumer in consumers[name]]
                neighbours = [other for other in neighbours if self.nodes[other].op_type in _ELEMENTWISE]
                # A norm ends with the multiplication and addition of its weights.
                while neighbours:
                    in_fp32.add(other := neighbours.pop())
                    next_nodes = [consumer for name in self.nodes[other].output for consumer in consumers[name]]
                    neighbours += [
                        after for after in next_nodes if after not in in_fp32 and self._applies_weight(after)
                    ]
        waiting = [index for index, node in enumerate(self.nodes) if self._needs_exact_inputs(node)]
        while waiting:
            for name in self.nodes[waiting.pop()].input:
                producer = producers.get(name)
                if producer is not None and name in self.floats and self.nodes[producer].op_type in _TRACED_BACK:
                    in_fp32.add(producer)
                    waiting.append(producer)
        links, waiting = self._quantized_links(producers), list(in_fp32)
        while waiting:
            linked = [other for other in links[waiting.pop()] if other not in in_fp32]
            in_fp32.update(linked)
            waiting += linked
        return in_fp32

    def _quantized_links(self, producers: Mapping[str, int]) -> defaultdict[int, list[int]]:
        """Link, in both directions, nodes that must have one type: pairs, data movement behind them, and consumers.

        A cast among them would force the matmul to run in float.
        """
        links: defaultdict[int, list[int]] = defaultdict(list)
        dequantized: set[str] = set()
        for index, node in enumerate(self.nodes):
            inputs = dequantized.intersection(node.input) if node.op_type in _HALF_OPERATORS else ()
            for name in inputs:
                links[index].append(producers[name])
                links[producers[name]].append(index)
            if node.op_type in _QDQ or (inputs and node.op_type in _DATA_MOVEMENT):
                dequantized.update(node.output)
        return links

    def _is_representable(self, scale: Any) -> bool:
        """Return whether scales, which are small numbers, keep their values in half precision."""
        from onnx import helper, numpy_helper

        values = numpy_helper.to_array(scale)
        with np.errstate(over="ignore"):
            rounded = values.astype(helper.tensor_dtype_to_np_dtype(self.half)).astype(np.float32)
        return bool((np.abs(rounded - values) <= _SCALE_TOLERANCE * np.abs(values)).all())

    def _applies_weight(self, index: int) -> bool:
        """Return whether a node multiplies by a weight or adds one."""
        node = self.nodes[index]
        return node.op_type in ("Add", "Mul") and not self.weights.keys().isdisjoint(node.input)

    def _needs_exact_inputs(self, node: NodeProto) -> bool:
        """Return whether the nodes before this one stay in fp32; quantization rounds more coarsely than fp16."""
        return node.op_type in _SOFTMAX or (self.floats.isdisjoint(node.output) and node.op_type not in _QDQ)

    def _allows_half(self, node: NodeProto) -> bool:
        """Return whether a node may run in half precision, by our rules and by the graph's opset."""
        from onnx import TensorProto, defs

        if node.op_type not in _HALF_OPERATORS:
            return False
        schema = defs.get_schema(node.op_type, self.opset, "")
        type_name = f"tensor({TensorProto.DataType.Name(self.half).lower()})"
        allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        tensors = [(_formal(schema.inputs, position), name) for position, name in enumerate(node.input)]
        tensors += [(_formal(schema.outputs, position), name) for position, name in enumerate(node.output)]
        return all(type_name in allowed.get(formal.type_str, ()) for formal, name in tensors if name in self.floats)


def _formal(formals: Any, position: int) -> Any:
    """Return the formal parameter at a position; the last one may be variadic."""
    return formals[min(position, len(formals) - 1)]


def _normalize_initializers(model: ModelProto) -> None:
    """Turn constants into initializers, and remove initializers from the inputs, where older graphs list them."""
    from onnx import helper

    graph, constants = model.graph, []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            tensor = helper.get_attribute_value(node.attribute[0])
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
            constants.append(node)
    for node in constants:
        graph.node.remove(node)
    names = {tensor.name for tensor in graph.initializer}
    for entry in [entry for entry in graph.input if entry.name in names]:
        graph.input.remove(entry)


def _add_shapes(model: ModelProto) -> None:
    """Add the type and the symbolic shape of every tensor, without which no type can be chosen."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    renamed = {
        index: node.op_type
        for index, node in enumerate(model.graph.node)
        if node.op_type in _SAME_SHAPE_AS_MEAN and len(node.input) > 1
    }
    try:
        for index in renamed:
            model.graph.node[index].op_type = _MEAN
        shaped = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception as error:  # unsupported operators end in an assertion or in an error of sympy
        raise StageError(f"the shapes in the graph cannot be inferred: {error or type(error).__name__}") from error
    finally:
        for index, name in renamed.items():
            model.graph.node[index].op_type = name
    del model.graph.value_info[:]
    model.graph.value_info.extend(shaped.graph.value_info)
    known = {entry.name for entry in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        if missing := [name for name in node.output if name and name not in known]:
            raise StageError(f"the type of the tensor '{missing[0]}' cannot be inferred")


def _branches(node: NodeProto) -> list[GraphProto]:
    return [graph for entry in node.attribute for graph in (entry.g, *entry.graphs)]


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for branch in _branches(node):
            yield from _all_nodes(branch)
