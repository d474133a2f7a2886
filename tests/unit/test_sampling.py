"""Tokens chosen from logits, against transformers' own processors and against their distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.errors import InputError
from hasten.core.generation import Sampling
from hasten.generation.options import sampling_of
from hasten.generation.rules import Rules, penalized
from hasten.generation.sampling import Chooser, candidates, largest

DRAWN = Sampling(temperature=1.0)


def their_logits(logits: np.ndarray, seen: Sequence[int], sampling: Sampling) -> np.ndarray:
    """In the order in which generate puts them together."""
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
    scores = them.LogitsProcessorList(steps)(torch.tensor([list(seen)]), torch.tensor(logits)[None])
    return torch.softmax(scores, -1)[0].numpy()


def our_probabilities(logits: np.ndarray, seen: Sequence[int], sampling: Sampling) -> np.ndarray:
    ids, weights = candidates(penalized(logits, seen, sampling.repetition_penalty), sampling)
    made = np.zeros(len(logits))
    made[ids] = weights / weights.sum()
    return made


@pytest.mark.parametrize("size", [7, 300, 5000])
@pytest.mark.parametrize(
    "asked",
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
def test_the_distribution_is_that_of_transformers(asked: dict[str, Any], size: int) -> None:
    sampling = sampling_of(DRAWN, asked)
    random = np.random.default_rng(size)
    for spread in (0.5, 3.0, 12.0):
        logits = (random.standard_normal(size) * spread).astype(np.float32)
        seen = random.integers(0, size, 5).tolist()
        expected = their_logits(logits, seen, sampling)
        found = our_probabilities(logits, seen, sampling)
        assert ((found > 0) == (expected > 0))[expected > 1e-30].all()
        assert np.count_nonzero(found[expected == 0] > 1e-30) == 0
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-9)


def test_of_tokens_that_tie_top_k_keeps_all() -> None:
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    sampling = sampling_of(DRAWN, {"top_k": 2})
    assert our_probabilities(logits, [], sampling).nonzero()[0].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(our_probabilities(logits, [], sampling), their_logits(logits, [0], sampling), rtol=1e-5)


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40),
    st.floats(0.05, 4),
    st.floats(0.01, 1),
    st.integers(0, 50),
    st.floats(0, 1),
)
def test_there_is_always_a_token(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=0)
    token = Chooser(sampling, ())(np.array(logits, np.float32))
    ids, weights = candidates(np.array(logits, np.float32), sampling)
    assert token in ids
    # The likeliest, or one that no weight tells from it.
    assert weights.max() == 1


@given(st.lists(st.integers(-30, 30), min_size=1, max_size=700), st.data())
def test_the_largest_are_found_in_runs(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    array = np.array(values, np.float32)
    least = sorted(values)[-count]
    assert largest(array, count).tolist() == [place for place, value in enumerate(values) if value >= least]


def test_tokens_outside_of_the_logits_are_not_penalized() -> None:
    logits = np.array([1.0, -1.0, 0.5], np.float32)
    assert penalized(logits, [0, 1, 99], 2.0).tolist() == [0.5, -2.0, 0.5]
    assert logits.tolist() == [1.0, -1.0, 0.5]


def test_greedy_takes_the_likeliest_and_turns_away_from_what_was_there() -> None:
    logits = np.array([0.1, 2.0, 1.5, 0.2], np.float32)
    assert [Chooser(Sampling(), ())(logits) for _ in range(3)] == [1, 1, 1]
    choose = Chooser(Sampling(repetition_penalty=2.0), ())
    assert [choose(logits) for _ in range(3)] == [1, 2, 1]


def test_a_seed_draws_the_same_tokens_again() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 100)).astype(np.float32)

    def drawn(seed: int | None) -> list[int]:
        choose = Chooser(Sampling(temperature=1.0, seed=seed), ())
        return [choose(row) for row in logits]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)


@pytest.mark.parametrize("asked", [{"temperature": 1e-50}, {"temperature": 1e-40}, {"temperature": 1.0, "top_p": 0.0}])
def test_as_good_as_none_is_the_likeliest(asked: dict[str, Any]) -> None:
    logits = np.array([1, 5, -3, 4], np.float32)
    assert Chooser(Sampling(seed=1, **asked), ())(logits) == 1


def test_what_is_too_large_or_too_small_for_logits_is_as_much_as_they_can_take() -> None:
    logits = np.array([1, 5, 0, -4], np.float32)
    assert sorted(candidates(logits, Sampling(temperature=1e300))[1]) == [1, 1, 1, 1]
    assert np.isfinite(penalized(logits, range(4), 1e300)).all()
    assert np.isfinite(penalized(logits, range(4), 1e-300)).all()


def test_rows_do_not_disturb_each_other() -> None:
    logits = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    sampling = Sampling(temperature=1.0, seed=5)
    alone = [choose(row) for choose in [Chooser(sampling, ())] for row in logits]
    first, second = Chooser(sampling, ()), Chooser(Sampling(temperature=1.0, seed=6), ())
    together = [(first(row), second(row)) for row in logits]
    assert [pair[0] for pair in together] == alone


@pytest.mark.parametrize("size", [10, 200])
@pytest.mark.parametrize("asked", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(asked: dict[str, Any], size: int) -> None:
    from scipy.stats import chisquare

    logits = np.random.default_rng(size).uniform(-1.5, 1.5, size).astype(np.float32)
    sampling = sampling_of(DRAWN, {**asked, "seed": 11, "temperature": 0.9})
    choose = Chooser(sampling, ())
    count = 20_000
    seen = np.bincount([choose(logits) for _ in range(count)], minlength=len(logits))
    expected = their_logits(logits, [0], sampling).astype(np.float64)
    expected *= count / expected.sum()
    assert not seen[expected == 0].any()
    # A right sampler fails once in a thousand seeds, and the seed is fixed.
    assert chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 0.001


@pytest.mark.parametrize(
    ("asked", "complaint"),
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
        ({"beams": 0}, "beams is 0"),
        ({"length_penalty": float("inf")}, "length_penalty is inf"),
        ({"length_penalty": 1e300}, "length_penalty is 1e+300; it must be a number from -20 to 20"),
        ({"stop": ""}, "none of them empty"),
        ({"stop": ["a", 1]}, "a list of texts"),
        ({"stop": 3}, "stop is 3"),
        ({"beams": 2, "temperature": 0.5}, "2 beams look for the likeliest text, and temperature 0.5 draws one"),
        ({"max_new_tokens": 3}, "here it is max_tokens"),
        ({"temprature": 3}, "did you mean 'temperature'"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_is_said(asked: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=r".") as caught:
        sampling_of(Sampling(), asked)
    assert complaint in str(caught.value)


def test_what_is_not_asked_for_is_the_models_own() -> None:
    defaults = Sampling(max_tokens=7, temperature=0.6, top_p=0.9)
    assert sampling_of(defaults, {"top_p": 0.5, "seed": None, "stop": "\n"}) == Sampling(
        max_tokens=7, temperature=0.6, top_p=0.5, stop=("\n",)
    )
    assert sampling_of(defaults, {"beams": 3}).temperature == 0
    assert sampling_of(Sampling(beams=4), {"temperature": 0.5}).beams == 1
    assert sampling_of(Sampling(beams=4), {"temperature": 0}).beams == 4
    assert sampling_of(Sampling(temperature=1.0, beams=4), {}).beams == 1


@given(
    before=st.lists(st.integers(0, 7), max_size=12),
    written=st.lists(st.integers(0, 7), max_size=12),
    size=st.integers(1, 4),
    words=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4),
    least=st.integers(1, 14),
)
def test_what_may_not_come_is_what_transformers_forbids(
    before: list[int], written: list[int], size: int, words: list[list[int]], least: int
) -> None:
    import torch
    from transformers import generation as them

    before = before or [0]  # generate never begins with nothing
    sampling = Sampling(
        no_repeat_ngram_size=size, bad_words_ids=tuple(map(tuple, words)), min_tokens=least, repetition_penalty=1.3
    )
    logits = np.random.default_rng(0).standard_normal(10).astype(np.float32)
    ends = torch.tensor([8, 9])
    steps = them.LogitsProcessorList(
        [
            them.RepetitionPenaltyLogitsProcessor(1.3),
            them.NoRepeatNGramLogitsProcessor(size),
            them.NoBadWordsLogitsProcessor(words),
            them.MinNewTokensLengthLogitsProcessor(len(before), least, ends),
        ]
    )
    expected = steps(torch.tensor([before + written]), torch.tensor(logits)[None])[0].numpy()
    np.testing.assert_allclose(Rules(sampling, before, (8, 9))(logits, written), expected, rtol=1e-6)


def test_logits_are_left_alone() -> None:
    logits = np.zeros(4, np.float32)
    assert Rules(Sampling(), (1, 2), (3,))(logits, (1,)) is logits
    Rules(Sampling(min_tokens=2), (), (3,))(logits, ())
    assert logits.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"bad_words_ids": [1]}, "bad_words_ids is .1.; it must be a list of lists of token ids"),
        ({"bad_words_ids": [[]]}, "a list of lists"),
        ({"early_stopping": "never"}, "early_stopping is 'never'; it must be true or false"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_new_tokens": 3}, "there is no option 'min_new_tokens'"),
    ],
)
def test_rules_that_are_none(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        sampling_of(Sampling(), asked)
