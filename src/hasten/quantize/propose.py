"""Which channels to split off and which products to smooth: what calibration says would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.tensors import FloatArray
from hasten.graph import read_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.products import Product, Wires, find_pairs, find_products
from hasten.quantize.ranges import input_maxima, stream
from hasten.quantize.smooth import smoothing
from hasten.quantize.split import CHANNELS, RATIO, find_splits, split

# How far outliers migrate: 0 would leave them where they are, 1 would move them wholly into the weights.
_ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Every token pays for a division: it has to take away this part of a product's error.
_WORTHWHILE = 0.5
# Errors are judged on this many rows, and at most so many tokens of a batch: one percent shows in far fewer.
_ROWS = 64
_TOKENS = 256


def propose(
    graph: Path, calibration: Calibration, *, channels: int = CHANNELS, ratio: float = RATIO
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """What a recipe for this graph may smooth, and what it may split."""
    model = read_graph(graph)
    products = find_products(model)
    maxima = _by_weight(products, input_maxima(graph, products, calibration))
    seconds = [pair.second.name for pair in find_pairs(model, products)]
    splits = find_splits({name: maxima[name] for name in seconds}, channels=channels, ratio=ratio)
    split(model, splits)
    left = maxima | {name: np.delete(maxima[name], outliers) for name, outliers in splits.items()}
    return find_smoothing(model, graph.parent, left, calibration.first(_ROWS)), splits


def find_smoothing(
    model: Any, folder: Path, maxima: Mapping[str, FloatArray], calibration: Calibration
) -> dict[str, list[int]]:
    """Exponents for those of the given products whose error they make clearly smaller, in a simulated quantization.

    Products that read the same tensor share them, so that it is divided once.
    """
    wires = Wires(model)
    groups = _groups([product for product in find_products(model) if product.name in maxima])
    choices = [_choices(group, maxima, wires) for group in groups]
    errors = np.zeros((len(groups), 1 + len(_ALPHAS)))
    inputs = sorted({product.input for group in groups for product in group})
    for values in stream(model, folder, inputs, calibration):
        for number, group in enumerate(groups):
            for product in group:
                taken = values[product.input].reshape(-1, product.inputs)
                exponents = [[0] * product.inputs, *choices[number]]
                errors[number] += [quantization_error(taken, _weight(product, wires), each) for each in exponents]
    found: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        best = int(errors[number].argmin())
        if errors[number, best] < (1 - _WORTHWHILE) * errors[number, 0]:
            found |= {product.name: choices[number][best - 1] for product in group}
    return found


def quantization_error(values: FloatArray, weight: FloatArray, exponents: Sequence[int]) -> float:
    """The mean squared error of a product in int8, as dynamic quantization has it, relative to what it gives.

    One range for all values, one for each column of weights.
    """
    factors = np.ldexp(np.float32(1), np.array(exponents)).astype(np.float32)
    divided, multiplied = values / factors, weight * factors[:, None]
    low, high = min(0.0, float(divided.min())), max(0.0, float(divided.max()))
    step = (high - low) / 255 or 1.0
    some = slice(None, None, -(-len(values) // _TOKENS))
    rounded = np.rint(divided[some] / step) * step
    steps = np.abs(multiplied).max(axis=0) / 127
    steps[steps == 0] = 1
    exact = values[some] @ weight
    error = rounded @ (np.rint(multiplied / steps) * steps) - exact
    return float(np.square(error).mean() / max(float(np.square(exact).mean()), np.finfo(np.float32).tiny))


def _choices(group: Sequence[Product], maxima: Mapping[str, FloatArray], wires: Wires) -> list[list[int]]:
    values = np.max([maxima[product.name] for product in group], axis=0)
    weights = np.max([np.abs(_weight(product, wires)).max(axis=1) for product in group], axis=0)
    return [smoothing(values, weights, alpha) for alpha in _ALPHAS]


def _weight(product: Product, wires: Wires) -> FloatArray:
    values = wires.values(product.weight)
    return values.T if product.is_transposed else values


def _by_weight(products: Sequence[Product], maxima: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Products that share weights are treated alike: otherwise each would need a version of them for itself."""
    largest: dict[str, FloatArray] = {}
    for product in products:
        known = largest.get(product.weight, maxima[product.name])
        largest[product.weight] = np.maximum(known, maxima[product.name])
    return {product.name: largest[product.weight] for product in products}


def _groups(products: Sequence[Product]) -> list[list[Product]]:
    """Those that read the same tensor, or have the same weights, together."""
    groups: list[list[Product]] = []
    for product in products:
        near = [
            group
            for group in groups
            if any(product.input == other.input or product.weight == other.weight for other in group)
        ]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), product])
    return groups
