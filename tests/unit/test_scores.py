"""Every metric against the package whose definition it follows."""

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
from hasten.core.scores import accuracy, entity_counts, entity_metric, macro_f1, micro_f1
from hasten.tasks import TASKS, Encoded, TaskSpec
from scored import scored

MakeEncoded = Callable[..., Encoded]

# More labels than most examples hold, so that some occur in neither.
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
    """Sentences with the tags that are wanted and those that were found."""
    sentence = st.lists(st.tuples(strategy, strategy), min_size=1, max_size=8).map(
        lambda pairs: ([a for a, _ in pairs], [b for _, b in pairs])
    )
    return st.lists(sentence, min_size=1, max_size=5)


@given(rows_of_labels)
def test_labels_are_scored_as_sklearn_does(rows: tuple[np.ndarray, np.ndarray]) -> None:
    wanted, found = rows
    assert accuracy(wanted, found) == pytest.approx(sklearn.metrics.accuracy_score(wanted, found), abs=1e-12)
    for ours, average in ((macro_f1, "macro"), (micro_f1, "micro")):
        theirs = sklearn.metrics.f1_score(wanted, found, average=average)
        assert ours(wanted, found) == pytest.approx(theirs, abs=1e-12)


@given(rows_of_columns)
def test_several_labels_a_row_are_scored_as_sklearn_does(rows: tuple[np.ndarray, np.ndarray]) -> None:
    wanted, found = rows
    # scikit-learn takes a single column for plain labels, of which it would count the absent ones too.
    columns = None if wanted.shape[1] > 1 else [1]
    for ours, average in ((macro_f1, "macro"), (micro_f1, "micro")):
        theirs = sklearn.metrics.f1_score(wanted, found, labels=columns, average=average, zero_division=0.0)
        assert ours(wanted, found) == pytest.approx(theirs, abs=1e-12)


def test_a_label_that_occurs_nowhere_counts_only_where_it_has_a_column() -> None:
    assert macro_f1(np.array([0, 2]), np.array([0, 2])) == 1.0
    columns = np.array([[1, 0, 0], [0, 0, 1]], bool)
    assert macro_f1(columns, columns) == pytest.approx(2 / 3)


@given(st.one_of(tagged(tags), tagged(bio_tags)))
def test_entities_are_scored_as_seqeval_does(sentences: list[tuple[list[str], list[str]]]) -> None:
    wanted, found = [a for a, _ in sentences], [b for _, b in sentences]
    ours = entity_metric(np.array([entity_counts(a, b) for a, b in sentences]))
    options = {"average": "micro", "zero_division": 0}
    assert ours.value == pytest.approx(seqeval.metrics.f1_score(wanted, found, **options), abs=1e-12)
    assert ours.also["precision"] == pytest.approx(seqeval.metrics.precision_score(wanted, found, **options), abs=1e-12)
    assert ours.also["recall"] == pytest.approx(seqeval.metrics.recall_score(wanted, found, **options), abs=1e-12)


# --- what the tasks make of them


def random_rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def test_a_classifier_is_scored_by_accuracy_and_f1(encoded: MakeEncoded) -> None:
    logits, gold = random_rows(0, 50, 4), np.random.default_rng(1).integers(0, 4, 50)
    spec = TaskSpec("text-classification", ("a", "b", "c", "d"))
    metric = scored(TASKS.get(spec.name), {"logits": logits}, encoded(50), gold.tolist(), spec)
    found = logits.argmax(axis=1)
    assert (metric.name, metric.rows) == ("accuracy", 50)
    assert metric.value == pytest.approx(sklearn.metrics.accuracy_score(gold, found))
    assert metric.also == {
        f"{average} F1": pytest.approx(sklearn.metrics.f1_score(gold, found, average=average))
        for average in ("macro", "micro")
    }


