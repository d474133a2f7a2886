"""Sampling compared with transformers' logits processors, and with the expected distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.errors import InputError
from hasten.core.generation_types import SamplingParams
from hasten.generation.logits import LogitsProcessor, apply_repetition_penalty
from hasten.generation.options import sampling_params
from hasten.generation.sampling import Sampler, candidates, largest

DRAWN = SamplingParams(temperature=1.0)


def their_logits(logits: np.ndarray, counts: Sequence[int], sampling: SamplingParams) -> np.ndarray:
    """Apply transformers' processors in the order of `generate`."""
    import torch
    from transformers import generation as them

    steps: list[Any] = [them.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    steps.append(them.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(them.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(them.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(them.MinPLogitsWarper(sampling.min_p))
    scores = them.LogitsProcessorList(steps)(torch.tensor([list(counts)]), torch.tensor(logits)[None])
    return torch.softmax(scores, -1)[0].numpy()


def our_probabilities(logits: np.ndarray, counts: Sequence[int], sampling: SamplingParams) -> np.ndarray:
    ids, weights = candidates(
        apply_repetition_penalty(logits, np.array(list(counts), np.int64), sampling.repetition_penalty), sampling
    )
    mask = np.zeros(len(logits))
    mask[ids] = weights / weights.sum()
    return mask


@pytest.mark.parametrize("size", [7, 300, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 10**6},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 3.0, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_distribution_matches_transformers(options: dict[str, Any], size: int) -> None:
    sampling = sampling_params(DRAWN, options)
    random = np.random.default_rng(size)
    for spread in (0.5, 3.0, 12.0):
        logits = (random.standard_normal(size) * spread).astype(np.float32)
        counts = random.integers(0, size, 5).tolist()
        expected = their_logits(logits, counts, sampling)
        result = our_probabilities(logits, counts, sampling)
        assert ((result > 0) == (expected > 0))[expected > 1e-30].all()
        assert np.count_nonzero(result[expected == 0] > 1e-30) == 0
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-9)


def test_top_k_keeps_all_ties() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    sampling = sampling_params(DRAWN, {"top_k": 2})
    assert our_probabilities(logits, [], sampling).nonzero()[0].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(our_probabilities(logits, [], sampling), their_logits(logits, [0], sampling), rtol=1e-5)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.floats(0.05, 4),
    st.floats(0.01, 1),
    st.integers(0, 50),
    st.floats(0, 1),
)
def test_candidates_are_never_empty(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=0)
    token = Sampler(sampling, ())(np.array(logits, np.float32))
    ids, weights = candidates(np.array(logits, np.float32), sampling)
    assert token in ids
    # The most likely token, or one with the same weight.
    assert weights.max() == 1


@given(st.lists(st.integers(-30, 30), min_size=1, max_size=700), st.data())
def test_largest_matches_a_full_sort(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    array = np.array(values, np.float32)
    threshold = sorted(values)[-count]
    assert largest(array, count).tolist() == [index for index, value in enumerate(values) if value >= threshold]


def test_penalty_ignores_tokens_outside_the_logits() -> None:
    logits = np.array([1.0, -1.0, 0.5], np.float32)
    assert apply_repetition_penalty(logits, np.array([0, 1, 99]), 2.0).tolist() == [0.5, -2.0, 0.5]
    assert logits.tolist() == [1.0, -1.0, 0.5]


def test_greedy_takes_the_most_likely_token_after_the_penalty() -> None:
    logits = np.array([0.1, 2.0, 1.5, 0.2], np.float32)
    assert [Sampler(SamplingParams(), ())(logits) for _ in range(3)] == [1, 1, 1]
    choose = Sampler(SamplingParams(repetition_penalty=2.0), ())
    assert [choose(logits) for _ in range(3)] == [1, 2, 1]


def test_seed_reproduces_the_tokens() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 100)).astype(np.float32)

    def drawn(seed: int | None) -> list[int]:
        choose = Sampler(SamplingParams(temperature=1.0, seed=seed), ())
        return [choose(row) for row in logits]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-50}, {"temperature": 1e-40}, {"temperature": 1.0, "top_p": 0.0}]
)
def test_tiny_temperature_is_greedy(options: dict[str, Any]) -> None:
    logits = np.array([1, 5, -3, 4], np.float32)
    assert Sampler(SamplingParams(seed=1, **options), ())(logits) == 1


def test_extreme_factors_are_clamped() -> None:
    logits = np.array([1, 5, 0, -4], np.float32)
    assert sorted(candidates(logits, SamplingParams(temperature=1e300))[1]) == [1, 1, 1, 1]
    assert np.isfinite(apply_repetition_penalty(logits, np.arange(4), 1e300)).all()
    assert np.isfinite(apply_repetition_penalty(logits, np.arange(4), 1e-300)).all()


