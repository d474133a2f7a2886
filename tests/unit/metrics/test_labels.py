"""Every metric equals the package whose definition it follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import seqeval.metrics
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from hasten.core.errors import PlanError
from hasten.core.report import Metric
from hasten.metrics.labels import accuracy, entity_counts, entity_metric, macro_f1, micro_f1
from hasten.tasks import TASKS, Encoded, TaskSpec
from support.metrics import scored

MakeEncoded = Callable[..., Encoded]

# More labels than most examples hold, so that some occur in neither array.
rows_of_labels = st.integers(1, 30).flatmap(
    lambda count: st.tuples(*[arrays(np.int64, count, elements=st.integers(0, 6)) for _ in range(2)])
)
rows_of_columns = st.tuples(st.integers(1, 12), st.integers(1, 5)).flatmap(
    lambda shape: st.tuples(*[arrays(np.bool_, shape) for _ in range(2)])
)
tags = st.sampled_from(
    [
        "O",
        "B-PER",
        "I-PER",
        "E-PER",
        "S-PER",
        "B-LOC",
        "I-LOC",
        "E-LOC",
        "S-LOC",
        "I-A-B",
        "B-A-B",
        "B-",
        "I-",
        "B",
        "I",
    ]
)
bio_tags = st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])


def tagged(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[list[tuple[list[str], list[str]]]]:
    """Return sentences with expected and predicted tags."""
    sentence = st.lists(st.tuples(strategy, strategy), min_size=1, max_size=8).map(
        lambda pairs: ([a for a, _ in pairs], [b for _, b in pairs])
    )
    return st.lists(sentence, min_size=1, max_size=5)


@given(rows_of_labels)
def test_label_metrics_equal_sklearn(rows: tuple[np.ndarray, np.ndarray]) -> None:
    expected, predicted = rows
    assert accuracy(expected, predicted) == pytest.approx(
        sklearn.metrics.accuracy_score(expected, predicted), abs=1e-12
    )
    for ours, average in ((macro_f1, "macro"), (micro_f1, "micro")):
        theirs = sklearn.metrics.f1_score(expected, predicted, average=average)
        assert ours(expected, predicted) == pytest.approx(theirs, abs=1e-12)


@given(rows_of_columns)
def test_multi_label_metrics_equal_sklearn(rows: tuple[np.ndarray, np.ndarray]) -> None:
    expected, predicted = rows
    # scikit-learn takes a single column for plain labels, and would count the absent label too.
    columns = None if expected.shape[1] > 1 else [1]
    for ours, average in ((macro_f1, "macro"), (micro_f1, "micro")):
        theirs = sklearn.metrics.f1_score(expected, predicted, labels=columns, average=average, zero_division=0.0)
        assert ours(expected, predicted) == pytest.approx(theirs, abs=1e-12)


def test_absent_label_counts_only_if_it_has_a_column() -> None:
    assert macro_f1(np.array([0, 2]), np.array([0, 2])) == 1.0
    columns = np.array([[1, 0, 0], [0, 0, 1]], bool)
    assert macro_f1(columns, columns) == pytest.approx(2 / 3)


@given(st.one_of(tagged(tags), tagged(bio_tags)))
def test_entity_metrics_equal_seqeval(sentences: list[tuple[list[str], list[str]]]) -> None:
    expected, predicted = [a for a, _ in sentences], [b for _, b in sentences]
    ours = entity_metric(np.array([entity_counts(a, b) for a, b in sentences]))
    options = {"average": "micro", "zero_division": 0}
    assert ours.value == pytest.approx(seqeval.metrics.f1_score(expected, predicted, **options), abs=1e-12)
    assert ours.other_metrics["precision"] == pytest.approx(
        seqeval.metrics.precision_score(expected, predicted, **options), abs=1e-12
    )
    assert ours.other_metrics["recall"] == pytest.approx(
        seqeval.metrics.recall_score(expected, predicted, **options), abs=1e-12
    )


# --- metrics of tasks


def random_rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_classifier_is_scored_by_accuracy_and_f1(encoded: MakeEncoded) -> None:
    logits, gold = random_rows(0, 50, 4), np.random.default_rng(1).integers(0, 4, 50)
    spec = TaskSpec("text-classification", ("a", "b", "c", "d"))
    metric = scored(TASKS.get(spec.name), {"logits": logits}, encoded(50), gold.tolist(), spec)
    predicted = logits.argmax(axis=1)
    assert (metric.name, metric.rows) == ("accuracy", 50)
    assert metric.value == pytest.approx(sklearn.metrics.accuracy_score(gold, predicted))
    assert metric.other_metrics == {
        f"{average} F1": pytest.approx(sklearn.metrics.f1_score(gold, predicted, average=average))
        for average in ("macro", "micro")
    }


def test_multi_label_classifier_is_scored_by_micro_and_macro_f1(encoded: MakeEncoded) -> None:
    logits, gold = random_rows(0, 50, 3), random_rows(1, 50, 3) > 0.3
    spec = TaskSpec("text-classification", ("a", "b", "c"), problem="multi_label_classification")
    metric = scored(TASKS.get(spec.name), {"logits": logits}, encoded(50), gold.tolist(), spec)
    micro, macro = (sklearn.metrics.f1_score(gold, logits > 0, average=average) for average in ("micro", "macro"))
    assert (metric.name, metric.value) == ("micro F1", pytest.approx(micro))
    assert metric.other_metrics == {"macro F1": pytest.approx(macro)}
    assert micro != macro


def test_regression_is_scored_by_both_correlations(encoded: MakeEncoded) -> None:
    logits, gold = random_rows(0, 40, 1).astype(np.float32), np.round(random_rows(1, 40), 1)
    spec = TaskSpec("text-classification", ("stars",), problem="regression")
    metric = scored(TASKS.get(spec.name), {"logits": logits}, encoded(40), gold.tolist(), spec)
    values = logits[:, 0].astype(np.float64)
    assert (metric.name, metric.value) == ("Pearson correlation", pytest.approx(stats.pearsonr(values, gold).statistic))
    assert metric.other_metrics == {"Spearman correlation": pytest.approx(stats.spearmanr(values, gold).statistic)}


def test_embedder_is_scored_by_both_correlations(encoded: MakeEncoded) -> None:
    vectors, gold = random_rows(0, 60, 4), np.random.default_rng(1).integers(0, 6, 30)
    spec = TaskSpec("sentence-similarity")
    of_item = encoded(owners=np.arange(30).repeat(2))
    metric = scored(TASKS.get(spec.name), {"embedding": vectors}, of_item, gold.tolist(), spec)
    a, b = vectors[0::2], vectors[1::2]
    cosines = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    theirs = stats.spearmanr(cosines, gold).statistic, stats.pearsonr(cosines, gold).statistic
    assert (metric.name, metric.value) == ("Spearman correlation", pytest.approx(theirs[0]))
    assert metric.other_metrics == {"Pearson correlation": pytest.approx(theirs[1])}


@pytest.mark.parametrize(
    ("spec", "item_scores"),
    [
        (TaskSpec("text-classification", ("a", "b", "c")), [[0, 1], [2, 2], [1, 1]]),
        (TaskSpec("text-classification", ("a", "b"), problem="multi_label_classification"), random_rows(0, 30, 4) > 0),
        (TaskSpec("text-classification", ("stars",)), random_rows(0, 30, 2)),
        (TaskSpec("sentence-similarity"), random_rows(0, 30, 2)),
        (TaskSpec("token-classification"), [[1, 2, 3], [0, 1, 0], [2, 2, 2], [0, 0, 1]]),
        (TaskSpec("question-answering"), [[0.5, 0.0], [1.0, 1.0], [0.0, 0.0]]),
        (TaskSpec("zero-shot-classification", ("no", "entailment")), [[0, 0], [1, 2], [2, 2]]),
        (TaskSpec("multiple-choice"), [[1.0], [0.0], [1.0]]),
        (TaskSpec("fill-mask"), [[1, 1, 2], [0, 1, 1], [0, 0, 3]]),
        (TaskSpec("text-ranking", ("score",)), random_rows(0, 30, 2)),
        (TaskSpec("text-ranking", ("score",)), [[0.5, 1.0, 0.5, 1], [1.0, 1.0, 1.0, 3]]),
    ],
)
def test_metric_accepts_resampled_item_scores(spec: TaskSpec, item_scores: Any) -> None:
    """Doubling all rows changes only the number of rows; some single row has another metric."""
    task, rows = TASKS.get(spec.name), np.asarray(item_scores, np.float64)
    once, twice = task.metric(rows, spec), task.metric(rows.take([*range(len(rows))] * 2, axis=0), spec)
    assert (twice.name, twice.rows) == (once.name, 2 * once.rows)
    assert twice.value == pytest.approx(once.value)
    assert twice.other_metrics == pytest.approx(once.other_metrics)
    assert any(task.metric(rows[[row]], spec).value != once.value for row in range(len(rows)))


# --- selecting a metric by name

LABELLED = Metric("accuracy", 0.9, 100, {"macro F1": 0.7, "micro F1": 0.8})


@pytest.mark.parametrize("name", ["macro F1", "macro-f1", "macro_f1", "MacroF1", "macro"])
def test_metric_is_found_however_it_is_spelled(name: str) -> None:
    assert LABELLED.named(name) == Metric("macro F1", 0.7, 100, {"accuracy": 0.9, "micro F1": 0.8})


def test_main_metric_by_name_is_unchanged() -> None:
    assert LABELLED.named("accuracy") == LABELLED


def test_exact_metric_name_wins_over_a_longer_one() -> None:
    assert Metric("F1", 0.5, 1, {"F1 of names": 0.1}).named("f1").value == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [("rouge", "there is no metric 'rouge' here"), ("", "no metric ''"), ("f1", "'f1' may be macro F1 or micro F1")],
)
def test_unknown_metric_is_answered_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        LABELLED.named(name)
    assert caught.value.hint == "--metric takes one of: accuracy, macro F1, micro F1"
