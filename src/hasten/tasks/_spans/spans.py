"""Find the best spans of a row of tokens from scores of their starts and ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from hasten.core.tensors import BoolArray, FloatArray, Scalar
from hasten.metrics.statistics import top_indices


def following(values: npt.NDArray[Scalar], max_length: int) -> npt.NDArray[Scalar]:
    """Return, for each position, the next `max_length` values starting there; zeros past the end."""
    width = min(max_length, len(values))
    return sliding_window_view(np.concatenate([values, np.zeros(width - 1, values.dtype)]), width)


def top_spans(scores: FloatArray, inside: BoolArray, count: int) -> list[tuple[int, int, float]]:
    """Return first token, last token and score of the best spans with both ends inside, best first.

    scores[i, j] is the score of the j + 1 tokens from i on, so that memory is bounded by the length of spans.
    """
    width = scores.shape[1]
    flat = np.where(inside[:, None] & following(inside, width), scores, -np.inf).ravel()
    best = top_indices(flat, count)
    best = best[flat[best] > -np.inf]
    first, offset = np.divmod(best, width)
    return list(zip(first.tolist(), (first + offset).tolist(), flat[best].tolist(), strict=True))
