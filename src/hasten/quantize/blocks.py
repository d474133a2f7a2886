"""Weights alone, in blocks with a scale each; activations are rounded to 8 bits as they come, in blocks too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    if recipe.bits not in _BITS:
        raise PlanError(f"weights of {recipe.bits} bits cannot be made", hint="bits is 4 or 8")
    if recipe.block_size not in _BLOCKS:
        raise PlanError(
            f"blocks of {recipe.block_size} cannot be made", hint=f"block_size is one of {', '.join(map(str, _BLOCKS))}"
        )
    made = in_blocks(read_graph(graph), recipe.bits, recipe.block_size, kept(recipe))
    write_graph(made, file, external_data=external_data)


def in_blocks(model: Any, bits: int, block_size: int, keep: Sequence[str]) -> Any:
    """A graph whose products with weights are of so many bits, those named left as they are."""
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    except ImportError as error:
        raise missing_package(error.name or "onnx_ir", "quantizing weights in blocks", "build") from error

    quantizer = MatMulNBitsQuantizer(
        model, bits=bits, block_size=block_size, accuracy_level=_INT8, nodes_to_exclude=list(keep)
    )
    try:
        with silenced():
            quantizer.process()
    except Exception as error:
        raise StageError(f"quantization in blocks failed: {error}") from error
    return quantizer.model.model
