from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special, stats

from hasten.core.errors import InputError
from hasten.core.tensors import Batch
from hasten.core.text.tokenizer import Tokenizer
from hasten.measure.data import sample_rows
from hasten.tasks import TASKS, TaskSpec
from hasten.tasks._rankings import Query
from hasten.tasks.text_ranking import Queries
from support.metrics import scored

TASK = TASKS.get("text-ranking")
ONE = TaskSpec(TASK.name, ("LABEL_0",))
RAW = TaskSpec(TASK.name, ("LABEL_0",), activation="none")
NLI = TaskSpec(TASK.name, ("contradiction", "entailment", "neutral"))

MakeQueries = Callable[..., Queries]


@pytest.fixture
def make_queries() -> MakeQueries:
    """`make_queries(3, 2)`: queries with three and two documents; `make_queries(pairs="aab")`: pairs by query."""

    def make(*counts: int, pairs: str = "") -> Queries:
        queries = tuple(
            [Query(f"query {index}", tuple("abcdefghij"[:count]), False) for index, count in enumerate(counts)]
            + [Query(text, ("d",), True) for text in pairs]
        )
        owners = np.repeat(np.arange(len(queries)), [len(query.documents) for query in queries])
        return Queries(None, owners, len(queries), (), (), queries)  # type: ignore[arg-type]

    return make


def logits(*values: float) -> dict[str, np.ndarray]:
    return {"logits": np.array(values, np.float32)[:, None]}


def scores_of(answer: list[dict[str, object]]) -> list[object]:
    return [entry["score"] for entry in answer]


# --- payloads


