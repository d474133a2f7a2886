from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer

from hasten.core.errors import InputError
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.measure.data import sample_texts
from hasten.tasks import TaskSpec
from hasten.tasks.fill_mask import TASK, MaskedText, Options
from support.metrics import scored

# The unit tokenizer knows letters; one of them is the mask here.
SPEC = TaskSpec("fill-mask", mask_token="m")
VOCABULARY = 30


@pytest.fixture
def encode(tokenizer: Tokenizer) -> Any:
    def make(*texts: str, **options: object) -> tuple[MaskedText, Options]:
        parsed = TASK.options(SPEC, options)
        return TASK.encode(TASK.parse(list(texts)), tokenizer, parsed), parsed

    return make


def logits(tokenizer: Tokenizer, *best: str) -> dict[str, np.ndarray]:
    """Return a row per mask: the letters of a word with falling logits, all others equal."""
    rows = np.zeros((len(best), VOCABULARY), np.float32)
    for row, word in zip(rows, best, strict=True):
        for rank, letter in enumerate(word):
            row[tokenizer.id_of(letter)] = 9 - rank
    return {"logits": rows}


def tokens(answer: Any) -> str:
    return "".join(filled["token_str"] for filled in answer)


def test_every_mask_has_a_row_of_logits(encode: Any, tokenizer: Tokenizer) -> None:
    encoded, options = encode("a m", "m b m", "m")
    assert encoded.owners.tolist() == [0, 1, 1, 2]
    assert [positions.tolist() for positions in encoded.mask_positions] == [[2], [1, 3], [1]]
    first, second, third = TASK.decode(logits(tokenizer, "xyz", "cd", "ef", "g"), encoded, options)
    assert (tokens(first)[:3], [tokens(mask)[:2] for mask in second], tokens(third)[0]) == ("xyz", ["cd", "ef"], "g")
    assert [len(first), len(second[0]), len(second[1]), len(third)] == [5] * 4
    # Other masks stay in the sequence.
    assert [filled["sequence"] for filled in second[1][:2]] == ["[CLS] m b e [SEP]", "[CLS] m b f [SEP]"]


def test_scores_are_of_the_whole_vocabulary_even_among_targets(encode: Any, tokenizer: Tokenizer) -> None:
    encoded, options = encode("m", targets=["z", "x", "z"])
    (answer,) = TASK.decode(logits(tokenizer, "yx"), encoded, options)
    powers = np.exp(np.array([9, 8] + [0] * (VOCABULARY - 2), np.float64))
    assert tokens(answer) == "xz"
    assert [filled["score"] for filled in answer] == pytest.approx((powers / powers.sum())[1:3].tolist(), rel=1e-5)


def test_padding_is_left_out_of_the_sequence(encode: Any) -> None:
    encoded, options = encode("a m m")
    best = np.zeros((2, VOCABULARY), np.float32)
    best[:, 0] = 5.0
    (answer,) = TASK.decode({"logits": best}, encoded, options)
    assert answer[0][0]["token_str"] == "[PAD]"
    assert answer[0][0]["sequence"] == "[CLS] a m [SEP]"


def test_equal_scores_keep_the_order_of_tokens(encode: Any, tokenizer: Tokenizer) -> None:
    encoded, options = encode("m", top_k=4)
    (answer,) = TASK.decode(logits(tokenizer, "c"), encoded, options)
    assert [filled["token"] for filled in answer] == [6, 0, 1, 2]


def test_sample_has_one_early_mask_per_row() -> None:
    rows = TASK.sample(sample_texts(), TaskSpec("fill-mask", mask_token="[MASK]"))
    texts = [str(row["text"]) for row in rows]
    assert 120 <= len(texts) == len(set(texts)) <= 150
    assert all(text.count("[MASK]") == 1 for text in texts)
    assert all(len(text[: text.index("[MASK]")].encode()) < 40 for text in texts)
    assert len({text.index("[MASK]") for text in texts}) > 20


