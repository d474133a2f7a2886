from __future__ import annotations

import numpy as np
import pytest

from hasten.core.tensors import BATCH, Batch, DType, FloatArray, Signature, TensorSpec
from hasten.tasks import TASKS, Encoded, TaskSpec
from hasten.tasks.sparse_embedding import WEIGHTS, keep_largest, to_sparse

TASK = TASKS.get("sparse-embedding")
SPEC = TaskSpec(TASK.name)
ROWS = np.array([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.5, 0.25, 0.0]], np.float32)


def encoded(rows: int) -> Encoded:
    return Encoded(Batch({}, np.ones(rows, np.int32)), np.arange(rows), rows, (), ())


def agree(ours: FloatArray, theirs: FloatArray = ROWS, spec: TaskSpec = SPEC):
    return TASK.agree({WEIGHTS: ours}, {WEIGHTS: theirs}, encoded(len(theirs)), spec)


def test_terms_are_split_by_row() -> None:
    vectors = to_sparse(ROWS)
    assert [vector["indices"].tolist() for vector in vectors] == [[1, 3], [], [0, 1, 2]]
    assert [vector["values"].tolist() for vector in vectors] == [[2, 1], [], [3, 0.5, 0.25]]
    assert all(vector["values"].dtype == np.float32 for vector in vectors)


@pytest.mark.parametrize(("count", "kept"), [(None, 5), (4, 5), (2, 4), (1, 2)])
def test_only_the_largest_weights_are_kept(count: int | None, kept: int) -> None:
    pruned = keep_largest(ROWS, count)
    assert np.count_nonzero(pruned) == kept
    np.testing.assert_array_equal(pruned[pruned > 0], ROWS[pruned > 0])
    np.testing.assert_array_equal(pruned.max(axis=1), ROWS.max(axis=1))


def test_equal_weights_agree() -> None:
    agreement = agree(ROWS)
    assert (agreement.value, agreement.max_error, agreement.top_k_overlap) == (pytest.approx(1.0), 0.0, 1.0)


def test_lost_terms_are_seen_where_the_cosine_is_high() -> None:
    """A vector may point the same way without terms by which an index would find it."""
    theirs = np.full((2, 4000), 0.01, np.float32)
    theirs[:, :2] = 50.0
    ours = np.where(theirs > 1, theirs, 0)
    agreement = agree(ours, theirs)
    assert agreement.cosine_mean is not None
    assert agreement.cosine_mean > 0.999
    assert agreement.measure == "shared terms"
    assert agreement.value == pytest.approx(100 / 139.98, abs=1e-3)


def test_terms_beyond_the_models_limit_do_not_count() -> None:
    ours = ROWS * np.array([1, 1, 1.9, 1], np.float32)
    assert agree(ours).value < 0.9995
    assert agree(ours, spec=TaskSpec(TASK.name, max_active_dims=2)).value == pytest.approx(1.0)


def test_equal_weights_at_the_limit_are_no_error() -> None:
    """In fp32 the largest error decides, and rounding decides which of two equal weights is kept."""
    theirs = np.array([[2.0, 1.0, 1.0 + 1e-6]], np.float32)
    agreement = agree(theirs[:, [0, 2, 1]], theirs, TaskSpec(TASK.name, max_active_dims=2))
    assert agreement.max_error < 1e-5


def test_weights_that_are_not_finite_never_agree() -> None:
    ours = ROWS.copy()
    ours[2, 0] = np.nan
    agreement = agree(ours)
    assert not agreement.is_finite
    assert agreement.worst == (2,)


def test_rated_pairs_are_judged_by_the_models_similarity() -> None:
    rows = np.array([[1, 0], [2, 0], [1, 0], [0, 3]], np.float32)
    pairs = Encoded(Batch({}, np.ones(4, np.int32)), np.array([0, 0, 1, 1]), 2, (), ())
    for similarity, expected in (("dot", [2, 0]), ("cosine", [1, 0])):
        scores = TASK.item_scores({WEIGHTS: rows}, pairs, [5.0, 1.0], TaskSpec(TASK.name, similarity=similarity))
        assert scores.tolist() == [[expected[0], 5.0], [expected[1], 1.0]]


def test_row_bytes_count_outputs_of_a_row() -> None:
    outputs = (
        TensorSpec(WEIGHTS, DType.FLOAT32, (BATCH, 30522)),
        TensorSpec("hidden", DType.FLOAT32, (BATCH, "sequence", 384)),
    )
    assert Signature((), outputs, 512).row_bytes == 4 * 30522
