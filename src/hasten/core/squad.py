"""How right an answer to a question is: exact match and F1 as SQuAD 2.0's official script has them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

# An answer and a right one to a number from 0 to 1.
Measure: TypeAlias = Callable[[str, str], float]

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact(answer: str, right: str) -> float:
    return float(normalize(answer) == normalize(right))


def f1(answer: str, right: str) -> float:
    """Of the words they share; where one of them is no answer, whether both are."""
    ours, theirs = normalize(answer).split(), normalize(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs))


def best(measure: Measure, answer: str, rights: Sequence[str]) -> float:
    """Against the right answer that comes closest; where there is none, the right one is to give none.

    A right answer that is nothing but articles and punctuation does not count as one.
    """
    return max(measure(answer, right) for right in [right for right in rights if normalize(right)] or [""])
