"""Exact match and F1 of answers, as SQuAD 2.0's official script computes them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

# Compares an answer with a reference answer; from 0 to 1.
Measure: TypeAlias = Callable[[str, str], float]

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact(answer: str, expected: str) -> float:
    """Return 1 if the answers are equal after normalization, else 0."""
    return float(normalize(answer) == normalize(expected))


def f1(answer: str, expected: str) -> float:
    """Return F1 over shared words; if either answer is empty, 1 if both are, else 0."""
    ours, theirs = normalize(answer).split(), normalize(expected).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def best(measure: Measure, answer: str, references: Sequence[str]) -> float:
    """Return the score against the closest reference; without references the expected answer is empty.

    References of nothing but articles and punctuation are ignored.
    """
    return max(measure(answer, expected) for expected in [text for text in references if normalize(text)] or [""])
