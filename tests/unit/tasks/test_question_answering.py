from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from hasten.core.errors import InputError
from hasten.core.tensors import BATCH, SEQUENCE
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.measure.data import sample_texts
from hasten.tasks import TASKS, Encoded, TaskSpec
from support.metrics import scored

TASK = TASKS.get("question-answering")
SPEC = TaskSpec("question-answering")
BOTH = ("input_ids", "token_type_ids")
CLS, SEP = 2, 3
LIMIT = 16


def letters(file: Path, **fields: Any) -> Tokenizer:
    return Tokenizer.open(file, TokenizerSpec(BOTH, **{"max_length": LIMIT, "cls_id": CLS, **fields}))


@pytest.fixture
def by_letter(tokenizer_file: Path) -> Tokenizer:
    """A tokenizer with one token per letter, limited to 16 tokens."""
    return letters(tokenizer_file)


def encode(tokenizer: Tokenizer, payload: object, **keywords: object) -> Any:
    return TASK.encode(TASK.parse(payload), tokenizer, TASK.options(SPEC, keywords))


def rows(encoded: Encoded) -> list[str]:
    return [" ".join(encoding.tokens) for encoding in encoded.encodings]


def logits_for(encoded: Encoded, *spans: tuple[int, int, int, float]) -> dict[str, np.ndarray]:
    """Return logits of -9 except for these spans: (row, first token, last token, logit of both)."""
    ends = np.cumsum(encoded.batch.lengths)
    begins = ends - encoded.batch.lengths
    start, end = (np.full(encoded.batch.tokens, -9.0, np.float32) for _ in range(2))
    for row, first, last, value in spans:
        start[begins[row] + first] = end[begins[row] + last] = value
    return {"start_logits": start, "end_logits": end}


def answer(
    tokenizer: Tokenizer, question: str, context: str, *spans: tuple[int, int, int, float], **keywords: object
) -> Any:
    """Return the presented answer, scores in percent."""
    payload = {"question": question, "context": context}
    encoded = encode(tokenizer, payload, **keywords)
    options = TASK.options(SPEC, keywords)
    actual = TASK.present(payload, TASK.decode(logits_for(encoded, *spans), encoded, options), options)
    if isinstance(actual, list):
        return [(round(span["score"] * 100), span["start"], span["end"], span["answer"]) for span in actual]
    return round(actual["score"] * 100), actual["start"], actual["end"], actual["answer"]


def test_task_declares_its_properties() -> None:
    assert TASK.outputs == ("start_logits", "end_logits")
    assert TASK.axes == (BATCH, SEQUENCE)
    assert TASK.heads == ("ForQuestionAnsweringSimple", "ForQuestionAnswering")
    assert TASK.is_detected


