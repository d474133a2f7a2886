"""The best stretches of a row of tokens, by numbers that say where they start and where they end."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from hasten.core.tensors import BoolArray, FloatArray

Scalar = TypeVar("Scalar", bound=np.generic)


def following(values: npt.NDArray[Scalar], longest: int) -> npt.NDArray[Scalar]:
    """For each place the values from there on, up to `longest` of them; zeros past the end."""
    width = min(longest, len(values))
    return sliding_window_view(np.concatenate([values, np.zeros(width - 1, values.dtype)]), width)


def top_spans(scores: FloatArray, inside: BoolArray, count: int) -> list[tuple[int, int, float]]:
    """First token, last token and score of the best spans with both ends inside, the best first.

    scores[i, j] is that of the j + 1 tokens from i on: no more memory than spans are long.
    """
    width = scores.shape[1]
    flat = np.where(inside[:, None] & following(inside, width), scores, -np.inf).ravel()
    least = np.partition(flat, -count)[-count] if count < len(flat) else -np.inf
    best = np.flatnonzero((flat >= least) & (flat > -np.inf))
    # Stable, so that of equals the first is taken, wherever this runs.
    best = best[np.argsort(-flat[best], kind="stable")][:count]
    first, more = np.divmod(best, width)
    return list(zip(first.tolist(), (first + more).tolist(), flat[best].tolist(), strict=True))
