"""The gate for models that write, on decoders that go by a table: which words it lets pass, and what may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import PlanError
from hasten.core.generation import TEXT2TEXT_GENERATION, TEXT_GENERATION
from hasten.core.plan import Gate
from hasten.core.progress import Silent
from hasten.core.report import Verdict
from hasten.core.variant import Precision
from hasten.measure.writing import Answered, Read, Sample, check_gate, judge_decoder, likelihood, log_likelihoods

VOCABULARY, TOKENS = 50, 12
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
TEXTS = [np.random.default_rng(seed).integers(0, VOCABULARY, 20) for seed in range(5)]


class Bigrams:
    """What follows a token is a row of a table, whatever came before it. Fulfils `Decoder`."""

    slots = 2

    def __init__(self, table: Any) -> None:
        self.table = table
        self.taken: set[int] = set()

    def begin(self, slot: int, ids: Any) -> Any:
        assert slot not in self.taken
        self.taken.add(slot)
        return self.table[ids[-1]]

    def step(self, slots: Sequence[int], ids: Any) -> Any:
        assert self.taken >= set(slots)
        return self.table[ids]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError

    def end(self, slot: int) -> None:
        self.taken.remove(slot)

    def close(self) -> None:
        pass


def answered(start: int, kept: int = TOKENS) -> Answered:
    tokens = [start]
    for _ in range(TOKENS):
        tokens.append(int(TABLE[tokens[-1]].argmax()))
    return Answered(np.array([start]), np.array(tokens[1:]), TABLE[tokens[:-1]][:kept])


def sample(kept: int = TOKENS) -> Sample:
    likely = likelihood([log_likelihoods(TABLE[text[:-1]], text[1:]) for text in TEXTS])
    return Sample(tuple(answered(start, kept) for start in (1, 2, 3)), tuple(map(Read.of, TEXTS)), likely)


def judged(table: Any, precision: Precision = Precision.INT8, kept: int = TOKENS, **gate: float) -> Verdict:
    return judge_decoder(Bigrams(table), "a variant", precision, sample(kept), Gate(**gate), Silent())  # type: ignore[arg-type]


def test_the_original_is_like_itself() -> None:
    verdict = judged(TABLE, Precision.FP32)
    assert (verdict.passed, verdict.agreement.value, verdict.drop) == (True, 1.0, 0.0)
    assert verdict.agreement.rows == 3 * TOKENS
    assert verdict.metric is not None
    assert verdict.metric.rows == len(TEXTS)
    assert verdict.metric.also["perplexity"] == pytest.approx(1 / verdict.metric.value)


def test_texts_that_are_less_likely_count_where_they_are_asked_about() -> None:
    """Half as sure of every word, it chooses the same ones and finds texts that are not its own likelier."""
    flat, sure = judged(TABLE / 2), judged(TABLE * 2)
    assert flat.agreement.flips == sure.agreement.flips == 0
    assert flat.drop is not None
    assert sure.drop is not None
    assert flat.drop < 0 < sure.drop
    assert sure.passed
    assert judged(TABLE * 2, max_drop=sure.drop + 0.01).passed
    assert judged(TABLE / 2, max_drop=0.0).passed
    refused = judged(TABLE * 2, max_drop=sure.drop - 0.01)
    assert (refused.passed, refused.reason.startswith("likelihood per token drop")) == (False, True)


@pytest.mark.parametrize("kept", [1, 2])
def test_logits_are_compared_as_far_as_they_are_kept(kept: int) -> None:
    """The words of an answer are all compared, whatever is kept beside them."""
    place = int(answered(1).tokens[1])
    table = TABLE.copy()
    table[place] += 0.5  # what comes third
    assert judged(table, Precision.FP32, kept).agreement.max_error == 0.0
    assert judged(table, Precision.FP32).reason.startswith("largest error 5.0e-01 >")
    table[place] = -TABLE[place]
    verdict = judged(table, Precision.FP32, kept)
    assert (verdict.passed, verdict.reason.endswith("in fp32 each must be")) == (False, True)


def test_numbers_that_are_none_are_refused_wherever_they_come() -> None:
    table = TABLE.copy()
    table[int(answered(2).tokens[-2])] = np.nan
    verdict = judged(table, kept=1)
    assert (verdict.passed, verdict.agreement.is_finite, verdict.metric) == (False, False, None)


def test_what_cannot_be_judged_by() -> None:
    check_gate(Gate(0.9, 1.0, "likelihood"), TEXT_GENERATION)
    check_gate(Gate(0.9), TEXT2TEXT_GENERATION)
    with pytest.raises(PlanError, match="perplexity, its inverse, grows"):
        check_gate(Gate(metric="Perplexity"), TEXT_GENERATION)
    with pytest.raises(PlanError, match="there is no metric 'accuracy' here"):
        check_gate(Gate(metric="accuracy"), TEXT_GENERATION)
    with pytest.raises(PlanError, match="--max-drop goes by how likely texts are, and text2text-generation reads none"):
        check_gate(Gate(max_drop=1.0), TEXT2TEXT_GENERATION)