def test_gold_is_the_missing_tokens() -> None:
    assert TASK.gold([{"text": "m"}], SPEC) is None
    rows = [{"text": "a m", "label": "b"}, {"text": "m m", "label": ["c", "d"]}]
    assert TASK.gold(rows, SPEC) == [("b",), ("c", "d")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "m"}, 'row 2 needs the missing token in "label"'),
        ({"text": "m", "label": 7}, "row 2 needs"),
        ({"text": "m", "label": ""}, "row 2 needs"),
        ({"text": "m", "label": ["a", None]}, "row 2 needs"),
        ({"text": "m", "label": ["a", "b"]}, "row 2 has 2 labels for 1 masks"),
        ({"text": "m m", "label": "a"}, "row 2 has 1 labels for 2 masks"),
        ({"text": "m", "label": []}, "row 2 has 0 labels for 1 masks"),
    ],
)
def test_labels_that_do_not_match_the_masks_are_rejected(row: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.gold([{"text": "m", "label": "a"}, row], SPEC)


def test_metric_is_accuracy_and_top_five_accuracy(encode: Any, tokenizer: Tokenizer) -> None:
    encoded, _ = encode("m", "m m", "m", "m")
    outputs = logits(tokenizer, "abc", "bcdefgh", "cdefgh", "dabcefg", "xyz")
    # Correct; second; sixth; a label of two tokens; an unknown label.
    metric = scored(TASK, outputs, encoded, [("a",), ("c", "h"), ("d a",), ("zebra",)], SPEC)
    assert (metric.name, metric.rows) == ("accuracy", 4)
    assert metric.value == pytest.approx(1 / 5)
    assert metric.other_metrics == {"top-5 accuracy": pytest.approx(2 / 5)}


def test_label_matches_the_token_with_a_leading_space() -> None:
    from tokenizers import models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "m": 1, "Ġcat": 2, "cat": 3, "Ġ": 4}
    backend = FastTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(backend, TokenizerSpec(("input_ids",), 8))
    encoded = TASK.encode(["m"], tokenizer, TASK.options(SPEC, {}))
    for best in (2, 3):
        outputs = {"logits": np.eye(5, dtype=np.float32)[[best]]}
        assert scored(TASK, outputs, encoded, [("cat",)], SPEC).value == 1.0
    assert scored(TASK, {"logits": np.eye(5, dtype=np.float32)[[0]]}, encoded, [("dog",)], SPEC).value == 0.0


def test_agreement_counts_masks_and_names_items(encode: Any, tokenizer: Tokenizer) -> None:
    encoded, _ = encode("m", "m m", "m")
    reference = logits(tokenizer, "abcdef", "bcdefg", "cdefgh", "defghi")
    same = TASK.agree(reference, reference, encoded, SPEC)
    assert (same.measure, same.value, same.rows, same.flips, same.max_error) == ("same token", 1.0, 4, 0, 0.0)
    assert (same.cosine_min, same.top_k_overlap) == (pytest.approx(1.0), 1.0)
    ours = {"logits": reference["logits"] + np.array([[0.0], [0.0], [0.0], [3.0]], np.float32)}
    ours["logits"][2] = reference["logits"][1]
    agreement = TASK.agree(ours, reference, encoded, SPEC)
    assert (agreement.value, agreement.flips, agreement.worst) == (0.75, 1, (1, 2, 0))
    assert agreement.max_error == pytest.approx(9.0)
    assert agreement.top_k_overlap == pytest.approx((5 + 5 + 4 + 5) / 20)
    assert agreement.relative_error > 0.1


def test_non_finite_outputs_are_reported_by_item(encode: Any, tokenizer: Tokenizer) -> None:
    encoded, _ = encode("m", "m m", "m")
    reference = logits(tokenizer, "a", "b", "c", "d")
    ours = {"logits": reference["logits"].copy()}
    ours["logits"][1:3, 4] = np.nan
    agreement = TASK.agree(ours, reference, encoded, SPEC)
    assert (agreement.is_finite, agreement.value, agreement.worst) == (False, 0.0, (1,))


def test_agreement_needs_little_more_memory_than_the_outputs(encode: Any) -> None:
    """Vocabularies have up to 250,000 tokens."""
    encoded, _ = encode(*["m"] * 100)
    values = np.random.default_rng(0).normal(size=(100, 50_000)).astype(np.float32)
    reference = {"logits": values}
    tracemalloc.start()
    TASK.agree({"logits": values}, reference, encoded, SPEC)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * values.nbytes


def test_rows_of_another_task_are_rejected(encoded: Any) -> None:
    with pytest.raises(TypeError, match="needs the result of this task's encode"):
        TASK.decode({"logits": np.zeros((1, 5), np.float32)}, encoded(1), TASK.options(SPEC, {}))
