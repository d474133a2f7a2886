"""Block-wise weight-only quantization: each block of weights has its own scale (ONNX Runtime's MatMulNBits)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import DECODER
from hasten.core.errors import PlanError, StageError, missing_package
from hasten.core.variant import Precision
from hasten.onnx_graph import attribute, read_graph, write_graph, write_merged
from hasten.quantize.quiet import quiet_logging
from hasten.quantize.recipe import Recipe
from hasten.quantize.rewrites.split import float_nodes

_BITS = (4, 8)
# The sizes ONNX Runtime has kernels for.
_BLOCK_SIZES = (16, 32, 64, 128, 256)
# ONNX Runtime's accuracy level for matmuls computed in int8: activations are quantized at run time, also in blocks.
_INT8_COMPUTE = 4
_HEAD = "head"
_DOMAIN = "com.microsoft"


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The bits of a weight, the number of weights that share a scale, and the bits of the language model head."""

    bits: int
    size: int
    head_bits: int


# Larger blocks read a few percent less and round more; a 4-bit head chooses other tokens more often.
BLOCK_FORMATS = {Precision.INT8: BlockFormat(8, 32, 8), Precision.INT4: BlockFormat(4, 32, 8)}


def quantize_blocks(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    """Quantize the weights of an encoder as its recipe says."""
    if recipe.bits not in _BITS:
        raise PlanError(f"{recipe.bits}-bit weights are not supported", hint="bits is 4 or 8")
    if recipe.block_size not in _BLOCK_SIZES:
        raise PlanError(
            f"block_size = {recipe.block_size} is not supported",
            hint=f"block_size is one of {', '.join(map(str, _BLOCK_SIZES))}",
        )
    quantized = _quantize_weights(read_graph(graph), recipe.bits, recipe.block_size, float_nodes(recipe))
    write_graph(quantized, file, external_data=external_data)


def quantize_decoder_blocks(graphs: Mapping[str, Path], folder: Path, block_format: BlockFormat) -> dict[str, Path]:
    """Quantize the weights of a generative model: the time of a decode step is that of reading them.

    Token embeddings that equal the head's weights are looked up in the head's blocks.
    """
    models = {name: read_graph(file) for name, file in graphs.items()}
    heads = {name: _gemms_to_matmuls(model.graph) for name, model in models.items()}
    head = heads[DECODER]
    tables = {name: _lookup_tables(model.graph) for name, model in models.items()}
    for name, model in models.items():
        body = _quantize_weights(model, block_format.bits, block_format.size, [_HEAD])
        is_decoder = name == DECODER
        models[name] = _quantize_weights(body, block_format.head_bits, block_format.size, []) if is_decoder else body
    blocks = _head_blocks(models[DECODER].graph)
    if head is not None and blocks is not None:
        for name, model in models.items():
            for table, values in tables[name].items():
                if np.array_equal(values, head):
                    _look_up_in_head(model.graph, table, *blocks)
    files = {name: folder / file.name for name, file in graphs.items()}
    write_merged({files[name]: models[name] for name in files})
    return files


def _quantize_weights(model: Any, bits: int, block_size: int, excluded: Sequence[str]) -> Any:
    """Quantize the weights of all matmuls but those of the excluded nodes."""
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    except ImportError as error:
        raise missing_package(error.name or "onnx_ir", "block-wise quantization", "build") from error

    quantizer = MatMulNBitsQuantizer(
        model, bits=bits, block_size=block_size, accuracy_level=_INT8_COMPUTE, nodes_to_exclude=list(excluded)
    )
    try:
        with quiet_logging():
            quantizer.process()
    except Exception as error:
        raise StageError(f"block-wise quantization failed: {error}") from error
    return quantizer.model.model


def _gemms_to_matmuls(graph: Any) -> Any:
    """Replace every Gemm by a MatMul, which the quantizer knows; return the head's weights before transposing them."""
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
        index = list(graph.node).index(node)
        matmul = helper.make_node("MatMul", [node.input[0], weight], [result], name=name)
        bias = helper.make_node("Add", [result, node.input[2]], list(node.output)) if len(node.input) > 2 else None
        node.CopyFrom(bias or helper.make_node("Identity", [result], list(node.output)))
        graph.node.insert(index, matmul)
    return head


def _lookup_tables(graph: Any) -> dict[str, Any]:
    from onnx import numpy_helper

    names = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in names}


def _head_blocks(graph: Any) -> tuple[list[Any], dict[str, int]] | None:
    """Return the head's blocks and their format, or None if rows are not whole blocks."""
    # A lookup of the last block would be too long.
    heads = [node for node in graph.node if node.op_type == "MatMulNBits" and node.name.startswith(_HEAD)]
    if not heads:
        return None
    bits, size, width = (attribute(heads[0], name, 0) for name in ("bits", "block_size", "K"))
    weights = {tensor.name: tensor for tensor in graph.initializer}
    tensors = [weights[name] for name in heads[0].input[1:4] if name]
    return None if width % size else (tensors, {"bits": bits, "block_size": size})


def _look_up_in_head(graph: Any, table: str, blocks: list[Any], block_format: dict[str, int]) -> None:
    from onnx import helper, numpy_helper

    known = {tensor.name for tensor in graph.initializer}
    graph.initializer.extend(tensor for tensor in blocks if tensor.name not in known)
    data, *scales = (tensor.name for tensor in blocks)
    # The same bytes in two dimensions: ONNX Runtime folds the Reshape at load time.
    shape = numpy_helper.from_array(np.array([0, -1], np.int64), f"{table}_shape")
    graph.initializer.append(shape)
    flat = helper.make_node("Reshape", [data, shape.name], [f"{table}_flat"])
    options = {**block_format, "gather_axis": 0, "quantize_axis": 1}
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] == table:
            inputs = [flat.output[0], node.input[1], *scales]
            node.CopyFrom(
                helper.make_node(
                    "GatherBlockQuantized", inputs, list(node.output), name=node.name, domain=_DOMAIN, **options
                )
            )
    graph.node.insert(0, flat)
