"""Weights alone, in blocks with a scale each; activations are rounded to 8 bits as they come, in blocks too."""

from __future__ import annotations

from pathlib import Path

from hasten.core.errors import PlanError, StageError, missing_package
from hasten.graph import read_graph, write_graph
from hasten.quantize.recipe import Recipe
from hasten.quantize.silence import silenced
from hasten.quantize.split import kept

_BITS = (4, 8)
# Those ONNX Runtime has kernels for.
_BLOCKS = (16, 32, 64, 128, 256)
# ONNX Runtime's number for products computed in int8.
_INT8 = 4


def quantize_blocks(graph: Path, file: Path, recipe: Recipe, *, external_data: bool) -> None:
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    except ImportError as error:
        raise missing_package(error.name or "onnx_ir", "quantizing weights in blocks", "build") from error

    if recipe.bits not in _BITS:
        raise PlanError(f"weights of {recipe.bits} bits cannot be made", hint="bits is 4 or 8")
    if recipe.block_size not in _BLOCKS:
        raise PlanError(
            f"blocks of {recipe.block_size} cannot be made", hint=f"block_size is one of {', '.join(map(str, _BLOCKS))}"
        )
    quantizer = MatMulNBitsQuantizer(
        read_graph(graph),
        bits=recipe.bits,
        block_size=recipe.block_size,
        accuracy_level=_INT8,
        nodes_to_exclude=kept(recipe),
    )
    try:
        with silenced():
            quantizer.process()
        write_graph(quantizer.model.model, file, external_data=external_data)
    except Exception as error:
        raise StageError(f"quantization in blocks failed: {error}") from error
