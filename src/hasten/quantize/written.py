"""Models that write, their weights in blocks: at one token a run, a step costs the bytes of weights it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.variant import Precision
from hasten.graph import attribute, read_graph, write_graph
from hasten.quantize.blocks import in_blocks

_HEAD = "head"
_DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many bits weights have, how many share a scale, and the bits of the head that chooses the word."""

    bits: int
    size: int
    head_bits: int


BLOCKS = {Precision.INT8: Blocks(8, 32, 8), Precision.INT4: Blocks(4, 32, 8)}


def quantize_written(graph: Path, file: Path, blocks: Blocks) -> None:
    """Every product with weights; a table of words that is the head too is read from the head's own blocks."""
    model = read_graph(graph)
    tables = _head_as_product(model.graph)
    body = in_blocks(model, blocks.bits, blocks.size, [_HEAD])
    made = in_blocks(body, blocks.head_bits, blocks.size, [])
    _share_table(made.graph, tables)
    write_graph(made, file, external_data=True)


def _head_as_product(graph: Any) -> str | None:
    """The head turned round, as the quantizer knows products; returns the name of its weights."""
    from onnx import helper, numpy_helper

    weights = {tensor.name: tensor for tensor in graph.initializer}
    for place, node in enumerate(graph.node):
        if node.op_type == "Gemm" and attribute(node, "transB", 0) and node.input[1] in weights:
            name, output = node.input[1], node.output[0]
            turned = np.ascontiguousarray(numpy_helper.to_array(weights[name]).T)
            graph.initializer.append(numpy_helper.from_array(turned, f"{name}_turned"))
            has_bias = len(node.input) > 2
            result = f"{output}_product" if has_bias else output
            product = helper.make_node("MatMul", [node.input[0], f"{name}_turned"], [result], name=_HEAD)
            if has_bias:
                node.CopyFrom(helper.make_node("Add", [result, node.input[2]], [output]))
                graph.node.insert(place, product)
            else:
                node.CopyFrom(product)
            return str(name)
    return None


def _share_table(graph: Any, table: str | None) -> None:
    """Words are looked up in what the head multiplies with, where blocks end with the rows."""
    from onnx import helper, numpy_helper

    lookups = [node for node in graph.node if node.op_type == "Gather" and node.input[0] == table]
    heads = [node for node in graph.node if node.op_type == "MatMulNBits" and node.name.startswith(_HEAD)]
    if not lookups or not heads:
        return
    head = heads[0]
    bits, size, width = (attribute(head, name, 0) for name in ("bits", "block_size", "K"))
    if width % size:
        return
    shape = numpy_helper.from_array(np.array([0, -1], np.int64), "table_shape")
    graph.initializer.append(shape)
    parts = [name for name in (head.input[1], *head.input[2:4]) if name]
    data, *about = parts
    # The same bytes in two dimensions, which ONNX Runtime takes for free when it loads.
    flat = helper.make_node("Reshape", [data, shape.name], [f"{data}_flat"])
    graph.node.insert(0, flat)
    for node in lookups:
        node.CopyFrom(
            helper.make_node(
                "GatherBlockQuantized",
                [flat.output[0], node.input[1], *about],
                list(node.output),
                name=node.name,
                domain=_DOMAIN,
                bits=bits,
                block_size=size,
                gather_axis=0,
                quantize_axis=1,
            )
        )