def test_a_multi_label_classifier_is_scored_by_micro_and_macro_f1(encoded: MakeEncoded) -> None:
    logits, gold = random_rows(0, 50, 3), random_rows(1, 50, 3) > 0.3
    spec = TaskSpec("text-classification", ("a", "b", "c"), problem="multi_label_classification")
    metric = scored(TASKS.get(spec.name), {"logits": logits}, encoded(50), gold.tolist(), spec)
    micro, macro = (sklearn.metrics.f1_score(gold, logits > 0, average=average) for average in ("micro", "macro"))
    assert (metric.name, metric.value) == ("micro F1", pytest.approx(micro))
    assert metric.also == {"macro F1": pytest.approx(macro)}
    assert micro != macro


def test_a_regression_is_scored_by_both_correlations(encoded: MakeEncoded) -> None:
    logits, gold = random_rows(0, 40, 1).astype(np.float32), np.round(random_rows(1, 40), 1)
    spec = TaskSpec("text-classification", ("stars",), problem="regression")
    metric = scored(TASKS.get(spec.name), {"logits": logits}, encoded(40), gold.tolist(), spec)
    values = logits[:, 0].astype(np.float64)
    assert (metric.name, metric.value) == ("Pearson correlation", pytest.approx(stats.pearsonr(values, gold).statistic))
    assert metric.also == {"Spearman correlation": pytest.approx(stats.spearmanr(values, gold).statistic)}


def test_an_embedder_is_scored_by_both_correlations(encoded: MakeEncoded) -> None:
    vectors, gold = random_rows(0, 60, 4), np.random.default_rng(1).integers(0, 6, 30)
    spec = TaskSpec("sentence-similarity")
    of_item = encoded(owners=np.arange(30).repeat(2))
    metric = scored(TASKS.get(spec.name), {"embedding": vectors}, of_item, gold.tolist(), spec)
    a, b = vectors[0::2], vectors[1::2]
    cosines = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    theirs = stats.spearmanr(cosines, gold).statistic, stats.pearsonr(cosines, gold).statistic
    assert (metric.name, metric.value) == ("Spearman correlation", pytest.approx(theirs[0]))
    assert metric.also == {"Pearson correlation": pytest.approx(theirs[1])}


@pytest.mark.parametrize(
    ("spec", "marks"),
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
def test_marks_may_be_drawn_again(spec: TaskSpec, marks: Any) -> None:
    """Every row twice changes no metric but the number of rows; the row that is worst, alone, changes it."""
    task, rows = TASKS.get(spec.name), np.asarray(marks, np.float64)
    once, twice = task.metric(rows, spec), task.metric(rows.take([*range(len(rows))] * 2, axis=0), spec)
    assert (twice.name, twice.rows) == (once.name, 2 * once.rows)
    assert twice.value == pytest.approx(once.value)
    assert twice.also == pytest.approx(once.also)
    assert any(task.metric(rows[[place]], spec).value != once.value for place in range(len(rows)))


# --- which of them the gate goes by

LABELLED = Metric("accuracy", 0.9, 100, {"macro F1": 0.7, "micro F1": 0.8})


@pytest.mark.parametrize("name", ["macro F1", "macro-f1", "macro_f1", "MacroF1", "macro"])
def test_a_metric_is_found_however_it_is_spelled(name: str) -> None:
    assert LABELLED.named(name) == Metric("macro F1", 0.7, 100, {"accuracy": 0.9, "micro F1": 0.8})


def test_the_main_metric_by_its_own_name_changes_nothing() -> None:
    assert LABELLED.named("accuracy") == LABELLED


def test_a_whole_name_wins_over_a_longer_one() -> None:
    assert Metric("F1", 0.5, 1, {"F1 of names": 0.1}).named("f1").value == 0.5


@pytest.mark.parametrize(
    ("name", "says"),
    [("rouge", "there is no metric 'rouge' here"), ("", "no metric ''"), ("f1", "'f1' may be macro F1 or micro F1")],
)
def test_a_metric_that_is_not_there_is_answered_with_those_that_are(name: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        LABELLED.named(name)
    assert caught.value.hint == "--metric takes one of: accuracy, macro F1, micro F1"
