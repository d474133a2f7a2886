from __future__ import annotations

import numpy as np
import pytest

from hasten.core.tensors import EXPANSION_MASK, Batch, FloatArray
from hasten.core.text.tokenizer import Tokenizer
from hasten.tasks import TASKS, LateInteraction, TaskSpec
from hasten.tasks._rankings import Query
from hasten.tasks.multi_vector_embedding import VECTORS, TokenRows, max_sim

TASK = TASKS.get("multi-vector-embedding")
SPEC = TaskSpec(TASK.name, similarity="maxsim")
QUERY = Query("q", ("a", "b", "c"), is_pair=False)
UNIT = np.eye(4, dtype=np.float32)
# A query of two tokens and documents of one to three, of which the first document token of the second is skipped.
LENGTHS = np.array([2, 1, 3, 2], np.int32)
VALUES = np.stack([UNIT[0], UNIT[1], UNIT[0], UNIT[1], UNIT[0], UNIT[1] / 2, UNIT[2], UNIT[3]])
SCORED = np.array([True, True, True, False, True, True, True, True])


def rows() -> TokenRows:
    return TokenRows(Batch({}, LENGTHS), np.zeros(4, np.int64), 1, (), (), (QUERY,), SCORED)


def agree(ours: FloatArray, encoded: TokenRows | None = None):
    return TASK.agree({VECTORS: ours}, {VECTORS: VALUES}, encoded or rows(), SPEC)


@pytest.mark.parametrize(("is_mean", "scale"), [(False, 1.0), (True, 0.5)])
def test_max_sim_sums_the_best_match_of_each_query_token(is_mean: bool, scale: float) -> None:
    documents = [UNIT[:1], UNIT[:2], UNIT[2:], UNIT[:0]]
    assert max_sim(UNIT[:2], documents, is_mean=is_mean).tolist() == [1 * scale, 2 * scale, 0, 0]


def test_skipped_tokens_are_neither_returned_nor_scored() -> None:
    encoded = rows()
    assert [len(vectors) for vectors in encoded.scored(VALUES)] == [2, 1, 2, 2]
    (ranking,) = TASK.decode({VECTORS: VALUES}, encoded, TASK.options(SPEC, {}))
    assert [(entry["corpus_id"], entry["score"]) for entry in ranking] == [(1, 1.5), (0, 1.0), (2, 0.0)]


def test_errors_of_skipped_tokens_do_not_count() -> None:
    ours = VALUES + np.where(SCORED, 0, 9)[:, None].astype(np.float32)
    agreement = agree(ours)
    assert (agreement.max_error, agreement.value) == (0.0, pytest.approx(1.0))


def test_changed_order_is_seen_where_the_cosine_is_high() -> None:
    ours = VALUES.copy()
    ours[5] *= -1  # another direction of one token lets another document win
    ours[2] *= 1.5
    agreement = agree(ours)
    assert agreement.measure.startswith("MaxSim")
    assert agreement.value < 0.9


def test_texts_without_queries_are_judged_by_the_scores_of_each_other() -> None:
    encoded = TokenRows(Batch({}, LENGTHS), np.arange(4), 4, (), (), ("a", "b", "c", "d"), SCORED)
    assert agree(VALUES, encoded).value == pytest.approx(1.0)
    assert agree(VALUES, encoded).rank_correlation == pytest.approx(1.0)
    assert agree(VALUES[::-1].copy(), encoded).value < 0.9


def test_vectors_that_are_not_finite_never_agree() -> None:
    ours = VALUES.copy()
    ours[6] = np.inf
    assert not agree(ours).is_finite


def test_relevance_is_judged_by_the_ranking() -> None:
    gold = [(0.0, 0.0, 1.0)]
    scores = TASK.item_scores({VECTORS: VALUES}, rows(), gold, SPEC)
    assert TASK.metric(scores, SPEC).value == pytest.approx(0.5)  # the relevant document is the last of three


@pytest.mark.parametrize(("length", "lengths"), [(0, [3, 3]), (2, [3, 3]), (6, [6, 3])])
def test_only_queries_are_filled_up(tokenizer: Tokenizer, length: int, lengths: list[int]) -> None:
    late = LateInteraction(expansion_length=length, expansion_id=7)
    options = TASK.options(TaskSpec(TASK.name, late_interaction=late), {})
    encoded = TASK.encode([Query("a", ("b",), is_pair=True)], tokenizer, options)
    assert encoded.batch.lengths.tolist() == lengths
    if length:
        assert encoded.batch.values[EXPANSION_MASK].sum() == lengths[0] - 3
        assert (encoded.batch.values["input_ids"][3 : lengths[0]] == 7).all()
