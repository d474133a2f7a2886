"""How right answers are, as those define it whom people cite: scikit-learn for labels, seqeval for entities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hasten.core.entities import spans
from hasten.core.tensors import IntArray

# One label's number a row, or a row of truth values with a column a label where several may be right.
Labels: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class EntityScores:
    f1: float
    precision: float
    recall: float


def accuracy(wanted: Labels, found: Labels) -> float:
    return float((wanted == found).mean())


def macro_f1(wanted: Labels, found: Labels) -> float:
    """The mean of every label's F1. Numbers count where they occur at all; columns always, as 0 where they do not."""
    hits, total = _counts(wanted, found)
    return float((2 * hits / np.maximum(total, 1)).mean())


def micro_f1(wanted: Labels, found: Labels) -> float:
    """F1 over all labels together; 0 where there is nothing to find and nothing found."""
    hits, total = _counts(wanted, found)
    return float(2 * hits.sum() / max(1, total.sum()))


def entity_scores(wanted: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> EntityScores:
    """An entity is right where its type and both its ends are. What cannot be told for want of entities is 0."""
    right = answered = asked = 0
    for tags, answer in zip(wanted, found, strict=True):
        theirs, ours = spans(tags), spans(answer)
        right, answered, asked = right + len(ours & theirs), answered + len(ours), asked + len(theirs)
    return EntityScores(2 * right / max(1, answered + asked), right / max(1, answered), right / max(1, asked))


def _counts(wanted: Labels, found: Labels) -> tuple[IntArray, IntArray]:
    """For every label: how often it was found rightly, and how often it was wanted or found, added up."""
    if wanted.ndim == 2:
        return (wanted & found).sum(axis=0), wanted.sum(axis=0) + found.sum(axis=0)
    size = int(max(wanted.max(), found.max())) + 1
    total = np.bincount(wanted, minlength=size) + np.bincount(found, minlength=size)
    hits = np.bincount(wanted[wanted == found], minlength=size)
    return hits[total > 0], total[total > 0]