@pytest.mark.parametrize(
    ("payload", "items"),
    [
        ({"text": "q", "text_pair": "d", "label": 1}, [Query("q", ("d",), True)]),
        ([["q", "d"], ("q", "e")], [Query("q", ("d",), True), Query("q", ("e",), True)]),
        ({"query": "q", "documents": ["d"], "relevance": [1]}, [Query("q", ("d",), False)]),
        (
            ({"query": "q", "documents": ("d", "d")}, {"text": "q", "text_pair": "d"}),
            [Query("q", ("d", "d"), False), Query("q", ("d",), True)],
        ),
    ],
)
def test_payloads_are_parsed(payload: object, items: list[Query]) -> None:
    assert TASK.parse(payload) == items


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "nothing to rank: the list is empty"),
        ("a text", "item 1 is str, not a pair of texts"),
        (["a query", "a document"], "item 1 is str, not a pair of texts"),
        (None, "item 1 is NoneType"),
        ([["q", "d"], ["q"]], "item 2 is a list of 1"),
        ([["q", "d", "e"]], "item 1 is a list of 3"),
        ([["q", 3]], "text_pair 1 is int"),
        ([[["q"], "d"]], "text 1 is list"),
        ([["q", "\ud800"]], "text_pair 1 is not valid Unicode"),
        ({"text": "q"}, 'item 1 has no "text" and "text_pair"; its fields are: text'),
        ({"text": "q", "text_pair": None}, 'item 1 has no "text" and "text_pair"'),
        ({"text": "q", "text_pair": ""}, "text_pair 1 is empty"),
        ({"query": "q"}, 'item 1 has no "documents"'),
        ({"documents": ["d"]}, 'item 1 has no "query"'),
        ({"query": "q", "documents": []}, "item 1 has no documents: the list is empty"),
        ({"query": "q", "documents": "d"}, '"documents" of item 1 is str, not a list'),
        ([["q", "d"], {"query": "q", "documents": ["d", None]}], "document 2 of item 2 is NoneType"),
        ({"query": "q", "documents": [{"text": "d"}]}, "document 1 of item 1 is dict"),
        ({"query": "q", "documents": ["d", " \n"]}, "document 2 of item 1 is empty"),
        ({"query": "q", "documents": ["d\udfff"]}, "document 1 of item 1 is not valid Unicode"),
        ({"query": 7, "documents": ["d"]}, "query 1 is int"),
        ({"query": "q", "documents": ["d"], "text_pair": "e"}, 'item 1 has both "documents" and a "text_pair"'),
    ],
)
def test_invalid_payloads_are_rejected(payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.parse(payload)


# --- options


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"topk": 1}, "unknown option 'topk': did you mean 'top_k'?"),
        ({"activation_fn": "sigmoid"}, "unknown option 'activation_fn'"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_k": "3"}, "invalid option: .*top_k"),
        ({"return_documents": 1}, "invalid option: .*return_documents"),
        ({"function_to_apply": "tanh"}, "invalid option: .*function_to_apply"),
        ({"prompt_name": "query"}, "the model has no prompt 'query'"),
        ({"prompt": "\ud800"}, "the prompt is not valid Unicode"),
    ],
)
def test_invalid_options_are_rejected(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.options(ONE, keywords)


@pytest.mark.parametrize("keywords", [{"top_k": 1}, {"return_documents": True}])
def test_ranking_options_are_rejected_for_pairs(tokenizer: Tokenizer, keywords: dict[str, object]) -> None:
    with pytest.raises(InputError, match="apply to rankings"):
        TASK.encode(TASK.parse([["a", "b"]]), tokenizer, TASK.options(ONE, keywords))


def test_ranking_is_rejected_for_several_scores(tokenizer: Tokenizer) -> None:
    items = TASK.parse([["a", "b"], {"query": "a", "documents": ["b"]}])
    with pytest.raises(InputError, match="item 2 is a ranking, but this model returns 3 scores"):
        TASK.encode(items, tokenizer, TASK.options(NLI, {}))


# --- rows of tokens


def test_documents_are_encoded_as_rows(tokenizer: Tokenizer, spelled: Callable[[Batch], list[str]]) -> None:
    items = TASK.parse([{"query": "a", "documents": ["b", "c d"]}, ["e", "f"]])
    encoded = TASK.encode(items, tokenizer, TASK.options(ONE, {}))
    assert spelled(encoded.batch) == [
        "[CLS] a [SEP] b [SEP]",
        "[CLS] a [SEP] c d [SEP]",
        "[CLS] e [SEP] f [SEP]",
    ]
    assert encoded.item_of_row.tolist() == [0, 0, 1]
    assert encoded.items == 2


@pytest.mark.parametrize(
    ("keywords", "first"),
    [({}, "d e a"), ({"prompt_name": "none"}, "a"), ({"prompt": "x "}, "x a"), ({"prompt": ""}, "a")],
)
def test_prompt_is_put_before_the_query_only(
    tokenizer: Tokenizer, spelled: Callable[[Batch], list[str]], keywords: dict[str, object], first: str
) -> None:
    spec = TaskSpec(TASK.name, ("LABEL_0",), prompts={"query": "d e ", "none": ""}, default_prompt="query")
    encoded = TASK.encode(TASK.parse([["a", "b"]]), tokenizer, TASK.options(spec, keywords))
    assert spelled(encoded.batch)[0] == f"[CLS] {first} [SEP] b [SEP]"


# --- answers


def test_pair_is_a_score_and_a_query_a_ranking(make_queries: MakeQueries) -> None:
    pair = Query("q", ("d",), True)
    encoded = Queries(None, np.array([0, 0, 0, 1]), 2, (), (), (*make_queries(3).queries, pair))  # type: ignore[arg-type]
    ranking, score = TASK.decode(logits(-1.0, 2.0, 0.5, 3.0), encoded, TASK.options(RAW, {}))
    assert ranking == [
        {"corpus_id": 1, "score": 2.0},
        {"corpus_id": 2, "score": 0.5},
        {"corpus_id": 0, "score": -1.0},
    ]
    assert score == 3.0
    assert type(score) is type(ranking[0]["score"]) is float
    assert type(ranking[0]["corpus_id"]) is int


def test_top_k_documents_include_their_texts(make_queries: MakeQueries) -> None:
    (ranking,) = TASK.decode(
        logits(-1.0, 2.0, 0.5), make_queries(3), TASK.options(RAW, {"top_k": 2, "return_documents": True})
    )
    assert ranking == [{"corpus_id": 1, "score": 2.0, "text": "b"}, {"corpus_id": 2, "score": 0.5, "text": "c"}]


@pytest.mark.parametrize(
    ("activation", "keywords", "apply"),
    [
        ("", {}, special.expit),
        ("sigmoid", {}, special.expit),
        ("none", {}, np.asarray),
        ("none", {"function_to_apply": "sigmoid"}, special.expit),
        ("sigmoid", {"function_to_apply": "NONE"}, np.asarray),
        ("softmax", {}, np.ones_like),
    ],
)
def test_scoring_function_is_the_models_or_the_requested_one(
    make_queries: MakeQueries, activation: str, keywords: dict[str, object], apply: Callable[[np.ndarray], np.ndarray]
) -> None:
    spec = TaskSpec(TASK.name, ("LABEL_0",), activation=activation)
    values = np.array([3.0, 1.0, -2.0])
    (ranking,) = TASK.decode(logits(*values), make_queries(3), TASK.options(spec, keywords))
    assert scores_of(ranking) == pytest.approx(apply(values).tolist())


def test_equal_scores_keep_the_documents_order(make_queries: MakeQueries) -> None:
    """Beyond 17 the fp32 sigmoid is 1, so these documents have equal scores, as for CrossEncoder."""
    (ranking,) = TASK.decode(logits(20.0, 30.0, 1.0, 25.0), make_queries(4), TASK.options(ONE, {}))
    assert [entry["corpus_id"] for entry in ranking] == [0, 1, 3, 2]


def test_several_scores_are_a_vector(make_queries: MakeQueries) -> None:
    values = {"logits": np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], np.float32)}
    raw = TASK.decode(values, make_queries(pairs="ab"), TASK.options(NLI, {}))
    np.testing.assert_array_equal(raw, values["logits"])
    shared = TASK.decode(values, make_queries(pairs="ab"), TASK.options(NLI, {"function_to_apply": "softmax"}))
    np.testing.assert_allclose(shared, special.softmax(values["logits"], axis=1), rtol=1e-6)


