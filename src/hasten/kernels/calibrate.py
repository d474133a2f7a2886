"""From half precision to eight bits: what products take is watched on calibration rows, and their weights are rounded.

Products go by the names of their weights: `3.down` is the second one of the fourth layer's feed-forward part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hasten.core.tensors import Batch
from hasten.kernels.encoder import Encoder, Geometry, Packed
from hasten.kernels.packing import Bucket, pack, parts, places_of, unpack
from hasten.kernels.squeeze import FP8, INT8, LARGEST, squeeze_weight

# How much larger than the largest value that was seen another may be. In fp8 it costs nothing: the distance of two
# numbers goes with their size, and fifteen powers of two below the largest it still does.
_ROOM = {FP8: 2.0, INT8: 1.0}
# How the range of a channel is shared between values and weights where each channel has its factor.
_SHARE = 0.5
_SENSITIVITY_TOKENS = 2048


def maxima(geometry: Geometry, weights: Mapping[str, Any], rows: Batch) -> dict[str, Any]:
    """Of each product the largest value, by magnitude, that each channel of its input has on these rows."""
    encoder = _Watching(geometry, weights)
    with torch.inference_mode():
        for batch in _batches(geometry, rows, weights["words"].device):
            encoder.many(batch)
    return encoder.seen


def narrowed(weights: Mapping[str, Any], seen: Mapping[str, Any], dtype: Any, keep: Sequence[str]) -> dict[str, Any]:
    """The weights with those of all products in eight bits, but for those that are to be kept."""
    found = dict(weights)
    for name, most in seen.items():
        if name not in keep:
            found |= _narrowed(name, weights[f"{name}.weight"], most, dtype)
    return found


def most_sensitive(geometry: Geometry, weights: Mapping[str, Any], rows: Batch, dtype: Any) -> list[str]:
    """All products, the one first that alone in eight bits changes the states of a few rows most."""
    seen = maxima(geometry, weights, rows)
    lengths = np.cumsum(rows.lengths)
    few = rows.take(np.arange(max(1, int((lengths <= _SENSITIVITY_TOKENS).sum()))))
    errors = dict.fromkeys(seen, 0.0)
    with torch.inference_mode():
        for batch in _batches(geometry, few, weights["words"].device):
            expected = Encoder(geometry, weights).many(batch).float()
            for name in seen:
                alone = {**weights, **_narrowed(name, weights[f"{name}.weight"], seen[name], dtype)}
                states = Encoder(geometry, alone).many(batch).float()
                errors[name] += float((states - expected).square().sum())
    return sorted(seen, key=lambda name: -errors[name])


def _narrowed(name: str, weight: Any, most: Any, dtype: Any) -> dict[str, Any]:
    factors = _factors(weight, most.to(weight.device), dtype)
    narrow, step = squeeze_weight(weight, factors, dtype)
    return {f"{name}.weight": narrow, f"{name}.step": step, f"{name}.factors": factors}


def _factors(weight: Any, most: Any, dtype: Any) -> Any:
    """What values are multiplied by, from the largest of each channel.

    One factor for fp8. int8 has the same distance between all its numbers, so that a few large channels would leave the
    others none: there each has its own, which moves some of its range into the weights.
    """
    seen = torch.where(most > 0, most, 1.0).float()
    if dtype == FP8:
        return (LARGEST[dtype] / (_ROOM[dtype] * seen.amax())).view(1)
    columns = weight.abs().amax(0).float()
    shares = seen**_SHARE / torch.where(columns > 0, columns, 1.0) ** (1 - _SHARE)
    return LARGEST[dtype] / (_ROOM[dtype] * (seen / shares).amax() * shares)


class _Watching(Encoder):
    def __init__(self, geometry: Geometry, weights: Mapping[str, Any]) -> None:
        super().__init__(geometry, weights)
        self.seen: dict[str, Any] = {}

    def _product(self, x: Any, name: str, *, has_bias: bool = False, has_gelu: bool = False) -> Any:
        most = x.abs().amax(0)
        self.seen[name] = torch.maximum(self.seen[name], most) if name in self.seen else most
        return super()._product(x, name, has_bias=has_bias, has_gelu=has_gelu)


def _batches(geometry: Geometry, rows: Batch, device: Any) -> Iterator[Packed]:
    """Of exactly the tokens there are: what stands in the rest of a bucket is nobody's value."""
    for part in map(rows.take, parts(rows.lengths)):
        bucket = Bucket(part.tokens, len(part))
        whole = np.zeros(sum(bucket.sizes), np.int32)
        pack(whole, part, bucket, places_of(part, geometry.first_place))
        yield unpack(torch.from_numpy(whole).to(device), bucket)
