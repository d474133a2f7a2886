"""Smoothing: a channel with large values is divided, and the weights it meets are multiplied: x·W = (x/s)·(s·W).

Activations then need fewer steps for their largest channel, weights more; somewhere between lies the smallest error.
Every s is a power of two, so that nothing is rounded and a float graph answers the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hasten.core.errors import PlanError
from hasten.core.tensors import FloatArray
from hasten.quantize.products import Product, Wires, find_products

# The constants of these grow and shrink with what they give; where they stand among what each takes.
_SCALED = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
# More would be no smoothing, and less than float's range is safe from it.
_LARGEST_EXPONENT = 8


def smoothing(maxima: FloatArray, weight_maxima: FloatArray, alpha: float) -> list[int]:
    """SmoothQuant's s = max|x|^α / max|w|^(1−α) of each channel, as a power of two; the median channel stays.

    `maxima` is of each channel's values, `weight_maxima` of the weights it meets.
    """
    smallest = np.finfo(np.float32).tiny
    values, weights = (np.log2(np.maximum(each, smallest)) for each in (maxima, weight_maxima))
    exponents = alpha * values - (1 - alpha) * weights
    centred = np.rint(exponents - np.median(exponents))
    # A channel that is always zero, or meets none but zeros, could have any.
    centred[(maxima == 0) | (weight_maxima == 0)] = 0
    found: list[int] = np.clip(centred, -_LARGEST_EXPONENT, _LARGEST_EXPONENT).astype(int).tolist()
    return found


def smooth(model: Any, exponents: Mapping[str, Sequence[int]]) -> None:
    """Change the graph: by product, the power of two that each channel of its input is divided by."""
    products = {product.name: product for product in find_products(model)}
    for name, given in exponents.items():
        if name not in products:
            raise PlanError(
                f"the recipe smooths '{name}', which is no product with constant weights of this graph",
                hint="a recipe fits the graph it was made for",
            )
        if len(given) != products[name].inputs:
            raise PlanError(
                f"the recipe smooths {len(given)} channels of '{name}', which has {products[name].inputs}",
                hint="a recipe fits the graph it was made for",
            )
    _Smoother(model).run({products[name]: tuple(given) for name, given in exponents.items()})


class _Smoother:
    def __init__(self, model: Any) -> None:
        self._wires = Wires(model)
        self._nodes = {node.name: node for node in model.graph.node if node.name}
        # What was divided, and the weights that were multiplied, by what and how much.
        self._divided: dict[tuple[str, tuple[int, ...]], str] = {}
        self._multiplied: dict[tuple[str, tuple[int, ...]], str] = {}
        self._before: dict[str, Any] = {}

    def run(self, wanted: Mapping[Product, tuple[int, ...]]) -> None:
        graph = self._wires.graph
        order = {node.name: place for place, node in enumerate(graph.node)}
        by_name = {product.name: exponents for product, exponents in wanted.items()}
        for product in sorted(wanted, key=lambda each: order[each.name]):
            exponents, node = wanted[product], self._nodes[product.name]
            if (product.input, exponents) not in self._divided:
                self._divided[product.input, exponents] = self._divide(product, exponents, by_name)
            node.input[0] = self._divided[product.input, exponents]
            node.input[1] = self._multiply(product, exponents)
        nodes = [placed for node in graph.node for placed in (*self._before.pop(node.name, ()), node)]
        del graph.node[:]
        graph.node.extend(nodes)

    def _divide(self, product: Product, exponents: tuple[int, ...], wanted: Mapping[str, tuple[int, ...]]) -> str:
        from onnx import helper

        # A size stays the same.
        readers = [node for node in self._wires.readers(product.input) if node.op_type != "Shape"]
        is_read_alike = all(wanted.get(node.name) == exponents for node in readers)
        if is_read_alike and product.input not in self._wires.outputs and self._fold(product.input, exponents):
            return product.input
        name = f"{product.input}/smoothed/{product.name}"
        factors = np.ldexp(np.float32(1), -np.array(exponents)).astype(np.float32)
        constant = self._wires.add_constant(f"{name}/factors", factors)
        self._before[product.name] = [helper.make_node("Mul", [product.input, constant], [name], name=name)]
        return name

    def _fold(self, name: str, exponents: tuple[int, ...]) -> bool:
        """Let the norm that makes a tensor give it divided already."""
        norm = self._wires.makers.get(name)
        if norm is None or norm.op_type not in _SCALED or norm.output[0] != name:
            return False
        places = [place for place in _SCALED[norm.op_type] if place < len(norm.input) and norm.input[place]]
        if any(self._wires.shape(norm.input[place]) != (len(exponents),) for place in places):
            return False
        for place in places:
            norm.input[place] = self._scaled(norm.input[place], tuple(-exponent for exponent in exponents), 0)
        return True

    def _multiply(self, product: Product, exponents: tuple[int, ...]) -> str:
        return self._scaled(product.weight, exponents, 1 if product.is_transposed else 0)

    def _scaled(self, name: str, exponents: tuple[int, ...], axis: int) -> str:
        if (name, exponents) not in self._multiplied:
            values = self._wires.values(name)
            shape = [-1 if place == axis else 1 for place in range(values.ndim)]
            scaled = np.ldexp(values, np.array(exponents).reshape(shape))
            self._multiplied[name, exponents] = self._wires.add_constant(f"{name}/smoothed", scaled)
        return self._multiplied[name, exponents]
