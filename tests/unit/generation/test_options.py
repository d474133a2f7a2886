"""Bounds of a server on the options of a request, and the cost of what they allow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import InputError
from hasten.core.generation_types import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_NO_REPEAT_NGRAM_SIZE,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from hasten.generation.options import check_bounds
from hasten.generation.sampling import Sampler

LARGEST: dict[str, Any] = {
    "stop": ("x" * MAX_STOP_CHARACTERS,) * MAX_STOP_STRINGS,
    "bad_words_ids": ((3,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS,
    "no_repeat_ngram_size": MAX_NO_REPEAT_NGRAM_SIZE,
}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1), "stop has 17 texts, and this server accepts up to 16"),
        ("stop", ("x" * (MAX_STOP_CHARACTERS + 1),), "stop has 129 characters in a text"),
        ("bad_words_ids", ((3,),) * (MAX_BAD_WORDS + 1), "bad_words_ids has 1025 words"),
        ("bad_words_ids", ((3,) * (MAX_BAD_WORD_TOKENS + 1),), "bad_words_ids has 33 tokens in a word"),
        ("no_repeat_ngram_size", MAX_NO_REPEAT_NGRAM_SIZE + 1, "no_repeat_ngram_size is 33, and this server"),
    ],
)
def test_options_beyond_the_bounds_are_rejected_unless_they_are_the_models_own(
    option: str, value: Any, message: str
) -> None:
    sampling = replace(SamplingParams(), **{option: value})
    with pytest.raises(InputError, match=message):
        check_bounds(sampling, {option})
    check_bounds(sampling, {"temperature"})
    check_bounds(replace(SamplingParams(), **LARGEST), LARGEST)


def test_largest_options_cost_little_per_step() -> None:
    """A few milliseconds of CPU time at most on any machine; it was ten times as long."""
    random = np.random.default_rng(0)
    logits = random.standard_normal(49_152).astype(np.float32)
    words = tuple((7,) * (MAX_BAD_WORD_TOKENS - 2) + (3, int(token)) for token in range(MAX_BAD_WORDS))
    sampling = SamplingParams(
        repetition_penalty=1.3, no_repeat_ngram_size=MAX_NO_REPEAT_NGRAM_SIZE, bad_words_ids=words, min_tokens=2000
    )
    sampler = Sampler(sampling, random.integers(0, 49_152, 32_000).tolist(), (2,))
    seconds = []
    for _ in range(20):
        begin = time.thread_time()
        sampler(logits)
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 0.004
