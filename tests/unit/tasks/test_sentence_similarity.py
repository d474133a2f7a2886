from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from hasten.core.errors import InputError
from hasten.core.tensors import Batch
from hasten.core.text.tokenizer import Tokenizer
from hasten.predictor import Predictor
from hasten.tasks import TASKS, Encoded, TaskSpec
from support.metrics import scored

TASK = TASKS.get("sentence-similarity")
SPEC = TaskSpec(TASK.name)
PROMPTED = TaskSpec(TASK.name, prompts={"query": "q ", "passage": "p "}, default_prompt="query")

MakeEncoded = Callable[..., Encoded]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# --- answers


@pytest.fixture
def embed(make_predictor: Callable[..., Predictor]) -> Predictor:
    return make_predictor(SPEC)


def test_list_gives_a_matrix(embed: Predictor) -> None:
    vectors = embed(["a b", "c", "d e f"])
    assert isinstance(vectors, np.ndarray)
    assert (vectors.shape, vectors.dtype) == ((3, 3), np.float32)
    assert embed(["a"]).shape == (1, 3)  # type: ignore[attr-defined]


def test_one_text_gives_one_vector(embed: Predictor) -> None:
    vector = embed("c")
    assert isinstance(vector, np.ndarray)
    assert (vector.shape, vector.dtype) == ((3,), np.float32)
    assert np.array_equal(vector, embed(["c"])[0])  # type: ignore[index]
    assert np.array_equal(vector, embed({"text": "c"}))  # type: ignore[arg-type]


def test_pair_gives_its_cosine(embed: Predictor) -> None:
    similarity = embed({"text": "a b", "text_pair": "c"})
    assert type(similarity) is float
    a, b = embed(["a b", "c"])  # type: ignore[misc]
    assert similarity == pytest.approx(cosine(a, b))


def test_pairs_give_a_vector_of_cosines(embed: Predictor) -> None:
    pairs = [{"text": "a b", "text_pair": "c"}, {"text": "a", "text_pair": "a"}]
    similarities = embed(pairs)
    assert isinstance(similarities, np.ndarray)
    assert similarities.tolist() == pytest.approx([embed(pairs[0]), 1.0])


def test_texts_and_pairs_mixed_give_a_list(embed: Predictor) -> None:
    vector, similarity, last = embed(["a b", {"text": "a b", "text_pair": "c"}, "c"])  # type: ignore[misc]
    assert np.array_equal(vector, embed("a b"))  # type: ignore[arg-type]
    assert similarity == pytest.approx(cosine(vector, last))


def test_fp16_vectors_are_returned_as_fp32(encoded: MakeEncoded) -> None:
    answers = TASK.decode({"embedding": np.ones((2, 3), np.float16)}, encoded(2), TASK.options(SPEC, {}))
    assert {answer.dtype for answer in answers} == {np.dtype(np.float32)}


# --- prompts


@pytest.mark.parametrize(
    ("spec", "keywords", "prompt"),
    [
        (SPEC, {}, ""),
        (PROMPTED, {}, "q "),
        (PROMPTED, {"prompt_name": "passage"}, "p "),
        (PROMPTED, {"prompt": "d "}, "d "),
        (PROMPTED, {"prompt": ""}, ""),
        (PROMPTED, {"prompt": "d ", "prompt_name": "passage"}, "d "),
        (PROMPTED, {"prompt_name": None, "prompt": None}, "q "),
        (SPEC, {"prompt": "d "}, "d "),
    ],
)
def test_prompts_are_put_before_the_text(
    tokenizer: Tokenizer,
    spelled: Callable[[Batch], list[str]],
    spec: TaskSpec,
    keywords: dict[str, object],
    prompt: str,
) -> None:
    encoded = TASK.encode(["a", ("b", "c")], tokenizer, TASK.options(spec, keywords))
    texts = spelled(encoded.batch)
    assert texts == [f"[CLS] {prompt}{text} [SEP]" for text in "abc"]
    assert encoded.item_of_row.tolist() == [0, 1, 1]
    assert encoded.items == 2