def test_answers_have_the_shape_of_the_payload() -> None:
    options = TASK.options(ONE, {})
    assert TASK.present({"text": "q", "text_pair": "d"}, [0.5], options) == 0.5
    pairs = TASK.present([["q", "d"], ["q", "e"]], [0.5, 0.25], options)
    assert isinstance(pairs, np.ndarray)
    assert (pairs.dtype, pairs.tolist()) == (np.float32, [0.5, 0.25])
    ranking = [{"corpus_id": 0, "score": 0.5}]
    assert TASK.present({"query": "q", "documents": ["d"]}, [ranking], options) == ranking
    assert TASK.present([{"query": "q", "documents": ["d"]}], [ranking], options) == [ranking]
    assert TASK.present([{"query": "q", "documents": ["d"]}, ["q", "d"]], [ranking, 0.5], options) == [ranking, 0.5]
    vectors = TASK.present([["q", "d"]], [np.zeros(3)], TASK.options(NLI, {}))
    assert isinstance(vectors, np.ndarray)
    assert vectors.shape == (1, 3)


@pytest.mark.parametrize("spec", [ONE, NLI])
def test_sample_has_documents_of_varying_relevance(spec: TaskSpec, tokenizer: Tokenizer) -> None:
    rows = sample_rows(spec)
    items = TASK.parse(rows)
    assert len(items) >= 100
    assert len({repr(row) for row in rows}) == len(rows)
    assert TASK.gold(rows, spec) is None
    encoded = TASK.encode(items, tokenizer, TASK.options(spec, {}))
    assert max(map(len, encoded.groups)) == 4
    assert 400 < len(encoded.batch) < 600


# --- labelled rows


def ranked(relevance: object, key: str = "relevance", documents: int = 3) -> dict[str, object]:
    return {"query": "q", "documents": ["d"] * documents, key: relevance}


def pair(key: str, value: object, text: str = "q") -> dict[str, object]:
    return {"text": text, "text_pair": "d", key: value}


