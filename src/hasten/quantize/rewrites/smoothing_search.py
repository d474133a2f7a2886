"""Choose the channels to split off and the matmuls to smooth, by their quantization error on calibration rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.tensors import FloatArray
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.matmuls import GraphIndex, MatMul, find_feed_forward_pairs, find_matmuls
from hasten.quantize.analysis.ranges import input_maxima, stream
from hasten.quantize.rewrites.smooth import smoothing_exponents
from hasten.quantize.rewrites.split import OUTLIER_CHANNELS, OUTLIER_RATIO, find_splits, split

# SmoothQuant's migration strength: 0 leaves outliers in the activations, 1 moves them wholly into the weights.
_ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Every token pays for a division, so it has to remove at least this part of a matmul's error.
_MIN_ERROR_REDUCTION = 0.5
# Errors are estimated on these many rows, and at most these many tokens of a batch: one percent shows in far fewer.
_ROWS = 64
_TOKENS = 256
# The variance of a rounding error is the squared step divided by this.
_UNIFORM_VARIANCE = 12


def search_smoothing(
    graph: Path, calibration: Calibration, *, channels: int = OUTLIER_CHANNELS, ratio: float = OUTLIER_RATIO
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return a recipe's smoothing exponents and split channels for this graph, each by matmul."""
    model = read_graph(graph)
    matmuls = find_matmuls(model)
    maxima = _merge_by_weight(matmuls, input_maxima(graph, matmuls, calibration))
    seconds = [pair.second.name for pair in find_feed_forward_pairs(model, matmuls)]
    splits = find_splits({name: maxima[name] for name in seconds}, channels=channels, ratio=ratio)
    split(model, splits)
    remaining = maxima | {name: np.delete(maxima[name], outliers) for name, outliers in splits.items()}
    return find_smoothing(model, graph.parent, remaining, calibration.first(_ROWS)), splits


def find_smoothing(
    model: Any, folder: Path, maxima: Mapping[str, FloatArray], calibration: Calibration
) -> dict[str, list[int]]:
    """Return exponents for those matmuls whose estimated quantization error they clearly reduce.

    Matmuls that read the same tensor share exponents, so that it is divided once.
    """
    index = GraphIndex(model)
    groups = _group([matmul for matmul in find_matmuls(model) if matmul.name in maxima])
    candidates = [_candidates(group, maxima, index) for group in groups]
    tried = [
        [_factors([0] * group[0].inputs), *map(_factors, each)] for group, each in zip(groups, candidates, strict=True)
    ]
    errors = np.zeros((len(groups), 1 + len(_ALPHAS)))
    # Computed once: calibration brings several batches of values.
    powers = {
        matmul.name: [weight_powers(_weight(matmul, index), factors) for factors in factors_of_group]
        for group, factors_of_group in zip(groups, tried, strict=True)
        for matmul in group
    }
    inputs = sorted({matmul.input for group in groups for matmul in group})
    for values in stream(model, folder, inputs, calibration):
        for number, group in enumerate(groups):
            # The matmuls of a group read few different tensors.
            for name in dict.fromkeys(matmul.input for matmul in group):
                activations = values[name].reshape(-1, group[0].inputs)
                readers = [powers[matmul.name] for matmul in group if matmul.input == name]
                for choice, factors in enumerate(tried[number]):
                    value_powers, noise = activation_powers(activations, factors)
                    errors[number, choice] += sum(relative_error(value_powers, noise, each[choice]) for each in readers)
    chosen: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        best = int(errors[number].argmin())
        if errors[number, best] < (1 - _MIN_ERROR_REDUCTION) * errors[number, 0]:
            chosen |= {matmul.name: candidates[number][best - 1] for matmul in group}
    return chosen


@dataclass(frozen=True, slots=True)
class WeightPowers:
    """The mean square of the weights of each input channel, and the mean square of their rounding errors."""

    channels: FloatArray
    noise: float


def weight_powers(weight: FloatArray, factors: FloatArray) -> WeightPowers:
    """Return the powers of weights multiplied by these factors; each output channel has its own int8 scale."""
    multiplied = weight * factors[:, None]
    scales = np.maximum(multiplied.max(axis=0), -multiplied.min(axis=0)) / 127
    channels = np.einsum("ij,ij->i", multiplied, multiplied) / multiplied.shape[1]
    return WeightPowers(channels, float(np.square(scales).mean()) / _UNIFORM_VARIANCE)


def activation_powers(values: FloatArray, factors: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the mean square of each channel divided by its factor, and that of its rounding error in int8.

    All values share one range.
    """
    low = min(0.0, float((values.min(axis=0) / factors).min()))
    high = max(0.0, float((values.max(axis=0) / factors).max()))
    scale = (high - low) / 255 or 1.0
    divided = values[:: -(-len(values) // _TOKENS)] / factors
    errors = divided - np.rint(divided / scale) * scale
    return np.square(divided).mean(axis=0), np.square(errors).mean(axis=0)


def relative_error(value_powers: FloatArray, value_noise: FloatArray, weight: WeightPowers) -> float:
    """Return the mean squared error of a dynamically quantized int8 matmul, relative to its output.

    Rounding errors of different channels are taken as independent, so that no matmul has to be computed: on MiniLM
    this chooses what simulated matmuls chose, in a tenth of the time.
    """
    error = float(value_noise @ weight.channels + value_powers.sum() * weight.noise)
    return error / max(float(value_powers @ weight.channels), float(np.finfo(np.float32).tiny))


def _factors(exponents: Sequence[int]) -> FloatArray:
    factors: FloatArray = np.ldexp(np.float32(1), np.array(exponents)).astype(np.float32)
    return factors


def _candidates(group: Sequence[MatMul], maxima: Mapping[str, FloatArray], index: GraphIndex) -> list[list[int]]:
    values = np.max([maxima[matmul.name] for matmul in group], axis=0)
    weights = np.max([np.abs(_weight(matmul, index)).max(axis=1) for matmul in group], axis=0)
    return [smoothing_exponents(values, weights, alpha) for alpha in _ALPHAS]


def _weight(matmul: MatMul, index: GraphIndex) -> FloatArray:
    values = index.constant_values(matmul.weight)
    return values.T if matmul.is_transposed else values


def _merge_by_weight(matmuls: Sequence[MatMul], maxima: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Give matmuls with shared weights the same maxima: otherwise each would need its own copy of the weights."""
    largest: dict[str, FloatArray] = {}
    for matmul in matmuls:
        known = largest.get(matmul.weight, maxima[matmul.name])
        largest[matmul.weight] = np.maximum(known, maxima[matmul.name])
    return {matmul.name: largest[matmul.weight] for matmul in matmuls}


def _group(matmuls: Sequence[MatMul]) -> list[list[MatMul]]:
    """Group the matmuls that read the same tensor or have the same weights."""
    groups: list[list[MatMul]] = []
    for matmul in matmuls:
        related = [
            group
            for group in groups
            if any(matmul.input == other.input or matmul.weight == other.weight for other in group)
        ]
        groups = [group for group in groups if group not in related]
        groups.append([*(other for group in related for other in group), matmul])
    return groups
