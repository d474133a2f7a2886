"""Hypothesis strategies for unusual texts: words and symbols of all kinds, in any order."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_WORDS = (
    "the",
    "cat",
    "rain",
    "Friday",
    ",",
    "🐈",
    "👩‍👩‍👧",
    "e\u0301",
    "東京",
    "हिन्दी",
    "\x07",
    "\n",
    "don't",
    "[MASK]",
    "q" * 30,
)
_ODD = st.text(st.characters(codec="utf-8"), max_size=12)

texts = (
    st.lists(st.sampled_from(_WORDS) | _ODD, min_size=1, max_size=25)
    .map(" ".join)
    .filter(lambda text: bool(text.strip()))
)
batches = st.lists(texts, min_size=10, max_size=10, unique=True)

# Derandomized, so that failures are reproducible. Some texts occur in several batches.
two_hundred = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