@pytest.mark.parametrize(("spec", "hint"), [(PROMPTED, "its prompts: query, passage"), (SPEC, "its prompts: none")])
def test_unknown_prompt_is_answered_with_the_known_ones(spec: TaskSpec, hint: str) -> None:
    with pytest.raises(InputError, match="the model has no prompt 'qeury'") as caught:
        TASK.options(spec, {"prompt_name": "qeury"})
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("keywords", "message"),
    [({"promt": "x"}, "unknown option 'promt': did you mean 'prompt'?"), ({"prompt": 3}, "invalid option")],
)
def test_invalid_options_are_rejected(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        TASK.options(SPEC, keywords)
    assert message in caught.value.message


# --- gold and score


def test_gold_is_the_score_per_pair() -> None:
    rows = [{"text": "a", "text_pair": "b", "score": 4}, {"text": "a", "text_pair": "c", "score": 0.5}]
    assert TASK.gold(rows, SPEC) == [4, 0.5]
    assert TASK.gold([{"text": "a"}, {"text": "a", "text_pair": "b"}], SPEC) is None


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a", "text_pair": "b"},
        {"text": "a", "score": 1.0},
        {"text": "a", "text_pair": "b", "score": "1.0"},
        # Parsed as a single text, it would shift the texts of every later pair.
        {"text": "a", "text_pair": None, "score": 1.0},
    ],
)
def test_row_without_a_scored_pair_is_rejected(row: dict[str, object]) -> None:
    with pytest.raises(InputError, match="row 2 has no"):
        TASK.gold([{"text": "a", "text_pair": "b", "score": 1.0}, row], SPEC)


def test_metric_is_spearman_of_the_cosines(encoded: MakeEncoded) -> None:
    random = np.random.default_rng(0)
    vectors = random.normal(size=(60, 4)).astype(np.float32)
    gold = random.integers(0, 6, 30).tolist()
    cosines = [cosine(a, b) for a, b in zip(vectors[0::2], vectors[1::2], strict=True)]
    metric = scored(TASK, {"embedding": vectors}, encoded(owners=np.arange(30).repeat(2)), gold, SPEC)
    assert (metric.name, metric.rows) == ("Spearman correlation", 30)
    assert metric.value == pytest.approx(stats.spearmanr(cosines, gold).statistic, abs=1e-6)


# --- agreement


@pytest.fixture
def reference() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 8))


def agree(ours: np.ndarray, theirs: np.ndarray, encoded: Encoded):
    return TASK.agree({"embedding": ours}, {"embedding": theirs}, encoded, SPEC)


def test_equal_vectors_agree(encoded: MakeEncoded, reference: np.ndarray) -> None:
    agreement = agree(reference, reference, encoded(40))
    assert (agreement.measure, agreement.rows, agreement.flips) == ("mean cosine", 40, None)
    assert (agreement.max_error, agreement.relative_error, agreement.is_finite) == (0.0, 0.0, True)
    assert agreement.scale == np.abs(reference).max()
    assert (agreement.value, agreement.cosine_min, agreement.rank_correlation) == pytest.approx((1, 1, 1))
    assert agreement.top_k_overlap == 1.0


def test_agreement_fields_equal_their_definitions(encoded: MakeEncoded, reference: np.ndarray) -> None:
    ours = reference + 0.3 * np.random.default_rng(1).normal(size=reference.shape)
    agreement = agree(ours, reference, encoded(40))
    cosines = np.array([cosine(a, b) for a, b in zip(ours, reference, strict=True)])
    assert agreement.value == agreement.cosine_mean == pytest.approx(cosines.mean())
    assert agreement.cosine_min == pytest.approx(cosines.min())
    assert agreement.worst == tuple(np.argsort(cosines)[:3].tolist())
    near = [[cosine(a, b) for index, a in enumerate(side) for b in side[index + 1 :]] for side in (ours, reference)]
    assert agreement.rank_correlation == pytest.approx(stats.spearmanr(*near).statistic)
    assert 0.5 < agreement.top_k_overlap < 1.0


def test_worst_are_items_not_rows(encoded: MakeEncoded, reference: np.ndarray) -> None:
    ours = reference.copy()
    ours[7] *= -1  # the second text of the fourth pair
    agreement = agree(ours, reference, encoded(owners=np.arange(20).repeat(2)))
    assert agreement.worst[0] == 3
    assert agreement.cosine_min == pytest.approx(-1.0)


def test_identical_texts_have_full_neighbour_overlap(encoded: MakeEncoded) -> None:
    same = np.ones((30, 4))
    assert agree(same, same, encoded(30)).top_k_overlap == 1.0


def test_few_texts_have_no_neighbours_to_compare(encoded: MakeEncoded, reference: np.ndarray) -> None:
    agreement = agree(reference[:2], reference[:2], encoded(2))
    assert (agreement.top_k_overlap, agreement.rank_correlation) == (None, None)
    assert agreement.value == pytest.approx(1.0)


def test_zero_vector_disagrees(encoded: MakeEncoded, reference: np.ndarray) -> None:
    ours = reference.copy()
    ours[5] = 0
    agreement = agree(ours, reference, encoded(40))
    assert agreement.cosine_min == 0.0
    assert agreement.worst[0] == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_outputs_are_reported(encoded: MakeEncoded, reference: np.ndarray, bad: float) -> None:
    ours = reference.copy()
    ours[6, 1] = bad
    agreement = agree(ours, reference, encoded(40))
    assert not agreement.is_finite
    assert agreement.worst[0] == 6
