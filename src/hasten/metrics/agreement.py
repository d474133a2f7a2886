"""Compare outputs with the reference. `owners` is the item that each row of the outputs belongs to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hasten.core.report import Agreement
from hasten.core.tensors import BoolArray, FloatArray, IntArray
from hasten.metrics.statistics import relative_error, row_cosines

_MAX_WORST_ITEMS = 3
# Added to the error of a flipped answer, which ranks worse than any error that flips none.
_FLIP_ERROR = 1e6


def find_non_finite(measure: str, ours: FloatArray, theirs: FloatArray, owners: IntArray) -> Agreement | None:
    """Return the agreement of outputs that are not all finite: errors of the finite rows, and the broken items."""
    broken = ~np.isfinite(ours).all(axis=1)
    if not broken.any():
        return None
    error = np.abs(ours[~broken] - theirs[~broken])
    return Agreement(
        measure=measure,
        value=0.0,
        rows=len(ours),
        max_error=float(error.max(initial=0.0)),
        relative_error=relative_error(ours[~broken], theirs[~broken]),
        scale=float(np.abs(theirs).max()),
        is_finite=False,
        worst=_first_distinct(owners[broken]),
    )


def compare(
    measure: str,
    ours: FloatArray,
    theirs: FloatArray,
    owners: IntArray,
    *,
    value: float,
    flipped: BoolArray | None = None,
    flips: int | None = None,
    cosines: FloatArray | None = None,
    rank_correlation: float | None = None,
    top_k_overlap: float | None = None,
) -> Agreement:
    """Return the agreement of finite outputs, with their errors; `flipped` are the rows whose answer differs."""
    difference = ours - theirs
    # In place: the logits of a vocabulary are too large for another copy.
    error = np.abs(difference, out=difference).reshape(len(ours), -1).max(axis=1).astype(np.float64)
    rank = error if flipped is None else error + flipped * _FLIP_ERROR
    del difference
    return Agreement(
        measure=measure,
        value=value,
        rows=len(ours),
        max_error=float(error.max()),
        relative_error=relative_error(ours, theirs),
        scale=float(np.abs(theirs).max()),
        flips=flips,
        cosine_mean=None if cosines is None else float(cosines.mean()),
        cosine_min=None if cosines is None else float(cosines.min()),
        rank_correlation=rank_correlation,
        top_k_overlap=top_k_overlap,
        worst=_first_distinct(owners[np.argsort(-rank, kind="stable")]),
    )


def compare_vectors(ours: FloatArray, theirs: FloatArray, owners: IntArray) -> Agreement:
    """Return the agreement of vectors by their cosines, finite or not."""
    if (non_finite := find_non_finite("mean cosine", ours, theirs, owners)) is not None:
        return non_finite
    cosines = row_cosines(ours, theirs)
    agreement = compare("mean cosine", ours, theirs, owners, value=float(cosines.mean()), cosines=cosines)
    return replace(agreement, worst=_first_distinct(owners[np.argsort(cosines, kind="stable")]))


def _first_distinct(items: IntArray) -> tuple[int, ...]:
    return tuple(dict.fromkeys(items.tolist()))[:_MAX_WORST_ITEMS]