def test_gold_is_read_from_every_label_column() -> None:
    assert TASK.gold([ranked([0, 1, 2.5]), ranked([True, False, 0])], ONE) == [(0.0, 1.0, 2.5), (1.0, 0.0, 0.0)]
    assert TASK.gold([ranked([0, 1, 0], "labels")], ONE) == [(0.0, 1.0, 0.0)]
    assert TASK.gold([pair("label", 1), pair("label", 0)], ONE) == [(1.0,), (0.0,)]
    assert TASK.gold([pair("score", 1), pair("score", -0.5)], ONE) == [1.0, -0.5]
    assert TASK.gold([pair("label", "neutral"), pair("label", 0)], NLI) == [2, 0]
    assert TASK.gold([pair("id", 7), {"query": "q", "documents": ["d"]}], ONE) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ranked([0, 1])], 'row 1 must have as many numbers in "relevance" as it has documents'),
        ([ranked(1)], "row 1 must have as many numbers"),
        ([ranked([0, 1, -1])], "row 1 has -1 .*relevance must be at least 0"),
        ([ranked([0, 1, "2"])], 'row 1 has no number in "relevance"'),
        ([ranked([0, 1, float("nan")])], 'row 1 has no number in "relevance": nan'),
        ([ranked([0, 1, 10**400])], 'row 1 has no number in "relevance"'),
        ([ranked([0, 1, 1]), {"query": "q", "documents": ["d"]}], 'row 2 has no "relevance", but other rows have'),
        ([ranked([0, 1, 1]), pair("label", 1)], 'rows have "relevance" and "label"'),
        ([ranked(1, "label")], 'row 1 has documents and a single "label"'),
        ([pair("relevance", [1])], "row 1 must have as many numbers"),
        ([pair("label", "good")], "row 1 has no number in \"label\": 'good'"),
        ([pair("label", -1)], "row 1 has -1"),
        ([pair("score", None), pair("score", 1)], 'row 1 has no "score"'),
        ([pair("score", float("inf"))], 'row 1 has no number in "score"'),
    ],
)
def test_invalid_labels_are_rejected(rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.gold(rows, ONE)


def test_unknown_class_is_rejected() -> None:
    with pytest.raises(InputError, match="row 1 has the label 'entails', which the model does not know"):
        TASK.gold([pair("label", "entails")], NLI)


def test_rankings_are_scored_per_query(make_queries: MakeQueries) -> None:
    gold = [(0.0, 1.0, 0.0), (2.0, 1.0)]
    metric = scored(TASK, logits(3.0, 2.0, 1.0, 1.0, 2.0), make_queries(3, 2), gold, ONE)
    second = (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))
    assert (metric.name, metric.rows) == ("nDCG@10", 2)
    assert metric.value == pytest.approx((1 / np.log2(3) + second) / 2)
    assert metric.other_metrics == {"MRR@10": pytest.approx((1 / 2 + 1) / 2), "MAP": pytest.approx((1 / 2 + 1) / 2)}


def test_pairs_with_the_same_query_are_ranked_together(make_queries: MakeQueries) -> None:
    together = scored(TASK, logits(3.0, 2.0, 1.0, 1.0, 2.0), make_queries(3, 2), [(0.0, 1.0, 0.0), (2.0, 1.0)], ONE)
    labels = [(0.0,), (2.0,), (1.0,), (1.0,), (0.0,)]
    apart = scored(TASK, logits(3.0, 1.0, 2.0, 2.0, 1.0), make_queries(pairs="abbaa"), labels, ONE)
    assert (apart.value, apart.other_metrics) == (pytest.approx(together.value), pytest.approx(together.other_metrics))
    assert apart.rows == 5


def test_pairs_of_different_queries_are_one_ranking(make_queries: MakeQueries) -> None:
    metric = scored(TASK, logits(3.0, 2.0, 1.0), make_queries(pairs="abc"), [(1.0,), (0.0,), (1.0,)], ONE)
    assert (metric.name, metric.other_metrics) == ("average precision", {})
    assert metric.value == pytest.approx((1 + 2 / 3) / 2)


def test_score_labels_are_correlated(make_queries: MakeQueries) -> None:
    random = np.random.default_rng(0)
    values, expected_scores = random.normal(size=20), random.normal(size=20)
    metric = scored(TASK, logits(*values), make_queries(pairs="q" * 20), expected_scores.tolist(), ONE)
    assert metric.name == "Spearman correlation"
    assert metric.value == pytest.approx(stats.spearmanr(values, expected_scores).statistic)
    expected = stats.pearsonr(special.expit(values), expected_scores).statistic
    assert metric.other_metrics == {"Pearson correlation": pytest.approx(expected, abs=1e-6)}


def test_class_labels_are_scored_by_accuracy(make_queries: MakeQueries) -> None:
    metric = scored(TASK, {"logits": np.eye(3)}, make_queries(pairs="abc"), [0, 1, 1], NLI)
    assert (metric.name, metric.value) == ("accuracy", pytest.approx(2 / 3))


def test_metrics_without_relevant_documents_are_rejected(make_queries: MakeQueries) -> None:
    with pytest.raises(InputError, match="no document is relevant"):
        scored(TASK, logits(1.0, 2.0), make_queries(2), [(0.0, 0.0)], ONE)


# --- agreement


@pytest.fixture
def reference() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 1)) * 4