def test_samplers_are_independent() -> None:
    logits = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    sampling = SamplingParams(temperature=1.0, seed=5)
    alone = [choose(row) for choose in [Sampler(sampling, ())] for row in logits]
    first, second = Sampler(sampling, ()), Sampler(SamplingParams(temperature=1.0, seed=6), ())
    together = [(first(row), second(row)) for row in logits]
    assert [pair[0] for pair in together] == alone


@pytest.mark.parametrize("size", [10, 200])
@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_token_frequencies_match_probabilities(options: dict[str, Any], size: int) -> None:
    from scipy.stats import chisquare

    logits = np.random.default_rng(size).uniform(-1.5, 1.5, size).astype(np.float32)
    sampling = sampling_params(DRAWN, {**options, "seed": 11, "temperature": 0.9})
    choose = Sampler(sampling, ())
    count = 20_000
    counts = np.bincount([choose(logits) for _ in range(count)], minlength=len(logits))
    expected = their_logits(logits, [0], sampling).astype(np.float64)
    expected *= count / expected.sum()
    assert not counts[expected == 0].any()
    # A right sampler fails once in a thousand seeds, and the seed is fixed.
    assert chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 0.001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be a number, 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"top_p": -0.1}, "top_p is -0.1; it must be a number from 0 to 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1; it must be a whole number, at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number, at least 1"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"seed": -3}, "seed is -3"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"length_penalty": float("inf")}, "length_penalty is inf"),
        ({"length_penalty": 1e300}, "length_penalty is 1e+300; it must be a number from -20 to 20"),
        ({"stop": ""}, "none of them empty"),
        ({"stop": ["a", 1]}, "a list of texts"),
        ({"stop": 3}, "stop is 3"),
        ({"num_beams": 2, "temperature": 0.5}, "2 beams with temperature 0.5 are not supported"),
        ({"max_new_tokens": 3}, "use max_tokens"),
        ({"temprature": 3}, "did you mean 'temperature'"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=r".") as caught:
        sampling_params(SamplingParams(), options)
    assert message in str(caught.value)


def test_options_default_to_the_model() -> None:
    defaults = SamplingParams(max_tokens=7, temperature=0.6, top_p=0.9)
    assert sampling_params(defaults, {"top_p": 0.5, "seed": None, "stop": "\n"}) == SamplingParams(
        max_tokens=7, temperature=0.6, top_p=0.5, stop=("\n",)
    )
    assert sampling_params(defaults, {"num_beams": 3}).temperature == 0
    assert sampling_params(SamplingParams(num_beams=4), {"temperature": 0.5}).num_beams == 1
    assert sampling_params(SamplingParams(num_beams=4), {"temperature": 0}).num_beams == 4
    assert sampling_params(SamplingParams(temperature=1.0, num_beams=4), {}).num_beams == 1


@given(
    before=st.lists(st.integers(0, 7), max_size=12),
    written=st.lists(st.integers(0, 7), max_size=12),
    size=st.integers(1, 4),
    words=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4),
    threshold=st.integers(1, 14),
)
def test_banned_tokens_match_transformers(
    before: list[int], written: list[int], size: int, words: list[list[int]], threshold: int
) -> None:
    import torch
    from transformers import generation as them

    before = before or [0]  # generate never begins with nothing
    sampling = SamplingParams(
        no_repeat_ngram_size=size, bad_words_ids=tuple(map(tuple, words)), min_tokens=threshold, repetition_penalty=1.3
    )
    logits = np.random.default_rng(0).standard_normal(10).astype(np.float32)
    ends = torch.tensor([8, 9])
    steps = them.LogitsProcessorList(
        [
            them.RepetitionPenaltyLogitsProcessor(1.3),
            them.NoRepeatNGramLogitsProcessor(size),
            them.NoBadWordsLogitsProcessor(words),
            them.MinNewTokensLengthLogitsProcessor(len(before), threshold, ends),
        ]
    )
    expected = steps(torch.tensor([before + written]), torch.tensor(logits)[None])[0].numpy()
    np.testing.assert_allclose(LogitsProcessor(sampling, before, (8, 9))(logits, written), expected, rtol=1e-6)


def test_logits_are_not_modified() -> None:
    logits = np.zeros(4, np.float32)
    assert LogitsProcessor(SamplingParams(), (1, 2), (3,))(logits, (1,)) is logits
    LogitsProcessor(SamplingParams(min_tokens=2), (), (3,))(logits, ())
    assert logits.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bad_words_ids": [1]}, "bad_words_ids is .1.; it must be a list of lists of token ids"),
        ({"bad_words_ids": [[]]}, "a list of lists"),
        ({"early_stopping": "never"}, "early_stopping is 'never'; it must be true or false"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_new_tokens": 3}, "unknown option 'min_new_tokens'"),
    ],
)
def test_invalid_logits_options_are_rejected(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        sampling_params(SamplingParams(), options)