# --- payloads


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"question": "q", "context": "c", "id": 7, "answers": []}, [("q", "c")]),
        ([{"question": "q", "context": "c"}, {"context": "d", "question": "r"}], [("q", "c"), ("r", "d")]),
        (({"question": "q", "context": "c"},), [("q", "c")]),
        ({"question": ["q", "r"], "context": "c"}, [("q", "c"), ("r", "c")]),
        ({"question": ["q", "r"], "context": ("c", "d")}, [("q", "c"), ("r", "d")]),
    ],
)
def test_payloads_are_parsed(payload: object, expected: list[tuple[str, str]]) -> None:
    queries = TASK.parse(payload)
    assert [(query.question, query.context) for query in queries] == expected
    answers = list(range(len(queries)))
    is_one = isinstance(payload, dict) and isinstance(payload["question"], str)
    assert TASK.present(payload, answers, TASK.options(SPEC, {})) == (0 if is_one else answers)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "no question to answer"),
        ({"question": [], "context": "c"}, "no question to answer"),
        ({"question": [], "context": []}, "no question to answer"),
        ("who?", "item 1 is str, not a question with its context.*as in"),
        (["who?", "Ada."], "item 1 is str"),
        (None, "item 1 is NoneType"),
        (7, "item 1 is int"),
        ({"question": "q"}, 'item 1 has no "context"'),
        ({"question": ["q", "r"]}, 'item 1 has no "context"'),
        ({"context": "c"}, 'item 1 has no "question"'),
        ([{"question": "q", "context": "c"}, {"question": None, "context": "c"}], 'item 2 has no "question"'),
        ([{"question": "q", "context": "c"}, {"question": "q", "context": 7}], "context 2 is int, not a string"),
        ([{"question": ["q"], "context": "c"}], "question 1 is list, not a string"),
        ({"question": "q", "context": " \n"}, "context 1 is empty"),
        ({"question": "", "context": "c"}, "question 1 is empty"),
        ({"question": ["q", ""], "context": "c"}, "question 2 is empty"),
        ({"question": "q", "context": "c\ud800"}, "context 1 is not valid Unicode: lone surrogate at character 1"),
        ({"question": "q", "context": ["c", "d"]}, '"context" is a list, but "question" is not'),
        ({"question": ["q", "r"], "context": ["c"]}, "2 questions do not match 1 contexts"),
    ],
)
def test_invalid_input_is_rejected_with_its_position(payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.parse(payload)


@pytest.mark.parametrize(
    "keywords",
    [
        {"top_k": 0},
        {"top_k": 1.5},
        {"max_answer_len": 0},
        {"max_seq_len": 0},
        {"max_question_len": 0},
        {"doc_stride": -1},
        {"doc_stride": "half"},
        {"align_to_words": 1},
        {"topk": 1},
    ],
)
def test_invalid_options_are_rejected(keywords: dict[str, object]) -> None:
    with pytest.raises(InputError):
        TASK.options(SPEC, keywords)


def test_none_option_means_the_default() -> None:
    names = ("top_k", "doc_stride", "max_answer_len", "max_seq_len", "max_question_len", "align_to_words")
    assert TASK.options(SPEC, dict.fromkeys((*names, "handle_impossible_answer"))) == TASK.options(SPEC, {})


# --- windows


def test_short_context_is_one_row(by_letter: Tokenizer) -> None:
    encoded = encode(by_letter, [{"question": "a b", "context": "c d"}, {"question": "e", "context": "f"}])
    assert rows(encoded) == ["[CLS] a b [SEP] c d [SEP]", "[CLS] e [SEP] f [SEP]"]
    assert encoded.item_of_row.tolist() == [0, 1]
    assert encoded.batch.lengths.tolist() == [7, 5]
    # An answer may be in the context; [CLS] stands for no answer.
    assert encoded.candidates.tolist() == [bool(int(digit)) for digit in "100011010010"]


def test_long_context_is_split_into_overlapping_windows(by_letter: Tokenizer) -> None:
    context = " ".join("cdefghijklmnopqrs")
    encoded = encode(by_letter, [{"question": "a b", "context": context}, {"question": "a", "context": "z"}])
    # 16 tokens minus three special ones and two of the question leave 11; half a window, 8, is shared.
    assert rows(encoded) == [
        "[CLS] a b [SEP] c d e f g h i j k l m [SEP]",
        "[CLS] a b [SEP] f g h i j k l m n o p [SEP]",
        "[CLS] a b [SEP] i j k l m n o p q r s [SEP]",
        "[CLS] a [SEP] z [SEP]",
    ]
    assert (encoded.item_of_row.tolist(), encoded.items, encoded.truncated) == ([0, 0, 0, 1], 2, ())
    types = np.split(encoded.batch.values["token_type_ids"], np.cumsum(encoded.batch.lengths)[:-1])
    assert [row.tolist() for row in types] == [[0] * 4 + [1] * 12] * 3 + [[0] * 3 + [1] * 2]
    # Offsets count from the start of the context.
    assert encoded.encodings[2].offsets[4] == (12, 13)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"max_seq_len": 8, "doc_stride": 0}, ["[CLS] a [SEP] b c d e [SEP]", "[CLS] a [SEP] f [SEP]"]),
        (
            {"max_seq_len": 7, "doc_stride": 2},
            ["[CLS] a [SEP] b c d [SEP]", "[CLS] a [SEP] c d e [SEP]", "[CLS] a [SEP] d e f [SEP]"],
        ),
        ({"max_seq_len": 9, "doc_stride": 4}, ["[CLS] a [SEP] b c d e f [SEP]"]),
    ],
)
def test_window_options_set_length_and_overlap(
    by_letter: Tokenizer, keywords: dict[str, object], expected: list[str]
) -> None:
    assert rows(encode(by_letter, {"question": "a", "context": "b c d e f"}, **keywords)) == expected


