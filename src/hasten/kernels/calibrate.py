"""From half precision to eight bits: what products take is watched on calibration rows, and their weights are rounded.

Products go by the names of their weights: `3.down` is the second one of the fourth layer's feed-forward part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hasten.core.tensors import Batch
from hasten.kernels.encoder import Encoder, Geometry, Packed
from hasten.kernels.packing import MOST_TOKENS, Bucket, pack, parts, places_of, unpack
from hasten.kernels.squeeze import FP8, LARGEST, Squeeze, reference, squeeze_weight

# How much larger than the largest value that was seen another may be in fp8. There it costs nothing: the distance of
# two numbers goes with their size, and fifteen powers of two below the largest it still does.
_ROOM = 2.0
# How much of a channel's factor in int8 the range of its values decides, and that of its weights the rest: of each
# product the share that costs it least. At all of it no channel would have room for values larger than were seen.
_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
# Those of all rows that the cost is found on.
_SAMPLE_TOKENS = 512
_SENSITIVITY_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Taken:
    """What a product took: the largest value of each channel, by magnitude, and all values of some tokens."""

    most: Any
    sample: Any

    def __or__(self, other: Taken) -> Taken:
        return Taken(torch.maximum(self.most, other.most), torch.cat([self.sample, other.sample]))


def watched(geometry: Geometry, weights: Mapping[str, Any], rows: Batch) -> dict[str, Taken]:
    """What each product takes on these rows."""
    encoder = _Watching(geometry, weights, every=-(-rows.tokens // _SAMPLE_TOKENS))
    with torch.inference_mode():
        for batch in _batches(geometry, rows, weights["words"].device):
            encoder.many(batch)
    return encoder.taken


def narrowed(weights: Mapping[str, Any], taken: Mapping[str, Taken], dtype: Any, keep: Sequence[str]) -> dict[str, Any]:
    """The weights with those of all products in eight bits, but for those that are to be kept."""
    found = dict(weights)
    for name, what in taken.items():
        if name not in keep:
            found |= _narrowed(name, weights[f"{name}.weight"], what, dtype)
    return found


def narrowed_by(weights: Mapping[str, Any], ranges: Mapping[str, float], dtype: Any) -> dict[str, Any]:
    """The same by ranges that somebody has found, or trained with; a product without one is kept."""
    found = dict(weights)
    for name, most in ranges.items():
        weight = weights[f"{name}.weight"]
        found |= _rounded(name, weight, torch.full((1,), LARGEST[dtype] / most, device=weight.device), dtype)
    return found


def most_sensitive(geometry: Geometry, weights: Mapping[str, Any], rows: Batch, dtype: Any) -> list[str]:
    """All products, the one first that alone in eight bits changes the states of a few rows most."""
    taken = watched(geometry, weights, rows)
    lengths = np.cumsum(rows.lengths)
    few = rows.take(np.arange(max(1, int((lengths <= _SENSITIVITY_TOKENS).sum()))))
    errors = dict.fromkeys(taken, 0.0)
    with torch.inference_mode():
        for batch in _batches(geometry, few, weights["words"].device):
            expected = Encoder(geometry, weights).many(batch).float()
            for name in taken:
                alone = {**weights, **_narrowed(name, weights[f"{name}.weight"], taken[name], dtype)}
                states = Encoder(geometry, alone).many(batch).float()
                errors[name] += float((states - expected).square().sum())
    return sorted(taken, key=lambda name: -errors[name])


def _narrowed(name: str, weight: Any, taken: Taken, dtype: Any) -> dict[str, Any]:
    """Found where the values are, which may be a GPU, and given back where the weight is."""
    placed = weight.to(taken.most.device)
    factors = _factor(taken.most, dtype) if dtype == FP8 else _factors(placed, taken, dtype)
    return {part: value.to(weight.device) for part, value in _rounded(name, placed, factors, dtype).items()}


def _rounded(name: str, weight: Any, factors: Any, dtype: Any) -> dict[str, Any]:
    narrow, step = squeeze_weight(weight, factors, dtype)
    return {f"{name}.weight": narrow, f"{name}.step": step, f"{name}.factors": factors}


def _factor(most: Any, dtype: Any) -> Any:
    """What all values are multiplied by, from the largest of them."""
    largest = most.amax().float()
    return (LARGEST[dtype] / (_ROOM * torch.where(largest > 0, largest, 1.0))).view(1)


def _factors(weight: Any, taken: Taken, dtype: Any) -> Any:
    """What the values of each channel are multiplied by.

    int8 has the same distance between all its numbers, so that a few large channels would leave the others none: each
    has a factor of its own, which moves some of its range into the weights. Those can take much, having a step for each
    row, but not all of what a channel far above the others has.
    """
    most, columns = (torch.where(one > 0, one, 1.0).float() for one in (taken.most, weight.abs().amax(0)))
    sample, whole = taken.sample.float(), weight.float()
    expected = sample @ whole.T

    def of(share: float) -> Any:
        shares = most**share / columns ** (1 - share)
        return LARGEST[dtype] / ((most / shares).amax() * shares)

    def error(factors: Any) -> float:
        narrow, step = squeeze_weight(whole, factors, dtype)
        found = reference(sample, Squeeze(factors, dtype)).float() @ narrow.float().T * step
        return float((found - expected).square().sum())

    return min(map(of, _SHARES), key=error)


class _Watching(Encoder):
    def __init__(self, geometry: Geometry, weights: Mapping[str, Any], every: int) -> None:
        super().__init__(geometry, weights)
        self._every = every
        self.taken: dict[str, Taken] = {}

    def _product(self, x: Any, name: str, *, has_bias: bool = False, has_gelu: bool = False) -> Any:
        now = Taken(x.abs().amax(0), x[:: self._every].clone())
        self.taken[name] = self.taken[name] | now if name in self.taken else now
        return super()._product(x, name, has_bias=has_bias, has_gelu=has_gelu)


def _batches(geometry: Geometry, rows: Batch, device: Any) -> Iterator[Packed]:
    """Of exactly the tokens there are: what stands in the rest of a bucket is nobody's value."""
    for part in map(rows.take, parts(rows.lengths, MOST_TOKENS)):
        bucket = Bucket(part.tokens, len(part))
        whole = np.zeros(sum(bucket.sizes), np.int32)
        pack(whole, part, bucket, geometry.first_place, places_of(part, geometry.first_place))
        yield unpack(torch.from_numpy(whole).to(device), bucket)
