"""The accuracy gate of text generation, on decoders that follow a table of bigrams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import PlanError
from hasten.core.generation_types import TEXT2TEXT_GENERATION, TEXT_GENERATION
from hasten.core.plan import Gate
from hasten.core.progress import SilentProgress
from hasten.core.report import Verdict
from hasten.core.variant import Precision
from hasten.measure.generation_gate import (
    GenerationReference,
    GreedyReference,
    ScoredText,
    check_gate,
    judge_decoder,
    likelihood,
    log_likelihoods,
)

VOCABULARY, TOKENS = 50, 12
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
TEXTS = [np.random.default_rng(seed).integers(0, VOCABULARY, 20) for seed in range(5)]


class Bigrams:
    """A `Decoder` whose logits depend on the last token alone."""

    slots = 2

    def __init__(self, table: Any) -> None:
        self.table = table
        self.taken: set[int] = set()

    def prefill(self, slot: int, ids: Any) -> Any:
        assert slot not in self.taken
        self.taken.add(slot)
        return self.table[ids[-1]]

    def decode(self, slots: Sequence[int], ids: Any) -> Any:
        assert self.taken >= set(slots)
        return self.table[ids]

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError

    def free(self, slot: int) -> None:
        self.taken.remove(slot)

    def close(self) -> None:
        pass


def answered(start: int, stored_logits: int = TOKENS) -> GreedyReference:
    tokens = [start]
    for _ in range(TOKENS):
        tokens.append(int(TABLE[tokens[-1]].argmax()))
    return GreedyReference(np.array([start]), np.array(tokens[1:]), TABLE[tokens[:-1]][:stored_logits])


def sample(stored_logits: int = TOKENS) -> GenerationReference:
    likely = likelihood([log_likelihoods(TABLE[text[:-1]], text[1:]) for text in TEXTS])
    return GenerationReference(
        tuple(answered(start, stored_logits) for start in (1, 2, 3)), tuple(map(ScoredText.of, TEXTS)), likely
    )


def judged(table: Any, precision: Precision = Precision.INT8, stored_logits: int = TOKENS, **gate: float) -> Verdict:
    return judge_decoder(Bigrams(table), "a variant", precision, sample(stored_logits), Gate(**gate), SilentProgress())  # type: ignore[arg-type]


def test_reference_passes_against_itself() -> None:
    verdict = judged(TABLE, Precision.FP32)
    assert (verdict.passed, verdict.agreement.value, verdict.drop) == (True, 1.0, 0.0)
    assert verdict.agreement.rows == 3 * TOKENS
    assert verdict.metric is not None
    assert verdict.metric.rows == len(TEXTS)
    assert verdict.metric.other_metrics["perplexity"] == pytest.approx(1 / verdict.metric.value)


def test_max_drop_bounds_the_likelihood_of_texts() -> None:
    """With halved logits the decoder chooses the same tokens, and other texts become more likely."""
    flat, sure = judged(TABLE / 2), judged(TABLE * 2)
    assert flat.agreement.flips == sure.agreement.flips == 0
    assert flat.drop is not None
    assert sure.drop is not None
    assert flat.drop < 0 < sure.drop
    assert sure.passed
    assert judged(TABLE * 2, max_drop=sure.drop + 0.01).passed
    assert judged(TABLE / 2, max_drop=0.0).passed
    rejected = judged(TABLE * 2, max_drop=sure.drop - 0.01)
    assert (rejected.passed, rejected.reason.startswith("likelihood per token drop")) == (False, True)


@pytest.mark.parametrize("stored_logits", [1, 2])
def test_stored_logits_are_compared(stored_logits: int) -> None:
    """All tokens of an answer are compared, however many logits are stored."""
    index = int(answered(1).tokens[1])
    table = TABLE.copy()
    table[index] += 0.5  # what comes third
    assert judged(table, Precision.FP32, stored_logits).agreement.max_error == 0.0
    assert judged(table, Precision.FP32).reason.startswith("largest error 5.0e-01 >")
    table[index] = -TABLE[index]
    verdict = judged(table, Precision.FP32, stored_logits)
    assert (verdict.passed, verdict.reason.endswith("< 1 for fp32")) == (False, True)


def test_non_finite_logits_are_rejected_at_any_position() -> None:
    table = TABLE.copy()
    table[int(answered(2).tokens[-2])] = np.nan
    verdict = judged(table, stored_logits=1)
    assert (verdict.passed, verdict.agreement.is_finite, verdict.metric) == (False, False, None)


def test_check_gate_rejects_unsupported_metrics() -> None:
    check_gate(Gate(0.9, 1.0, "likelihood"), TEXT_GENERATION)
    check_gate(Gate(0.9), TEXT2TEXT_GENERATION)
    with pytest.raises(PlanError, match="perplexity, its inverse, grows"):
        check_gate(Gate(metric="Perplexity"), TEXT_GENERATION)
    with pytest.raises(PlanError, match="there is no metric 'accuracy' here"):
        check_gate(Gate(metric="accuracy"), TEXT_GENERATION)
    with pytest.raises(
        PlanError, match="--max-drop bounds the likelihood of texts, which text2text-generation does not"
    ):
        check_gate(Gate(max_drop=1.0), TEXT2TEXT_GENERATION)
