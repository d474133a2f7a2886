"""A graph that says itself what each tensor is computed in: products in half precision, norms and softmax in fp32.

TensorRT takes all types from the graph (a strongly typed network; since 11 there is no other), so that a precision is
a rewriting of the graph, done once and the same in every version.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.core.errors import StageError
from hasten.core.variant import Precision

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# The largest number each of them holds: a mask's minus infinity, written as fp32's least, is beyond both.
HALVES = {Precision.FP16: 65504.0, Precision.BF16: 3.3895313892515355e38}
# protobuf ends at 2 GiB.
_ONE_FILE_BYTES = 2**31 - 2**27
# ONNX's own operators, but for those of other ways to quantize.
_OWN = ("", "ai.onnx")
_INTEGER = ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul")
_PRODUCTS = ("MatMul", "Gemm", "Conv")
_MOVING = (
    "Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose",
    "Unsqueeze",
)  # fmt: skip
_ELEMENTWISE = ("Add", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Sub", "Where")
_ACTIVATIONS = ("Erf", "Gelu", "LeakyRelu", "Relu", "Sigmoid", "Tanh")
_LOOKING_UP = ("Gather", "GatherElements", "GatherND")
_PAIR = ("QuantizeLinear", "DequantizeLinear")
# What may be computed in half precision; everything else, sums, norms and softmax among it, stays in fp32.
_NARROW = {*_PRODUCTS, *_MOVING, *_ELEMENTWISE, *_ACTIVATIONS, *_LOOKING_UP, *_PAIR, "Einsum"}
# Since when scales may be in half precision. What is dequantized has its scale's type: with fp32's, products behind it
# would be of fp32, or a cast between the two would take them out of eight bits.
_HALF_SCALES = 19
# How far a scale may move when it is rounded: half a step at the end of eight bits.
_SCALE_TOLERANCE = 1 / 256
# With these go the operators beside them: a norm that is written out loses as much in its subtraction as in its sum.
_SUMS = ("Pow", "Reciprocal", "ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare", "Sqrt")
# With softmax goes what is added to the scores before it, which may be a mask's minus infinity; and with what makes
# whole numbers of floats, such as the buckets of relative positions, how these were computed: rounded, one is the next.
_SOFTMAX = ("LogSoftmax", "Softmax")
_THROUGH = {*_ELEMENTWISE, *_MOVING, *_SUMS, "Abs", "Ceil", "Exp", "Floor", "Log", "Round"}
# Reductions with axes among their inputs, as ONNX has them since 18: ONNX Runtime's inference of shapes follows none of
# these, but the mean, which has the same shape.
_MEAN = "ReduceMean"
_LIKE_MEAN = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip


def write_typed(graph: Path, target: Path, precision: Precision, beyond: frozenset[str] = frozenset()) -> Precision:
    """The graph with the types of a precision, and the shapes of its tensors; fp16 beside what comes quantized.

    What its products are in by then is returned: of a graph whose values are all beyond fp16, that is fp32.
    """
    import onnx

    try:
        model = onnx.load(graph)
    except Exception as error:  # protobuf's own classes, and weights beside the graph that are not there
        raise StageError(f"{graph} is not an ONNX graph: {error}") from error
    if foreign := [node.op_type for node in model.graph.node if node.domain not in _OWN or node.op_type in _INTEGER]:
        raise StageError(
            f"TensorRT has no operator {foreign[0]}",
            hint="it takes QuantizeLinear and DequantizeLinear; tensorrt-int8+qdq@cuda is made so, from the weights",
        )
    found = stored_in(model)
    expected = Precision.FP32 if precision in HALVES else precision
    if found is not expected:
        raise StageError(
            f"a graph with {found} weights does not become one in {precision}",
            hint="most of them stand in no product that is quantized: tensorrt-fp16@cuda takes it"
            if found is Precision.FP32
            else None,
        )
    _settle(model)
    _add_shapes(model)
    if (half := _half_of(model, precision)) is not None:
        retype(model, half, beyond)
    try:
        _write(model, target)
        onnx.checker.check_model(target, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise StageError(f"the graph cannot be typed in {precision}: {error}") from error
    return stored_in(model)


def _half_of(model: ModelProto, precision: Precision) -> Precision | None:
    """What is computed in beside fp32; nothing where scales can be in nothing else."""
    if precision in HALVES:
        return precision
    return Precision.FP16 if precision is not Precision.FP32 and _opset(model) >= _HALF_SCALES else None


def _opset(model: ModelProto) -> int:
    return int(next(entry.version for entry in model.opset_import if entry.domain in _OWN))


def stored_in(model: ModelProto) -> Precision:
    """What most of the weights of its products are in, seen through what quantizes and what moves them."""
    from onnx import TensorProto

    kinds = {
        TensorProto.FLOAT: Precision.FP32,
        TensorProto.FLOAT16: Precision.FP16,
        TensorProto.BFLOAT16: Precision.BF16,
        TensorProto.INT8: Precision.INT8,
        TensorProto.FLOAT8E4M3FN: Precision.FP8,
    }
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    counted: Counter[Precision] = Counter()

    def count(name: str, quantized: int | None = None) -> None:
        if name in weights:
            kind = quantized or weights[name].data_type
            if kind in kinds and len(weights[name].dims) > 1:
                counted[kinds[kind]] += math.prod(weights[name].dims)
        elif (node := makers.get(name)) is not None and node.op_type in (*_MOVING, "DequantizeLinear"):
            count(node.input[0], quantized)
        elif node is not None and node.op_type == "QuantizeLinear":
            zero = weights.get(node.input[2]) if len(node.input) > 2 else None
            count(node.input[0], zero.data_type if zero is not None else TensorProto.UINT8)

    for node in model.graph.node:
        if node.op_type in _PRODUCTS:
            for name in node.input:
                count(name)
    return counted.most_common(1)[0][0] if counted else Precision.FP32


def retype(model: ModelProto, precision: Precision, beyond: frozenset[str] = frozenset()) -> None:
    """Half precision wherever it is harmless, casts where the two meet; inputs and outputs keep their types.

    What writes or reads a tensor of `beyond` stays in fp32. The model brings the types of all its tensors.
    """
    _Retyping(model, precision, beyond).apply()


class _Retyping:
    def __init__(self, model: ModelProto, precision: Precision, beyond: frozenset[str]) -> None:
        from onnx import TensorProto

        self.graph: GraphProto = model.graph
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.opset = _opset(model)
        self.word, self.limit, self.beyond = precision.value, HALVES[precision], beyond
        self.wide = int(TensorProto.FLOAT)
        self.half = int(TensorProto.FLOAT16 if precision is Precision.FP16 else TensorProto.BFLOAT16)
        self.weights = {tensor.name: tensor for tensor in self.graph.initializer if tensor.data_type == self.wide}
        self.floats = {*self.weights, *_names_of_type(self.graph, self.wide)}
        # What each tensor of floats is made in, and what was cast or copied already.
        self.made: dict[str, int] = {}
        self.changed: dict[tuple[str, int], str] = {}
        self.written: list[NodeProto] = []

    def apply(self) -> None:
        from onnx import helper

        stays = self._staying()
        for place, node in enumerate(self.nodes):
            kind = self.wide if place in stays else self.half
            if node.op_type != "Cast":
                for slot, name in enumerate(node.input):
                    if name in self.floats:
                        node.input[slot] = self._as(name, kind)
            elif kind == self.half and node.output[0] in self.floats:
                del node.attribute[:]
                node.attribute.append(helper.make_attribute("to", self.half))
            self.made.update((name, kind) for name in node.output if name in self.floats)
            self.written.append(node)
        self._widen_outputs()
        del self.graph.node[:]
        self.graph.node.extend(self.written)
        read = {name for node in _all_nodes(self.graph) for name in node.input}
        kept = [tensor for tensor in self.graph.initializer if tensor.name in read]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
        for entry in self.graph.value_info:
            if self.made.get(entry.name) == self.half:
                entry.type.tensor_type.elem_type = self.half

    def _as(self, name: str, kind: int) -> str:
        """The tensor in this type: itself, a weight stored in it, or what a cast makes of it."""
        from onnx import helper, numpy_helper

        if self.made.get(name, self.wide) == kind:
            return name
        if (name, kind) not in self.changed:
            other = self.changed[name, kind] = f"{name}/{self.word if kind == self.half else 'fp32'}"
            if name in self.weights:
                values = numpy_helper.to_array(self.weights[name])
                stored = values.astype(helper.tensor_dtype_to_np_dtype(kind))
                self.graph.initializer.append(numpy_helper.from_array(stored, other))
            else:
                self.written.append(helper.make_node("Cast", [name], [other], name=f"{other}/cast", to=kind))
        return self.changed[name, kind]

    def _widen_outputs(self) -> None:
        """Who reads the answers sees nothing of the precision."""
        from onnx import helper

        for entry in self.graph.output:
            name = entry.name
            if self.made.get(name) != self.half:
                continue
            inner = f"{name}/{self.word}"
            for node in self.written:
                for names in (node.input, node.output):
                    for slot, own in enumerate(names):
                        if own == name:
                            names[slot] = inner
            self.written.append(helper.make_node("Cast", [inner], [name], name=f"{name}/cast", to=self.wide))

    def _staying(self) -> set[int]:
        """The places of the operators that stay in fp32."""
        readers: defaultdict[str, list[int]] = defaultdict(list)
        makers: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            makers.update(dict.fromkeys(node.output, place))
            for name in node.input:
                readers[name].append(place)
        inner = {name for node in self.nodes for branch in _branches(node) for name in _read_in(branch)}
        large = {name for name, tensor in self.weights.items() if _largest(tensor) > self.limit}
        scales = self.weights.keys() & {node.input[1] for node in self.nodes if node.op_type in _PAIR}
        kept = inner | large | self.beyond | {name for name in scales if not self._holds(self.weights[name])}
        stays = set()
        for place, node in enumerate(self.nodes):
            if not kept.isdisjoint((*node.input, *node.output)) or not self._is_narrow(node):
                stays.add(place)
            if node.op_type in _SUMS:
                around = [makers[name] for name in node.input if name in makers]
                around += [reader for name in node.output for reader in readers[name]]
                around = [other for other in around if self.nodes[other].op_type in _ELEMENTWISE]
                # A norm ends with its own weights.
                while around:
                    stays.add(other := around.pop())
                    found = [reader for name in self.nodes[other].output for reader in readers[name]]
                    around += [reader for reader in found if reader not in stays and self._is_scaling(reader)]
        waiting = [place for place, node in enumerate(self.nodes) if self._is_delicate(node)]
        while waiting:
            for name in self.nodes[waiting.pop()].input:
                before = makers.get(name)
                if before is not None and name in self.floats and self.nodes[before].op_type in _THROUGH:
                    stays.add(before)
                    waiting.append(before)
        links, waiting = self._links(makers), list(stays)
        while waiting:
            found = [other for other in links[waiting.pop()] if other not in stays]
            stays.update(found)
            waiting += found
        return stays

    def _links(self, makers: Mapping[str, int]) -> defaultdict[int, list[int]]:
        """The places of pairs, what moves their values, and who computes with them: all of one type, both ways.

        A cast among them would leave the product to be computed in float.
        """
        links: defaultdict[int, list[int]] = defaultdict(list)
        carried: set[str] = set()
        for place, node in enumerate(self.nodes):
            taken = carried.intersection(node.input) if node.op_type in _NARROW else ()
            for name in taken:
                links[place].append(makers[name])
                links[makers[name]].append(place)
            if node.op_type in _PAIR or (taken and node.op_type in _MOVING):
                carried.update(node.output)
        return links

    def _holds(self, scale: Any) -> bool:
        """Whether scales, which are small numbers, stay what they are in half precision."""
        import numpy as np
        from onnx import helper, numpy_helper

        values = numpy_helper.to_array(scale)
        with np.errstate(over="ignore"):
            rounded = values.astype(helper.tensor_dtype_to_np_dtype(self.half)).astype(np.float32)
        return bool((np.abs(rounded - values) <= _SCALE_TOLERANCE * np.abs(values)).all())

    def _is_scaling(self, place: int) -> bool:
        """Whether it multiplies by a weight, or adds one."""
        node = self.nodes[place]
        return node.op_type in ("Add", "Mul") and not self.weights.keys().isdisjoint(node.input)

    def _is_delicate(self, node: NodeProto) -> bool:
        """Whether what leads to it stays in fp32 with it; what is quantized is rounded coarser than in fp16."""
        return node.op_type in _SOFTMAX or (self.floats.isdisjoint(node.output) and node.op_type not in _PAIR)

    def _is_narrow(self, node: NodeProto) -> bool:
        """Whether it may be computed in half precision, by us and by the version of ONNX the graph is written in."""
        from onnx import TensorProto, defs

        if node.op_type not in _NARROW:
            return False
        schema = defs.get_schema(node.op_type, self.opset, "")
        kind = f"tensor({TensorProto.DataType.Name(self.half).lower()})"
        allowed = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}
        slots = [(_formal(schema.inputs, slot), name) for slot, name in enumerate(node.input)]
        slots += [(_formal(schema.outputs, slot), name) for slot, name in enumerate(node.output)]
        return all(kind in allowed.get(formal.type_str, ()) for formal, name in slots if name in self.floats)


def _formal(formals: Any, slot: int) -> Any:
    """The last one may stand for any number."""
    return formals[min(slot, len(formals) - 1)]


def _names_of_type(graph: GraphProto, kind: int) -> Iterator[str]:
    for entry in (*graph.input, *graph.value_info, *graph.output):
        if entry.type.tensor_type.elem_type == kind:
            yield entry.name


def _largest(tensor: Any) -> float:
    import numpy as np
    from onnx import numpy_helper

    return float(np.abs(numpy_helper.to_array(tensor)).max(initial=0.0))


def _settle(model: ModelProto) -> None:
    """Constants among the weights, and weights not among the inputs, as older graphs have them."""
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
    """Of every tensor, its type and its sizes, in terms of the batch's; without them no type can be chosen."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    called = {place: node.op_type for place, node in enumerate(model.graph.node) if _is_like_mean(node)}
    try:
        for place in called:
            model.graph.node[place].op_type = _MEAN
        shaped = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception as error:  # what it cannot follow ends in an assertion or in an error of sympy's
        raise StageError(f"the shapes in the graph cannot be inferred: {error or type(error).__name__}") from error
    finally:
        for place, name in called.items():
            model.graph.node[place].op_type = name
    del model.graph.value_info[:]
    model.graph.value_info.extend(shaped.graph.value_info)
    known = {entry.name for entry in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        if missing := [name for name in node.output if name and name not in known]:
            raise StageError(f"the type of the tensor '{missing[0]}' cannot be inferred")


def _is_like_mean(node: NodeProto) -> bool:
    return node.op_type in _LIKE_MEAN and len(node.input) > 1


def _write(model: ModelProto, target: Path) -> None:
    import onnx

    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    onnx.save_model(
        model, target, save_as_external_data=size > _ONE_FILE_BYTES, location=f"{target.name}.data"
    )  # fmt: skip


def _branches(node: NodeProto) -> list[GraphProto]:
    return [graph for entry in node.attribute for graph in (entry.g, *entry.graphs)]


def _all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for branch in _branches(node):
            yield from _all_nodes(branch)


def _read_in(branch: GraphProto) -> Iterator[str]:
    yield from (entry.name for entry in branch.output)
    for node in _all_nodes(branch):
        yield from node.input