def agreement_of(make_queries: MakeQueries, ours: np.ndarray, theirs: np.ndarray, **options: str):
    encoded = make_queries(**options) if options else make_queries(*[4] * (len(ours) // 4))
    return TASK.agree({"logits": ours}, {"logits": theirs}, encoded, ONE)


def test_equal_outputs_agree(make_queries: MakeQueries, reference: np.ndarray) -> None:
    agreement = agreement_of(make_queries, reference, reference)
    assert (agreement.value, agreement.flips, agreement.max_error) == (pytest.approx(1.0), 0, 0.0)
    assert agreement.rank_correlation == pytest.approx(1.0)


def test_agreement_falls_with_the_order_that_noise_changes(make_queries: MakeQueries, reference: np.ndarray) -> None:
    ours = reference + 3 * np.random.default_rng(1).normal(size=(40, 1))
    agreement = agreement_of(make_queries, ours, reference)
    assert agreement.rank_correlation == pytest.approx(stats.spearmanr(ours[:, 0], reference[:, 0]).statistic)
    assert agreement.value < 0.99
    groups = ours.reshape(10, 4).argmax(axis=1) != reference.reshape(10, 4).argmax(axis=1)
    assert agreement.flips == groups.sum() > 0
    assert groups[agreement.worst[0]]


def test_documents_shuffled_within_a_query_lower_the_agreement(make_queries: MakeQueries) -> None:
    """Differences between queries hide it from measures over all documents."""
    theirs = (np.arange(20)[:, None] * 100.0 + np.array([0.0, 1.0, 2.0, 3.0])).reshape(-1, 1)
    ours = theirs.reshape(20, 4)[:, [3, 1, 0, 2]].reshape(-1, 1)
    agreement = agreement_of(make_queries, ours, theirs)
    assert agreement.rank_correlation is not None
    assert agreement.rank_correlation > 0.99
    assert agreement.measure == "rank correlation within queries"
    assert agreement.value < 0.1
    assert agreement.flips == 20


@pytest.mark.parametrize(("scale", "shift"), [(0.5, 0.0), (1.0, 4.0)])
def test_other_scores_in_the_same_order_lower_the_agreement(
    make_queries: MakeQueries, reference: np.ndarray, scale: float, shift: float
) -> None:
    agreement = agreement_of(make_queries, reference * scale + shift, reference)
    assert agreement.flips == 0
    assert agreement.measure == "concordance of scores"
    assert agreement.value < TASK.min_agreement


@pytest.mark.parametrize("options", [{}, {"pairs": "abcdefghij" * 4}])
def test_collapsed_model_does_not_agree(
    make_queries: MakeQueries, reference: np.ndarray, options: dict[str, str]
) -> None:
    agreement = agreement_of(make_queries, np.full((40, 1), reference.mean()), reference, **options)
    assert agreement.value == pytest.approx(0.0)


@pytest.mark.parametrize(("error", "value"), [(0.0, 1.0), (1e-5, 1.0), (0.1, 0.0)])
def test_equal_reference_scores_are_compared_by_value(make_queries: MakeQueries, error: float, value: float) -> None:
    theirs = np.full((12, 1), -3.0)
    ours = theirs + error * np.random.default_rng(0).choice([-1, 1], (12, 1))
    assert agreement_of(make_queries, ours, theirs).value == value


def test_pairs_of_different_queries_have_no_best_document(make_queries: MakeQueries, reference: np.ndarray) -> None:
    assert agreement_of(make_queries, reference[:5], reference[:5], pairs="abcde").flips is None
    assert agreement_of(make_queries, -reference[:5], reference[:5], pairs="aabcd").flips == 1


def test_several_scores_agree_by_their_label(make_queries: MakeQueries) -> None:
    theirs = np.random.default_rng(0).normal(size=(10, 3))
    ours = theirs.copy()
    ours[3] *= -1
    agreement = TASK.agree({"logits": ours}, {"logits": theirs}, make_queries(pairs="abcdefghij"), NLI)
    assert (agreement.measure, agreement.flips, agreement.worst[0]) == ("same label", 1, 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_outputs_are_reported(make_queries: MakeQueries, reference: np.ndarray, bad: float) -> None:
    ours = reference.copy()
    ours[[9, 10, 30]] = bad
    agreement = agreement_of(make_queries, ours, reference)
    assert not agreement.is_finite
    assert agreement.worst == (2, 7)


def test_rows_of_another_task_are_rejected(encoded: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="needs the result of this task's encode"):
        TASK.decode(logits(1.0), encoded(1), TASK.options(ONE, {}))  # type: ignore[arg-type]