def test_windows_of_a_left_truncating_tokenizer(tokenizer_file: Path) -> None:
    tokenizer = letters(tokenizer_file, truncates_left=True)
    query = {"question": "a b c", "context": "d e f g h"}
    assert rows(encode(tokenizer, query, max_seq_len=9, doc_stride=1)) == [
        "[CLS] a b c [SEP] f g h [SEP]",
        "[CLS] a b c [SEP] d e f [SEP]",
    ]
    assert rows(encode(tokenizer, query, max_question_len=2)) == ["[CLS] b c [SEP] d e f g h [SEP]"]


def test_context_comes_first_with_left_padding(tokenizer_file: Path) -> None:
    tokenizer = letters(tokenizer_file, pads_left=True)
    encoded = encode(tokenizer, {"question": "a", "context": "b c d e"}, max_seq_len=6, doc_stride=1)
    assert rows(encoded) == ["[CLS] b c [SEP] a [SEP]", "[CLS] c d [SEP] a [SEP]", "[CLS] d e [SEP] a [SEP]"]
    assert encoded.candidates.all()


@pytest.mark.parametrize(("limit", "kept"), [(1, "a"), (2, "a b"), (4, "a b c d"), (5, "a b c d e"), (9, "a b c d e")])
def test_question_is_truncated_to_max_question_len(by_letter: Tokenizer, limit: int, kept: str) -> None:
    encoded = encode(by_letter, {"question": "a b c d e", "context": "x y"}, max_question_len=limit)
    assert rows(encoded) == [f"[CLS] {kept} [SEP] x y [SEP]"]
    assert not encoded.encodings[0].overflowing


