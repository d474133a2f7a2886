"""Quantize an encoder's weights to 8 bits, with activation ranges from calibration rows.

GEMMs are named like their weights: `3.down` is the second linear layer of the fourth layer's feed-forward block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hasten.core.tensors import Batch
from hasten.kernels.architectures import AnyGeometry, encoder_class
from hasten.kernels.cuda.packed_buckets import Bucket
from hasten.kernels.encoder_base import PackedBatch
from hasten.kernels.ops.quantize import FP8, MAX_VALUE, ActivationQuant, quantize_weight, reference
from hasten.kernels.packing import MAX_TOKENS, pack, row_positions, split_rows, unpack

# How far beyond the calibrated maximum fp8 values may go. This costs nothing: the precision of fp8 is relative to the
# value, down to fifteen powers of two below the maximum.
_HEADROOM = 2.0
# The share of a channel's int8 scale that its activation range decides; its weight range decides the rest. Each GEMM
# uses the share with the smallest error. With all of it, no channel would have headroom for larger values.
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
# Tokens on which that error is measured.
_SAMPLE_TOKENS = 512
_SENSITIVITY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class ActivationMaxima:
    """The inputs of a GEMM on calibration rows: the largest magnitude per channel, and all values of some tokens."""

    max_abs: Any
    sample: Any

    def __or__(self, other: ActivationMaxima) -> ActivationMaxima:
        return ActivationMaxima(torch.maximum(self.max_abs, other.max_abs), torch.cat([self.sample, other.sample]))


def observe_activations(geometry: AnyGeometry, weights: Mapping[str, Any], rows: Batch) -> dict[str, ActivationMaxima]:
    """Run the rows and return the inputs of each GEMM."""
    encoder, every = encoder_class(geometry)(geometry, weights), -(-rows.tokens // _SAMPLE_TOKENS)
    observed: dict[str, ActivationMaxima] = {}

    def observe(name: str, x: Any) -> None:
        maxima = ActivationMaxima(x.abs().amax(0), x[::every].clone())
        observed[name] = observed[name] | maxima if name in observed else maxima

    encoder.observe = observe
    with torch.inference_mode():
        for batch in _batches(geometry, rows, weights["word_embeddings"].device):
            encoder.large_batch(batch)
    return observed


def quantize_weights(
    weights: Mapping[str, Any], observed: Mapping[str, ActivationMaxima], dtype: Any, keep: Sequence[str]
) -> dict[str, Any]:
    """Quantize the weights of all GEMMs except those in `keep`."""
    quantized = dict(weights)
    for name, maxima in observed.items():
        if name not in keep:
            quantized |= _calibrated(name, weights[f"{name}.weight"], maxima, dtype)
    return quantized


def quantize_with_module(weights: Mapping[str, Any], ranges: Mapping[str, float], dtype: Any) -> dict[str, Any]:
    """Quantize the weights of all GEMMs that have a range, which the quantizers of a module provide."""
    quantized = dict(weights)
    for name, amax in ranges.items():
        weight = weights[f"{name}.weight"]
        inverse_scale = torch.full((1,), MAX_VALUE[dtype] / amax, device=weight.device)
        quantized |= _quantized(name, weight, inverse_scale, dtype)
    return quantized


def most_sensitive(geometry: AnyGeometry, weights: Mapping[str, Any], rows: Batch, dtype: Any) -> list[str]:
    """Return all GEMMs, first the one that changes the hidden states most when it alone is quantized."""
    observed = observe_activations(geometry, weights, rows)
    lengths = np.cumsum(rows.lengths)
    subset = rows.take(np.arange(max(1, int((lengths <= _SENSITIVITY_TOKENS).sum()))))
    errors = dict.fromkeys(observed, 0.0)
    with torch.inference_mode():
        for batch in _batches(geometry, subset, weights["word_embeddings"].device):
            expected = encoder_class(geometry)(geometry, weights).large_batch(batch).float()
            for name in observed:
                quantized = {**weights, **_calibrated(name, weights[f"{name}.weight"], observed[name], dtype)}
                states = encoder_class(geometry)(geometry, quantized).large_batch(batch).float()
                errors[name] += float((states - expected).square().sum())
    return sorted(observed, key=lambda name: -errors[name])


def _calibrated(name: str, weight: Any, maxima: ActivationMaxima, dtype: Any) -> dict[str, Any]:
    """Quantize on the device of the observed values, which may be a GPU, and return to the device of the weight."""
    local = weight.to(maxima.max_abs.device)
    if dtype == FP8:
        largest = maxima.max_abs.amax().float()
        inverse_scales = (MAX_VALUE[dtype] / (_HEADROOM * torch.where(largest > 0, largest, 1.0))).view(1)
    else:
        inverse_scales = _channel_inverse_scales(local, maxima, dtype)
    return {part: value.to(weight.device) for part, value in _quantized(name, local, inverse_scales, dtype).items()}


def _quantized(name: str, weight: Any, inverse_scales: Any, dtype: Any) -> dict[str, Any]:
    quantized, scale = quantize_weight(weight, inverse_scales, dtype)
    return {f"{name}.weight": quantized, f"{name}.scale": scale, f"{name}.inverse_scales": inverse_scales}


def _channel_inverse_scales(weight: Any, maxima: ActivationMaxima, dtype: Any) -> Any:
    """Return one inverse scale per channel, which moves a part of the channel's range into the weights.

    int8 has a uniform step, so with a single scale a few large channels would leave the others no precision. Weights
    have a scale per output column and can absorb much, but not all of the range of an outlier channel.
    """
    activation_max, weight_max = (
        torch.where(maximum > 0, maximum, 1.0).float() for maximum in (maxima.max_abs, weight.abs().amax(0))
    )
    sample, weight_fp32 = maxima.sample.float(), weight.float()
    expected = sample @ weight_fp32.T

    def inverse_scales_for(share: float) -> Any:
        shares = activation_max**share / weight_max ** (1 - share)
        return MAX_VALUE[dtype] / ((activation_max / shares).amax() * shares)

    def error(inverse_scales: Any) -> float:
        quantized, scale = quantize_weight(weight_fp32, inverse_scales, dtype)
        activations = reference(sample, ActivationQuant(inverse_scales, dtype)).float()
        return float((activations @ quantized.float().T * scale - expected).square().sum())

    return min(map(inverse_scales_for, _SHARES), key=error)


def _batches(geometry: AnyGeometry, rows: Batch, device: Any) -> Iterator[PackedBatch]:
    """Yield batches of exactly the real tokens: the values in the rest of a bucket are meaningless."""
    for part in map(rows.take, split_rows(rows.lengths, MAX_TOKENS)):
        bucket = Bucket(part.tokens, len(part))
        buffer = np.zeros(sum(bucket.segment_sizes), np.int32)
        pack(buffer, part, bucket, geometry.position_offset, row_positions(part, geometry.position_offset))
        yield unpack(torch.from_numpy(buffer).to(device), bucket)
