"""Group rows into batches."""

from __future__ import annotations

import numpy as np

from hasten.core.tensors import IntArray

# Large enough to keep a few cores busy, small enough that the activations of one batch stay in their caches.
TOKEN_BUDGET = 2048
# The padding that a row may get so that there are fewer batches: a share of the longest row, but always a few tokens,
# since each batch has a fixed cost.
MAX_PADDING = 0.05
FREE_PADDING = 12
# The most rows of a batch, unless the caller sets a limit.
MAX_ROWS = 64


def batch_in_order(rows: int, size: int) -> list[IntArray]:
    """Return batches of `size` consecutive rows, in order."""
    return [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]


def growing_chunks(items: int, first: int, largest: int) -> list[range]:
    """Split items into consecutive chunks: `first` items, then twice as many each time, up to `largest`."""
    chunks: list[range] = []
    start, size = 0, first
    while start < items:
        chunks.append(range(start, min(items, start + size)))
        start, size = start + size, min(largest, 2 * size)
    return chunks


def batch_by_length(lengths: IntArray, *, budget: int = TOKEN_BUDGET, max_rows: int = MAX_ROWS) -> list[IntArray]:
    """Group rows of similar length so that a padded batch has at most `budget` tokens, few of them padding.

    A row longer than the budget runs alone. The longest rows come first, so that memory peaks at once, not at the end.
    """
    if len(lengths) == 1:
        return [np.zeros(1, np.intp)]
    order = np.argsort(-lengths, kind="stable")
    descending = -lengths[order]
    groups: list[IntArray] = []
    start = 0
    while start < len(order):
        longest = max(1, int(lengths[order[start]]))
        min_length = longest - max(FREE_PADDING, int(MAX_PADDING * longest))
        similar = int(np.searchsorted(descending, -min_length, side="right")) - start
        count = max(1, min(max_rows, budget // longest, similar))
        groups.append(order[start : start + count])
        start += count
    return groups
