"""Which rows run together."""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import IntArray

# Big enough to keep a few cores busy, small enough that the activations of one batch stay in their caches.
TOKEN_BUDGET = 2048
# Padding that a batch may add for the sake of fewer batches: a share of its tokens, and a few in any case, since a
# batch has a cost of its own.
MOST_PADDING = 0.05
FREE_PADDING = 12


def in_order(rows: int, size: int) -> list[IntArray]:
    """So many at a time, as they come."""
    return [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]


def by_length(lengths: IntArray, *, budget: int = TOKEN_BUDGET, max_rows: int = 64) -> list[IntArray]:
    """Group rows of similar length so that a padded batch costs at most `budget` positions, few of them padding.

    A row longer than the budget runs alone. The longest come first: memory peaks at once, not at the end.
    """
    order = np.argsort(-lengths, kind="stable")
    falling = -lengths[order]
    groups: list[IntArray] = []
    start = 0
    while start < len(order):
        widest = max(1, int(lengths[order[start]]))
        shortest = widest - max(FREE_PADDING, int(MOST_PADDING * widest))
        near = int(np.searchsorted(falling, -shortest, side="right")) - start
        count = max(1, min(max_rows, budget // widest, near))
        groups.append(order[start : start + count])
        start += count
    return groups
