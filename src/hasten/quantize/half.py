"""A graph in fp16, by ONNX Runtime's own converter; its ends stay in fp32, and so does what fp16 is too coarse for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hasten.core.errors import StageError, missing_package
from hasten.graph import attribute, read_graph, write_graph
from hasten.quantize.session import tensor_types
from hasten.quantize.silence import silenced

# What the converter calls the casts it puts around a node that stays as it is, and before an output.
_NARROWING = "_cast_to_fp16_node"
_WIDENING = "_cast_to_fp32_node"
_ENDING = "graph_output_cast"
_FLOAT = "tensor(float)"
# What makes a whole number, or an angle, of places in a text: fp16 tells those beyond 2048 no longer apart, and angles
# far sooner. As a number of a bucket a rounding is another bucket.
_EXACT = ("Sin", "Cos", "Floor", "Ceil", "Round")


def halve(graph: Path, file: Path, beyond_fp16: frozenset[str], *, external_data: bool) -> None:
    """What computes or reads one of these tensors stays in fp32."""
    model = halved(read_graph(graph), graph.parent, beyond_fp16)
    try:
        write_graph(model, file, external_data=external_data)
    except Exception as error:
        raise StageError(f"the graph cannot be made in fp16: {error}") from error


def halved(
    model: Any, folder: Path, beyond_fp16: frozenset[str], ends: Sequence[str] | None = None, keep: Sequence[str] = ()
) -> Any:
    """A graph whose other weights lie in `folder`; `ends` are the inputs and outputs that stay in fp32 where that is
    not all of them, `keep` the nodes that do."""
    try:
        from onnxruntime.transformers.float16 import convert_float_to_float16
        from onnxruntime.transformers.onnx_model import OnnxModel
    except ImportError as error:
        raise missing_package(error.name or "onnx", "making a graph of fp16", "build") from error

    _name_nodes(model.graph)
    types = tensor_types(model, folder)
    _tell_types(model.graph, types)
    kept = _about_places(model.graph, types) | set(keep)
    kept |= {node.name for node in model.graph.node if not beyond_fp16.isdisjoint((*node.input, *node.output))}
    try:
        with silenced():
            model = convert_float_to_float16(
                model,
                keep_io_types=True if ends is None else list(ends),
                disable_shape_infer=True,
                node_block_list=sorted(kept),
            )
            _join(model.graph)
            OnnxModel(model).topological_sort()
    except Exception as error:
        raise StageError(f"the graph cannot be made in fp16: {error}") from error
    return model


def _name_nodes(graph: Any) -> None:
    """It knows what to leave alone by name."""
    for place, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{place}"


def _tell_types(graph: Any, types: Mapping[str, str]) -> None:
    """It puts casts only where it knows the type of a tensor, and onnx knows none behind ONNX Runtime's operators."""
    from onnx import TensorProto, helper

    ends = {entry.name for entry in graph.output}
    del graph.value_info[:]
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        for name, kind in types.items()
        if kind == _FLOAT and name not in ends
    )


def _about_places(graph: Any, types: Mapping[str, str]) -> set[str]:
    """The nodes that compute buckets of relative positions, or angles of rotary ones: from places, not from words."""
    from onnx import TensorProto

    weights = {tensor.name for tensor in graph.initializer}
    makers: dict[str, Any] = {}
    from_words: set[str] = set()
    asked: list[Any] = []
    for node in graph.node:
        is_lookup = node.op_type == "Gather" and node.input[0] in weights and types.get(node.output[0]) == _FLOAT
        is_read = node.op_type not in ("Shape", "Size") and not from_words.isdisjoint(node.input)
        if is_lookup or is_read or "Embed" in node.op_type:
            from_words.update(node.output)
            continue
        makers.update(dict.fromkeys(node.output, node))
        is_whole = node.op_type == "Cast" and attribute(node, "to", 0) in (TensorProto.INT32, TensorProto.INT64)
        if node.op_type in _EXACT or is_whole:
            asked.append(node)
    found: dict[str, Any] = {}
    while asked:
        node = asked.pop()
        if node.name not in found and any(types.get(name) == _FLOAT for name in (*node.input, *node.output)):
            found[node.name] = node
            asked += [makers[name] for name in node.input if name in makers]
    return set(found)


def _join(graph: Any) -> None:
    """From one node that stays in fp32 to another, or to an output, values would go through fp16 all the same."""
    before = {node.output[0]: node.input[0] for node in graph.node if node.name.endswith(_NARROWING)}
    # Where several nodes that stay read one tensor, it puts the same cast before each.
    nodes = {(node.name, node.output[0]): node for node in reversed(graph.node)}.values()
    for node in nodes:
        if node.name.endswith(_WIDENING) or node.name.startswith(_ENDING):
            # A cast from fp32 to fp32 is left, which ONNX Runtime drops.
            node.input[0] = before.get(node.input[0], node.input[0])
    kept = list(reversed(nodes))
    del graph.node[:]
    graph.node.extend(kept)