def test_long_question_is_not_truncated_if_it_fits(by_letter: Tokenizer) -> None:
    question = " ".join("abcdefghijk")
    assert rows(encode(by_letter, {"question": question, "context": "x y"})) == [f"[CLS] {question} [SEP] x y [SEP]"]
    ask = [{"question": "a", "context": "b"}, {"question": question, "context": "x y z"}]
    with pytest.raises(InputError, match="question 2 has 11 tokens, which leaves 2 for its context in windows of 16"):
        encode(by_letter, ask)
    assert len(rows(encode(by_letter, ask, doc_stride=1))) == 3
    with pytest.raises(InputError, match=r"question 1 has 40 tokens, which leaves 0 .*max_question_len"):
        encode(by_letter, {"question": "a " * 40, "context": "x"})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_seq_len": 17}, "max_seq_len is 17, but the model takes 16 tokens"),
        ({"doc_stride": 17}, "doc_stride is 17, more than a window of 16 tokens holds"),
        ({"max_seq_len": 8, "doc_stride": 9}, "doc_stride is 9, more than a window of 8"),
        ({"max_seq_len": 3}, "leaves 0 for its context"),
        ({"doc_stride": 12}, "leaves 12 for its context in windows of 16 that share 12"),
    ],
)
def test_impossible_windows_are_rejected(by_letter: Tokenizer, keywords: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode(by_letter, {"question": "a", "context": "b " * 20}, **keywords)


def test_too_many_windows_are_rejected(by_letter: Tokenizer) -> None:
    ask = {"question": "a", "context": "b " * 150_000}
    with pytest.raises(
        InputError, match=r"context 1 has 150000 tokens, which makes 149989 windows of 16, more than the limit"
    ):
        encode(by_letter, ask, doc_stride=11)
    assert len(encode(by_letter, ask, doc_stride=0).batch) == 12_500


def byte_level(space_in_front: bool) -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "<pad>", "</s>", *alphabet, "Ġc", "Ġca", "Ġcat"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = FastTokenizer(models.BPE(vocabulary, [("Ġ", "c"), ("Ġc", "a"), ("Ġca", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space_in_front)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, space_in_front)
    backend.add_special_tokens(["<s>", "</s>", "<new>"])
    return backend


@pytest.mark.parametrize("space_in_front", [True, False])
def test_joined_texts_equal_an_encoded_pair(space_in_front: bool) -> None:
    """Byte-level post-processing removes spaces from offsets, which must happen once."""
    tokenizer = Tokenizer(byte_level(space_in_front), TokenizerSpec(BOTH, max_length=200))
    for pair in [("a cat", "the  cat sat"), (" cat", " cat cat"), ("🐈 <new>cat", "x<s> cat\n cat"), ("a", "\u0000")]:
        joined = tokenizer.join(*tokenizer.encode_whole(pair))
        expected = tokenizer.encode([pair], is_traced=True).encodings[0]
        for name in ("ids", "tokens", "offsets", "word_ids", "sequence_ids", "special_tokens_mask", "type_ids"):
            assert getattr(joined, name) == getattr(expected, name)


def test_encode_whole_ignores_the_limit(by_letter: Tokenizer) -> None:
    [encoding] = by_letter.encode_whole(["a " * 1000])
    assert (len(encoding), encoding.overflowing) == (1000, [])


# --- answers


def test_best_span_is_the_answer(by_letter: Tokenizer) -> None:
    # [CLS] a [SEP] x y z [SEP]
    assert answer(by_letter, "a", "x y z", (0, 4, 5, 9.0)) == (100, 2, 5, "y z")


def test_answers_come_from_the_context_only(by_letter: Tokenizer) -> None:
    spans = [(0, 0, 0, 30.0), (0, 1, 1, 30.0), (0, 2, 2, 30.0), (0, 6, 6, 30.0)]
    # [CLS] is part of the softmax; other tokens are not.
    assert answer(by_letter, "a", "x y z", *spans, (0, 3, 3, 29.0)) == (7, 0, 1, "x")


def test_answer_does_not_end_before_it_starts(by_letter: Tokenizer) -> None:
    encoded = encode(by_letter, {"question": "a", "context": "x y z"})
    logits = logits_for(encoded)
    logits["start_logits"][5] = logits["end_logits"][3] = 9.0
    [actual] = TASK.decode(logits, encoded, TASK.options(SPEC, {}))
    assert (actual["start"], actual["end"]) in {(0, 1), (4, 5)}


def test_answer_length_is_bounded(by_letter: Tokenizer) -> None:
    spans = [(0, 3, 5, 9.0), (0, 4, 4, 5.0)]
    assert answer(by_letter, "a", "x y z", *spans)[1:] == (0, 5, "x y z")
    assert answer(by_letter, "a", "x y z", *spans, max_answer_len=3)[1:] == (0, 5, "x y z")
    assert answer(by_letter, "a", "x y z", *spans, max_answer_len=2)[1:] in {(0, 3, "x y"), (2, 5, "y z")}


def test_top_k_returns_several_answers(by_letter: Tokenizer) -> None:
    actual = answer(by_letter, "a", "x y z", (0, 3, 3, 2.0), (0, 5, 5, 1.0), top_k=3)
    # e² and e¹ over their sum, for start and end.
    assert actual == [(53, 0, 1, "x"), (20, 0, 5, "x y z"), (7, 4, 5, "z")]


def test_missing_answers_are_filled_with_the_empty_one(by_letter: Tokenizer) -> None:
    assert answer(by_letter, "a", "x", (0, 3, 3, 9.0), top_k=5) == [(100, 0, 1, "x"), (0, 0, 0, "")]


def test_answers_that_differ_in_case_are_merged(by_letter: Tokenizer) -> None:
    """Capital letters are unknown tokens of this tokenizer."""
    actual = answer(by_letter, "a", "x y X", (0, 3, 3, 2.0), (0, 5, 5, 2.0), max_answer_len=1, top_k=2)
    assert actual == [(50, 0, 1, "x"), (0, 2, 3, "y")]


def test_scores_of_windows_add_up_at_the_first_position(by_letter: Tokenizer) -> None:
    # [CLS] a [SEP] b c d [SEP], [CLS] a [SEP] c d e [SEP]
    spans = [(0, 5, 5, 9.0), (1, 4, 4, 9.0)]
    assert answer(by_letter, "a", "b c d e", *spans, max_seq_len=7, doc_stride=2) == (200, 4, 5, "d")


def test_no_answer_score_is_the_minimum_over_windows(by_letter: Tokenizer) -> None:
    spans = [(0, 0, 0, 9.0), (1, 0, 0, 1.0), (1, 3, 3, 1.0)]
    how = {"max_seq_len": 7, "doc_stride": 2, "handle_impossible_answer": True, "top_k": 2}
    assert answer(by_letter, "a", "b c d e", *spans, **how)[0] == (25, 2, 3, "c")
    assert (25, 0, 0, "") in answer(by_letter, "a", "b c d e", *spans, **how)
    spans = [(0, 0, 0, 9.0), (1, 0, 0, 9.0)]
    assert answer(by_letter, "a", "b c d e", *spans, **{**how, "top_k": 1}) == (100, 0, 0, "")


def test_cls_token_in_the_question_is_a_candidate_as_in_the_pipeline(by_letter: Tokenizer) -> None:
    by_letter._backend.add_special_tokens(["[CLS]"])
    encoded = encode(by_letter, {"question": "a [CLS]", "context": "x y"})
    assert rows(encoded) == ["[CLS] a [CLS] [SEP] x y [SEP]"]
    assert np.flatnonzero(encoded.candidates).tolist() == [0, 2, 4, 5]
    # It is the second word of the question, so it points to the second word of the context.
    assert answer(by_letter, "a [CLS]", "x y", (0, 2, 2, 9.0)) == (100, 2, 3, "y")


def test_answers_align_to_words_on_request() -> None:
    backend = FastTokenizer(
        models.WordPiece({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "ber": 3, "##lin": 4}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer = Tokenizer(backend, TokenizerSpec(BOTH, 32, cls_id=1))
    # [CLS] ? [SEP] ber ##lin ! [SEP]
    assert answer(tokenizer, "?", "berlin!", (0, 4, 4, 9.0)) == (100, 0, 6, "berlin")
    assert answer(tokenizer, "?", "berlin!", (0, 4, 4, 9.0), align_to_words=False) == (100, 3, 6, "lin")
    assert answer(tokenizer, "?", "🙂 berlin", (0, 4, 5, 9.0)) == (100, 2, 8, "berlin")


def test_context_without_tokens_has_the_empty_answer(by_letter: Tokenizer) -> None:
    by_letter._backend.normalizer = normalizers.Replace("z", "")  # as BERT's removes control characters
    encoded = encode(by_letter, {"question": "a", "context": "z"})
    assert rows(encoded) == ["[CLS] a [SEP] [SEP]"]
    outputs = logits_for(encoded)
    nothing = {"score": 0.0, "start": 0, "end": 0, "answer": ""}
    for keywords in ({}, {"align_to_words": False}):
        assert TASK.decode(outputs, encoded, TASK.options(SPEC, keywords)) == [nothing]
    impossible = TASK.options(SPEC, {"handle_impossible_answer": True})
    assert TASK.decode(outputs, encoded, impossible) == [{**nothing, "score": 1.0}]
    assert TASK.agree(outputs, outputs, encoded, SPEC).value == 1.0
    assert scored(TASK, outputs, encoded, [("x",)], SPEC).value == 0.0


def test_items_do_not_mix(by_letter: Tokenizer) -> None:
    payload = [{"question": "a", "context": "b c d e f"}, {"question": "a", "context": "x y"}]
    encoded = encode(by_letter, payload, max_seq_len=7, doc_stride=0)
    assert encoded.item_of_row.tolist() == [0, 0, 1]
    actual = TASK.decode(logits_for(encoded, (1, 3, 4, 9.0), (2, 3, 3, 9.0)), encoded, TASK.options(SPEC, {}))
    assert [span["answer"] for span in actual] == ["e f", "x"]
    assert list(actual[0]) == ["score", "start", "end", "answer"]
    assert [type(value) for value in actual[0].values()] == [float, int, int, str]


def test_rows_of_another_task_are_rejected(by_letter: Tokenizer) -> None:
    tokens = by_letter.encode([("a", "b")])
    encoded = Encoded(tokens.batch, np.arange(1), 1, (), tokens.encodings)
    outputs = {name: np.zeros(5, np.float32) for name in TASK.outputs}
    with pytest.raises(TypeError, match="needs the result of this task's encode"):
        TASK.decode(outputs, encoded, TASK.options(SPEC, {}))


# --- data


def test_sample_has_short_and_long_contexts_and_many_questions() -> None:
    sample = TASK.sample(sample_texts(), SPEC)
    assert len({row["question"] for row in sample}) >= 10
    lengths = [len(str(row["context"])) for row in sample]
    # At five characters per token longer than a window of 384; at two much shorter.
    assert sum(length > 5 * 384 for length in lengths) >= 3
    assert sum(length < 2 * 100 for length in lengths) >= 100


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"text": ["x", "x y"], "answer_start": [0, 0]}, ("x", "x y")),
        ({"text": [], "answer_start": []}, ()),
        ([{"text": "x", "answer_start": 0}, {"text": "y"}], ("x", "y")),
        (["x"], ("x",)),
        ([], ()),
    ],
)
def test_reference_answers_are_read_in_every_format(answers: object, expected: tuple[str, ...]) -> None:
    assert TASK.gold([{"question": "a", "context": "x y", "answers": answers}], SPEC) == [expected]


def test_rows_without_answers_have_no_gold() -> None:
    assert TASK.gold([{"question": "a", "context": "x"}], SPEC) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, 'row 2 has no "answers", but other rows have some'),
        ({"answers": "x"}, 'row 2 must have a list of texts in "answers"'),
        ({"answers": {"text": "x"}}, "row 2 must have a list"),
        ({"answers": {"answer_start": [0]}}, "row 2 must have a list"),
        ({"answers": [7]}, "an answer of row 2 is int, not a string"),
        ({"answers": [{"answer_start": 0}]}, "an answer of row 2 is NoneType"),
    ],
)
def test_invalid_gold_is_rejected_by_row(row: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.gold([{"answers": ["x"]}, row], SPEC)


PAYLOAD = [{"question": "a", "context": "p q r"}, {"question": "a", "context": "x y z"}]


def test_metric_equals_squad(by_letter: Tokenizer) -> None:
    encoded = encode(by_letter, PAYLOAD)
    outputs = logits_for(encoded, (0, 3, 3, 5.0), (1, 4, 5, 5.0))
    metric = scored(TASK, outputs, encoded, [("p", "q"), ("z",)], SPEC)
    assert (metric.name, metric.rows) == ("F1", 2)
    assert metric.value == pytest.approx((1 + 2 / 3) / 2)
    assert metric.other_metrics == {"exact match": 0.5}


def test_empty_answer_is_allowed_only_if_some_questions_have_none(by_letter: Tokenizer) -> None:
    encoded = encode(by_letter, PAYLOAD)
    # The best answer to the first question is empty; to the second it is "y z", and the empty one ranks second.
    outputs = logits_for(encoded, (0, 0, 0, 8.0), (0, 3, 3, 5.0), (1, 0, 0, 4.0), (1, 4, 5, 5.0))
    assert scored(TASK, outputs, encoded, [("p",), ("y z",)], SPEC).value == 1.0
    assert scored(TASK, outputs, encoded, [(), ("y z",)], SPEC).value == 1.0
    assert scored(TASK, outputs, encoded, [("p",), ()], SPEC).value == 0.0


def test_scored_answer_has_the_greatest_logits_and_at_most_30_tokens(tokenizer_file: Path) -> None:
    tokenizer = letters(tokenizer_file, max_length=80)
    context = " ".join("abcdefghijklmnopqrstuvwxyz" * 4)
    encoded = encode(tokenizer, {"question": "a", "context": context})
    assert len(encoded.batch) > 1
    # Alone in its window, the weaker span has the whole softmax, but its logits are smaller.
    outputs = logits_for(encoded, (0, 3, 32, 6.0), (0, 40, 40, 5.9), (1, 10, 10, 5.0))
    assert scored(TASK, outputs, encoded, [(context[:59],)], SPEC).other_metrics == {"exact match": 1.0}
    outputs = logits_for(encoded, (0, 3, 33, 6.0), (1, 10, 10, 5.0))
    assert scored(TASK, outputs, encoded, [(context[:61],)], SPEC).other_metrics == {"exact match": 0.0}


# --- agreement


def test_same_outputs_agree(by_letter: Tokenizer) -> None:
    encoded = encode(by_letter, PAYLOAD)
    numbers = np.random.default_rng(0)
    outputs = {name: numbers.normal(size=encoded.batch.tokens).astype(np.float32) for name in TASK.outputs}
    agreement = TASK.agree(outputs, outputs, encoded, SPEC)
    assert (agreement.measure, agreement.value, agreement.flips, agreement.rows) == ("same span", 1.0, 0, 2)
    assert (agreement.max_error, agreement.relative_error, agreement.rank_correlation) == (0.0, 0.0, 1.0)
    assert agreement.cosine_min == pytest.approx(1.0)
    assert agreement.is_finite


def test_agreement_counts_questions_and_ignores_unused_logits(by_letter: Tokenizer) -> None:
    payload = [*PAYLOAD, {"question": "a", "context": "k l m n o p q r s t u v w"}]
    encoded = encode(by_letter, payload)
    assert encoded.item_of_row.tolist() == [0, 1, 2, 2]
    theirs = logits_for(encoded, (0, 3, 3, 5.0), (1, 4, 4, 5.0), (2, 4, 4, 5.0))
    ours = {name: values.copy() for name, values in theirs.items()}
    ours["start_logits"][1] = 40.0  # a token of the first question
    ours["end_logits"][4] += 0.25  # an error that flips nothing
    ours["start_logits"][7 + 4], ours["start_logits"][7 + 3] = -9.0, 5.0  # "x y" instead of "y"
    agreement = TASK.agree(ours, theirs, encoded, SPEC)
    assert (agreement.flips, agreement.rows, agreement.worst) == (1, 3, (1, 0, 2))
    assert agreement.value == pytest.approx(2 / 3)
    assert (agreement.max_error, agreement.scale) == (14.0, 9.0)
    seen = [7, 10, 11, 12]  # [CLS] x y z
    one, other = (np.concatenate([keywords[name][seen] for name in TASK.outputs]) for keywords in (ours, theirs))
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert agreement.cosine_min == pytest.approx(cosine)
    assert agreement.cosine_mean == pytest.approx((2 + cosine) / 3, abs=1e-3)


def test_non_finite_outputs_never_agree_but_can_be_scored(by_letter: Tokenizer) -> None:
    encoded = encode(by_letter, [*PAYLOAD, {"question": "a", "context": "u"}])
    theirs = logits_for(encoded, (0, 3, 3, 5.0), (1, 4, 4, 5.0))
    ours = {name: values.copy() for name, values in theirs.items()}
    ours["start_logits"][7 + 3] = np.nan
    ours["end_logits"][14:] = np.inf
    agreement = TASK.agree(ours, theirs, encoded, SPEC)
    assert not agreement.is_finite
    assert (agreement.value, agreement.rows, agreement.worst) == (0.0, 3, (1, 2))
    assert scored(TASK, ours, encoded, [("p",), ("y",), ("v",)], SPEC).value == pytest.approx(2 / 3)
    everything = {name: np.full_like(values, np.nan) for name, values in theirs.items()}
    assert 0.0 <= scored(TASK, everything, encoded, [("p",), ("y",), ()], SPEC).value <= 1.0
    actual = TASK.decode(everything, encoded, TASK.options(SPEC, {"top_k": 2}))
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual


def test_span_found_in_another_window_is_the_same(by_letter: Tokenizer) -> None:
    payload = {"question": "a", "context": " ".join("klmnopqrstuvw")}
    encoded = encode(by_letter, payload)
    second = encoded.encodings[1].offsets[4]
    there = next(index for index, offsets in enumerate(encoded.encodings[0].offsets) if index > 2 and offsets == second)
    agreement = TASK.agree(
        logits_for(encoded, (0, there, there, 9.0)), logits_for(encoded, (1, 4, 4, 9.0)), encoded, SPEC
    )
    assert agreement.value == 1.0
