"""Models that write, their weights in blocks: at one token a run, a step costs the bytes of weights it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import DECODER
from hasten.core.variant import Precision
from hasten.graph import attribute, read_graph, write_together
from hasten.quantize.blocks import in_blocks

_HEAD = "head"
_DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many bits weights have, how many share a scale, and the bits of the head that chooses the word."""

    bits: int
    size: int
    head_bits: int


# Larger blocks read a few percent less and round more; a head of four bits chooses other words more often.
BLOCKS = {Precision.INT8: Blocks(8, 32, 8), Precision.INT4: Blocks(4, 32, 8)}


def quantize_written(graphs: Mapping[str, Path], folder: Path, blocks: Blocks) -> dict[str, Path]:
    """Every product with weights; words are looked up in the head's own blocks where they are the same numbers."""
    models = {name: read_graph(file) for name, file in graphs.items()}
    heads = {name: _as_products(model.graph) for name, model in models.items()}
    table = heads[DECODER]
    before = {name: _tables(model.graph) for name, model in models.items()}
    for name, model in models.items():
        body = in_blocks(model, blocks.bits, blocks.size, [_HEAD])
        models[name] = in_blocks(body, blocks.head_bits, blocks.size, []) if name == DECODER else body
    shared = _shared(models[DECODER].graph)
    if table is not None and shared is not None:
        for name, model in models.items():
            for other, values in before[name].items():
                if np.array_equal(values, table):
                    _look_up(model.graph, other, shared)
    made = {name: folder / file.name for name, file in graphs.items()}
    write_together({made[name]: models[name] for name in made})
    return made


def _as_products(graph: Any) -> Any:
    """Every Gemm as the quantizer knows products, the head turned round; returns the head's weights as they lay."""
    from onnx import helper, numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    head = None
    for node in [node for node in graph.node if node.op_type == "Gemm" and node.input[1] in weights]:
        weight, result = node.input[1], f"{node.output[0]}_product"
        is_head = bool(attribute(node, "transB", 0))
        if is_head:
            head = numpy_helper.to_array(weights[weight])
            graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(head.T), f"{weight}_turned"))
            weight = f"{weight}_turned"
        name = _HEAD if is_head else f"{node.name}_product"
        place = list(graph.node).index(node)
        product = helper.make_node("MatMul", [node.input[0], weight], [result], name=name)
        added = helper.make_node("Add", [result, node.input[2]], list(node.output)) if len(node.input) > 2 else None
        node.CopyFrom(added or helper.make_node("Identity", [result], list(node.output)))
        graph.node.insert(place, product)
    return head


def _tables(graph: Any) -> dict[str, Any]:
    """What is looked up in."""
    from onnx import numpy_helper

    looked_up = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    return {one.name: numpy_helper.to_array(one) for one in graph.initializer if one.name in looked_up}


@dataclass(frozen=True, slots=True)
class _Shared:
    """The head's blocks: numbers, scales and zero points, and how they are to be read."""

    tensors: tuple[Any, ...]
    bits: int
    size: int


def _shared(graph: Any) -> _Shared | None:
    """Where blocks end with the rows: otherwise a row's last block would be looked up too long."""
    heads = [node for node in graph.node if node.op_type == "MatMulNBits" and node.name.startswith(_HEAD)]
    if not heads:
        return None
    bits, size, width = (attribute(heads[0], name, 0) for name in ("bits", "block_size", "K"))
    weights = {tensor.name: tensor for tensor in graph.initializer}
    tensors = tuple(weights[name] for name in heads[0].input[1:4] if name)
    return None if width % size else _Shared(tensors, bits, size)


def _look_up(graph: Any, table: str, shared: _Shared) -> None:
    from onnx import helper, numpy_helper

    known = {tensor.name for tensor in graph.initializer}
    graph.initializer.extend(tensor for tensor in shared.tensors if tensor.name not in known)
    data, *about = (tensor.name for tensor in shared.tensors)
    # The same bytes in two dimensions: ONNX Runtime folds it when it loads.
    shape = numpy_helper.from_array(np.array([0, -1], np.int64), f"{table}_shape")
    graph.initializer.append(shape)
    flat = helper.make_node("Reshape", [data, shape.name], [f"{table}_flat"])
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] == table:
            node.CopyFrom(
                helper.make_node(
                    "GatherBlockQuantized",
                    [flat.output[0], node.input[1], *about],
                    list(node.output),
                    name=node.name,
                    domain=_DOMAIN,
                    bits=shared.bits,
                    block_size=shared.size,
                    gather_axis=0,
                    quantize_axis=1,
                )
            )
    graph.node.insert(0, flat)
