"""Smoothing (SmoothQuant): divide channels with outliers and multiply their weights: x·W = (x/s)·(s·W).

Activations then need less range for their largest channel and weights need more; the search looks for the smallest
error. Every s is a power of two, so nothing is rounded and a float graph's outputs stay identical to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hasten.core.errors import PlanError
from hasten.core.tensors import FloatArray
from hasten.quantize.analysis.matmuls import GraphIndex, MatMul, find_matmuls

# Norms whose output scales with their constants, and the input indices of those constants.
_SCALE_INPUTS = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
# Larger factors would not smooth, and could leave the range of floats.
_MAX_EXPONENT = 8


def smoothing_exponents(maxima: FloatArray, weight_maxima: FloatArray, alpha: float) -> list[int]:
    """Return SmoothQuant's s = max|x|^α / max|w|^(1−α) of each channel as an exponent of two; the median is 0.

    `maxima` are of each channel's values, `weight_maxima` of the weights that multiply it.
    """
    smallest = np.finfo(np.float32).tiny
    values, weights = (np.log2(np.maximum(each, smallest)) for each in (maxima, weight_maxima))
    exponents = alpha * values - (1 - alpha) * weights
    centred = np.rint(exponents - np.median(exponents))
    # For a channel whose values or weights are all zero, any exponent would do.
    centred[(maxima == 0) | (weight_maxima == 0)] = 0
    clipped: list[int] = np.clip(centred, -_MAX_EXPONENT, _MAX_EXPONENT).astype(int).tolist()
    return clipped


def smooth(model: Any, exponents: Mapping[str, Sequence[int]]) -> None:
    """Smooth the graph in place: by matmul, divide each input channel by two to the power of its exponent."""
    matmuls = {matmul.name: matmul for matmul in find_matmuls(model)}
    for name, channels in exponents.items():
        if name not in matmuls:
            raise PlanError(
                f"the recipe smooths '{name}', which is not a matmul with constant weights in this graph",
                hint="a recipe fits only the graph it was made for",
            )
        if len(channels) != matmuls[name].inputs:
            raise PlanError(
                f"the recipe smooths {len(channels)} channels of '{name}', which has {matmuls[name].inputs}",
                hint="a recipe fits only the graph it was made for",
            )
    smoother = _Smoother(model, {name: tuple(channels) for name, channels in exponents.items()})
    for matmul in matmuls.values():
        if matmul.name in exponents:
            smoother.smooth(matmul)
    smoother.index.insert_nodes(smoother.inserted_before, {})


class _Smoother:
    def __init__(self, model: Any, exponents: Mapping[str, tuple[int, ...]]) -> None:
        self.index, self._exponents = GraphIndex(model), exponents
        self._nodes = {node.name: node for node in model.graph.node if node.name}
        # The divided inputs and the scaled constants, by their names and exponents.
        self._divided: dict[tuple[str, tuple[int, ...]], str] = {}
        self._scaled: dict[tuple[str, tuple[int, ...]], str] = {}
        # The nodes to insert before a matmul, by its name.
        self.inserted_before: dict[str, list[Any]] = {}

    def smooth(self, matmul: MatMul) -> None:
        exponents, node = self._exponents[matmul.name], self._nodes[matmul.name]
        if (matmul.input, exponents) not in self._divided:
            self._divided[matmul.input, exponents] = self._divide(matmul, exponents)
        node.input[0] = self._divided[matmul.input, exponents]
        node.input[1] = self._scale(matmul.weight, exponents, 1 if matmul.is_transposed else 0)

    def _divide(self, matmul: MatMul, exponents: tuple[int, ...]) -> str:
        from onnx import helper

        # Dividing values does not change their shape.
        consumers = [node for node in self.index.consumers(matmul.input) if node.op_type != "Shape"]
        is_shared = all(self._exponents.get(node.name) == exponents for node in consumers)
        is_output = matmul.input in self.index.outputs
        if is_shared and not is_output and self._fold_into_norm(matmul.input, exponents):
            return matmul.input
        name = f"{matmul.input}/smoothed/{matmul.name}"
        factors = np.ldexp(np.float32(1), -np.array(exponents)).astype(np.float32)
        constant = self.index.add_constant(f"{name}/factors", factors)
        self.inserted_before[matmul.name] = [helper.make_node("Mul", [matmul.input, constant], [name], name=name)]
        return name

    def _fold_into_norm(self, name: str, exponents: tuple[int, ...]) -> bool:
        """Divide a tensor by scaling the constants of the norm that produces it, if there is one."""
        norm = self.index.producers.get(name)
        if norm is None or norm.op_type not in _SCALE_INPUTS or norm.output[0] != name:
            return False
        indices = [index for index in _SCALE_INPUTS[norm.op_type] if index < len(norm.input) and norm.input[index]]
        if any(self.index.constant_shape(norm.input[index]) != (len(exponents),) for index in indices):
            return False
        for index in indices:
            norm.input[index] = self._scale(norm.input[index], tuple(-exponent for exponent in exponents), 0)
        return True

    def _scale(self, name: str, exponents: tuple[int, ...], axis: int) -> str:
        if (name, exponents) not in self._scaled:
            values = self.index.constant_values(name)
            shape = [-1 if dimension == axis else 1 for dimension in range(values.ndim)]
            scaled = np.ldexp(values, np.array(exponents).reshape(shape))
            self._scaled[name, exponents] = self.index.add_constant(f"{name}/smoothed", scaled)
        return self._scaled[name, exponents]
