from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from hasten.core.errors import InputError
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.metrics.entities import spans
from hasten.tasks import TASKS, Encoded, TaskSpec
from support.metrics import scored

TASK = TASKS.get("token-classification")
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
SPEC = TaskSpec(TASK.name, LABELS)
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "an", "##na", "##s", "lives", "in", "new", "york", ",", ".")
LIMIT = 12


def finish(backend: FastTokenizer, pieces: Sequence[str], first: str, last: str) -> Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(name, pieces.index(name)) for name in (first, last)]
    )
    return Tokenizer(backend, TokenizerSpec(("input_ids",), max_length=LIMIT))


@pytest.fixture
def word_pieces() -> Tokenizer:
    """Like BERT's: tokens that continue a word have a prefix."""
    backend = FastTokenizer(models.WordPiece({name: i for i, name in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return finish(backend, PIECES, "[CLS]", "[SEP]")


@pytest.fixture
def unigrams() -> Tokenizer:
    """Like XLM-R's: only spaces separate words, and the model does not name its unknown token."""
    pieces = ("<s>", "</s>", "<unk>", "▁an", "na", "▁in", "▁", ",", "▁york")
    backend = FastTokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return finish(backend, pieces, "<s>", "</s>")


def logits_for(*labels: str | dict[str, float]) -> np.ndarray:
    """Return logits with these softmax shares, 0.9 for a bare label, with special tokens around them."""
    rows = [{"B-PER": 1.0}, *({label: 0.9} if isinstance(label, str) else label for label in labels), {"B-LOC": 1.0}]
    shares = np.full((len(rows), len(LABELS)), 0.0)
    for row, keywords in enumerate(rows):
        rest = (1.0 - sum(keywords.values())) / max(1, len(LABELS) - len(keywords))
        shares[row] = [keywords.get(label, rest) for label in LABELS]
    return np.log(np.maximum(shares, 1e-9)).astype(np.float32)


def tag(tokenizer: Tokenizer, payload: object, logits: np.ndarray, **keywords: object) -> object:
    options = TASK.options(SPEC, keywords)
    encoded = TASK.encode(TASK.parse(payload), tokenizer, options)
    assert encoded.batch.tokens == len(logits)
    return TASK.present(payload, TASK.decode({"logits": logits}, encoded, options), options)


def brief(answer: object) -> list[tuple[object, ...]]:
    """Return label, word, start, end and the score in percent."""
    return [
        (
            entry.get("entity", entry.get("entity_group")),
            entry["word"],
            entry["start"],
            entry["end"],
            round(100 * entry["score"]),
        )
        for entry in answer  # type: ignore[attr-defined]
    ]


# --- tokens and entities

ANNA = "Anna lives in New York, York."
#       an ##na lives in new york , york .
ANNA_LABELS = ("B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O", "B-LOC", "O")


def test_token_has_the_fields_of_the_pipeline(word_pieces: Tokenizer) -> None:
    answer = tag(word_pieces, ANNA, logits_for(*ANNA_LABELS))
    score = pytest.approx(0.9, abs=1e-6)
    assert answer[:2] == [  # type: ignore[index]
        {"entity": "B-PER", "score": score, "index": 1, "word": "an", "start": 0, "end": 2},
        {"entity": "I-PER", "score": score, "index": 2, "word": "##na", "start": 2, "end": 4},
    ]
    assert [type(value) for value in answer[0].values()] == [str, float, int, str, int, int]  # type: ignore[index]
    assert [entry["index"] for entry in answer] == [1, 2, 5, 6, 8]  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max", "Simple", "MAX"])
def test_tokens_are_grouped_into_entities(word_pieces: Tokenizer, strategy: str) -> None:
    answer = tag(word_pieces, ANNA, logits_for(*ANNA_LABELS), aggregation_strategy=strategy)
    anna = 46 if strategy == "average" else 90  # B-PER has 0.9 of the first token and 0.025 of the second
    assert brief(answer) == [
        ("PER", "anna", 0, 4, anna),
        ("LOC", "new york", 14, 22, 90),
        ("LOC", "york", 24, 28, 90),
    ]
    assert list(answer[0]) == ["entity_group", "score", "word", "start", "end"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        # in new york
        (("B-LOC", "B-LOC", "I-LOC"), [("LOC", 0, 2), ("LOC", 3, 11)]),
        (("I-LOC", "I-LOC", "I-LOC"), [("LOC", 0, 11)]),
        (("B-LOC", "I-PER", "I-PER"), [("LOC", 0, 2), ("PER", 3, 11)]),
        (("I-LOC", "O", "I-LOC"), [("LOC", 0, 2), ("LOC", 7, 11)]),
        (("O", "O", "O"), []),
    ],
)
def test_entities_start_and_end_by_their_prefixes(
    word_pieces: Tokenizer, labels: tuple[str, ...], expected: list[tuple[str, int, int]]
) -> None:
    answer = tag(word_pieces, "in new york", logits_for(*labels), aggregation_strategy="simple")
    assert [(entry["entity_group"], entry["start"], entry["end"]) for entry in answer] == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("simple", [("PER", "an", 0, 2, 60), ("LOC", "##na", 2, 4, 80), ("PER", "##s", 4, 5, 50)]),
        ("first", [("PER", "annas", 0, 5, 60)]),
        ("max", [("LOC", "annas", 0, 5, 80)]),
        ("average", [("PER", "annas", 0, 5, 43)]),
    ],
)
def test_disagreeing_tokens_of_a_word_are_aggregated(
    word_pieces: Tokenizer, strategy: str, expected: list[tuple[object, ...]]
) -> None:
    logits = logits_for({"B-PER": 0.6, "I-LOC": 0.1}, {"I-LOC": 0.8, "B-PER": 0.2}, {"B-PER": 0.5, "I-LOC": 0.3})
    assert brief(tag(word_pieces, "annas", logits, aggregation_strategy=strategy)) == expected


def test_score_of_an_entity_is_the_mean_of_its_words(word_pieces: Tokenizer) -> None:
    logits = logits_for({"B-LOC": 0.9}, {"I-LOC": 0.5})
    assert brief(tag(word_pieces, "new york", logits, aggregation_strategy="simple")) == [("LOC", "new york", 0, 8, 70)]


def test_unknown_token_keeps_the_spelling_of_the_text_and_starts_a_word(word_pieces: Tokenizer) -> None:
    logits = logits_for("B-PER", "I-PER", "I-PER")
    tokens = tag(word_pieces, "an Zoë,", logits)
    assert [entry["word"] for entry in tokens] == ["an", "Zoë", ","]  # type: ignore[attr-defined]
    logits = logits_for("B-PER", "B-LOC", "B-PER")
    grouped = tag(word_pieces, "an Zoë,", logits, aggregation_strategy="first")
    assert [entry["word"] for entry in grouped] == ["an", "Zoë", ","]  # type: ignore[attr-defined]


def test_spaces_separate_words_without_subword_prefix(unigrams: Tokenizer) -> None:
    """The pipeline's fallback: a comma belongs to the word before it."""
    # ▁an na , ▁york
    logits = logits_for("B-PER", "I-LOC", "I-LOC", "B-LOC")
    assert brief(tag(unigrams, "anna, york", logits, aggregation_strategy="first")) == [
        ("PER", "anna,", 0, 5, 90),
        ("LOC", "york", 5, 10, 90),
    ]


def test_unnamed_unknown_token_keeps_the_spelling_of_the_text(unigrams: Tokenizer) -> None:
    logits = logits_for("B-PER", "B-LOC", "I-LOC")  # ▁an ▁ 🙂
    answer = tag(unigrams, "an 🙂", logits)
    assert [(entry["word"], entry["start"], entry["end"]) for entry in answer][-1] == ("🙂", 3, 4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, ["B-PER", "B-LOC"]),
        ({"ignore_labels": None}, ["B-PER", "B-LOC"]),
        ({"ignore_labels": []}, ["O", "B-PER", "B-LOC"]),
        ({"ignore_labels": ["B-PER"]}, ["O", "B-LOC"]),
        ({"ignore_labels": ["PER"]}, ["O", "B-PER", "B-LOC"]),
        ({"ignore_labels": ["O", "PER"], "aggregation_strategy": "simple"}, ["LOC"]),
        ({"ignore_labels": ["B-LOC"], "aggregation_strategy": "simple"}, ["O", "PER", "LOC"]),
    ],
)
def test_ignored_labels_are_left_out(word_pieces: Tokenizer, keywords: dict[str, object], expected: list[str]) -> None:
    answer = tag(word_pieces, "in new york", logits_for("O", "B-PER", "B-LOC"), **keywords)
    assert [row[0] for row in brief(answer)] == expected


@pytest.mark.parametrize(
    "keywords", [{"aggregation_strategy": "best"}, {"ignore_labels": "O"}, {"ignore_labels": [1]}, {"stride": 4}]
)
def test_invalid_options_are_rejected(keywords: dict[str, object]) -> None:
    with pytest.raises(InputError):
        TASK.options(SPEC, keywords)


def test_words_are_answered_with_offsets_in_the_joined_text(word_pieces: Tokenizer) -> None:
    words = ["Anna", "lives", "in", "New", "York,"]
    labels = ("B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O")
    answer = tag(word_pieces, {"tokens": words}, logits_for(*labels), aggregation_strategy="simple")
    assert brief(answer) == [("PER", "anna", 0, 4, 90), ("LOC", "new york", 14, 22, 90)]
    text = " ".join(words)
    assert [text[entry["start"] : entry["end"]] for entry in answer] == ["Anna", "New York"]  # type: ignore[attr-defined]


def test_answers_have_the_shape_of_the_payload(word_pieces: Tokenizer) -> None:
    one = logits_for("B-LOC")
    for payload in ("york", {"text": "york"}, {"tokens": ["york"]}):
        alone = tag(word_pieces, payload, one)
        assert brief(alone) == [("B-LOC", "york", 0, 4, 90)]
        assert tag(word_pieces, [payload], one) == [alone]
    assert tag(word_pieces, ["york", "in"], np.concatenate([one, logits_for("O")]))[1] == []  # type: ignore[index]


def test_texts_and_words_mixed_keep_their_order(word_pieces: Tokenizer) -> None:
    long = ["in"] * LIMIT
    items = [{"tokens": ["anna"]}, "lives in", {"tokens": long}, {"text": "york"}, " ".join(long)]
    encoded = TASK.encode(TASK.parse(items), word_pieces, TASK.options(SPEC, {}))
    tokens = [encoding.tokens[1:-1] for encoding in encoded.encodings]
    assert tokens == [["an", "##na"], ["lives", "in"], long[:-2], ["york"], long[:-2]]
    assert encoded.batch.values["input_ids"].tolist() == [i for encoding in encoded.encodings for i in encoding.ids]
    assert encoded.batch.lengths.tolist() == [4, 4, LIMIT, 3, LIMIT]
    assert encoded.truncated == (2, 4)


def test_rows_of_another_task_are_rejected(word_pieces: Tokenizer) -> None:
    tokens = word_pieces.encode(["in"])
    encoded = Encoded(tokens.batch, np.arange(1), 1, (), tokens.encodings)
    with pytest.raises(TypeError, match="needs the result of this task's encode"):
        TASK.decode({"logits": logits_for("O")}, encoded, TASK.options(SPEC, {}))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], "no text to process"),
        (["a", " "], "text 2 is empty"),
        (["a", 7], "text 2 is int"),
        ([{"txt": "a"}], 'item 1 has no "text"'),
        (["a", {"tokens": []}], "item 2 has no tokens"),
        ([{"tokens": ["a"]}, {"tokens": ["b", 1]}], "token 2 of item 2 is int, not a string"),
        ({"tokens": "a b"}, '"tokens" of item 1 is str, not a list'),
        ({"tokens": ["", " "]}, "text 1 is empty"),
        ({"tokens": ["a", "\ud800"]}, "text 1 is not valid Unicode"),
        (["a", {"text": "a", "tokens": ["a"]}], 'item 2 has both "text" and "tokens"'),
        (["a", {"text": "a", "text_pair": "b"}], 'item 2 has a "text_pair"'),
    ],
)
def test_invalid_input_is_rejected_with_its_position(payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.parse(payload)


def test_sample_is_plain_texts() -> None:
    assert TASK.sample(["a", "b"], SPEC) == [{"text": "a"}, {"text": "b"}]


# --- gold labels and scores


def test_gold_tags_by_name_or_index() -> None:
    rows = [{"tokens": ["a", "b"], "tags": ["O", "B-PER"]}, {"tokens": ["c"], "tags": [4]}]
    assert TASK.gold(rows, SPEC) == [("O", "B-PER"), ("I-LOC",)]
    assert TASK.gold([{"tokens": ["a"]}, {"text": "b"}], SPEC) is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a"], "tags": ["B-PRE"]}, "row 2 has the tag 'B-PRE', .*did you mean 'B-PER'"),
        ({"tokens": ["a"], "tags": [5]}, "row 2 has the tag 5"),
        ({"tokens": ["a"], "tags": [-1]}, "row 2 has the tag -1"),
        ({"tokens": ["a"], "tags": [True]}, "row 2 has the tag True"),
        ({"tokens": ["a"], "tags": [None]}, "row 2 has the tag None"),
        ({"tokens": ["a", "b"], "tags": ["O"]}, "row 2 has 1 tags for 2 tokens"),
        ({"tokens": ["a"]}, 'row 2 has no "tags"'),
        ({"text": "a", "tags": ["O"]}, 'row 2 must have lists in "tokens" and "tags"'),
    ],
)
def test_invalid_gold_is_rejected_by_row(row: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TASK.gold([{"tokens": ["a"], "tags": ["O"]}, row], SPEC)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O O", set()),
        ("B-PER I-PER O", {("PER", 0, 1)}),
        ("O I-PER I-PER", {("PER", 1, 2)}),
        ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("B-PER I-LOC I-LOC", {("PER", 0, 0), ("LOC", 1, 2)}),
        ("I-PER B-PER I-PER", {("PER", 0, 0), ("PER", 1, 2)}),
        ("B-PER O I-PER", {("PER", 0, 0), ("PER", 2, 2)}),
        ("B-creative-work I-creative-work", {("creative-work", 0, 1)}),
        ("S-PER S-PER B-PER E-PER E-PER", {("PER", 0, 0), ("PER", 1, 1), ("PER", 2, 3), ("PER", 4, 4)}),
        ("B I O B B", {("", 0, 1), ("", 3, 3), ("", 4, 4)}),
        ("NOUN NOUN VERB", {("NOUN", 0, 1), ("VERB", 2, 2)}),
    ],
)
def test_spans_equal_seqeval(tags: str, expected: set[tuple[str, int, int]]) -> None:
    assert spans(tags.split()) == expected


def conlleval(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Find entities of BIO tags independently: split wherever the next tag cannot belong to the same entity."""
    entities = []
    for first, tag in enumerate(tags):
        before = tags[first - 1] if first else "O"
        if tag == "O" or (tag[0] == "I" and before[2:] == tag[2:]):
            continue
        last = first
        while last + 1 < len(tags) and tags[last + 1] == "I-" + tag[2:]:
            last += 1
        entities.append((tag[2:], first, last))
    return entities


def f1(gold: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> float:
    expected = {(row, *entity) for row, tags in enumerate(gold) for entity in conlleval(tags)}
    entities = {(row, *entity) for row, tags in enumerate(answers) for entity in conlleval(tags)}
    precision, recall = len(expected & entities) / len(entities), len(expected & entities) / len(expected)
    return 2 * precision * recall / (precision + recall)


def score(tokenizer: Tokenizer, rows: Sequence[dict[str, object]], logits: np.ndarray) -> float:
    encoded = TASK.encode(TASK.parse(list(rows)), tokenizer, TASK.options(SPEC, {}))
    gold = TASK.gold(rows, SPEC)
    assert gold is not None
    metric = scored(TASK, {"logits": logits}, encoded, gold, SPEC)
    assert (metric.name, metric.rows) == ("entity F1", len(rows))
    return metric.value


def test_entity_f1_equals_an_independent_implementation(word_pieces: Tokenizer) -> None:
    """Gold labels are arbitrary sequences too, so that every odd transition occurs on both sides."""
    chance = random.Random(0)
    rows, answers, logits = [], [], []
    for _ in range(200):
        words = chance.choices(["anna", "in", "york"], k=chance.randint(1, 5))
        tags = chance.choices(LABELS, k=len(words))
        answer = [tag if chance.random() < 0.7 else chance.choice(LABELS) for tag in tags]
        # Only the first token of "anna" counts, whatever the label of the second.
        tokens = [
            label
            for word, tag in zip(words, answer, strict=True)
            for label in ([tag, chance.choice(LABELS)] if word == "anna" else [tag])
        ]
        rows.append({"tokens": words, "tags": tags})
        answers.append(answer)
        logits.append(logits_for(*tokens))
    expected = f1([row["tags"] for row in rows], answers)
    assert 0.3 < expected < 0.8
    assert score(word_pieces, rows, np.concatenate(logits)) == pytest.approx(expected, abs=1e-12)


def test_entity_ends_with_its_row(word_pieces: Tokenizer) -> None:
    rows = [{"tokens": ["york"], "tags": ["B-LOC"]}, {"tokens": ["york"], "tags": ["I-LOC"]}]
    assert score(word_pieces, rows, np.concatenate([logits_for("B-LOC"), logits_for("I-LOC")])) == 1.0
    assert score(word_pieces, rows, np.concatenate([logits_for("B-LOC"), logits_for("O")])) == pytest.approx(2 / 3)


def test_truncated_words_are_outside(word_pieces: Tokenizer) -> None:
    count = LIMIT - 2
    rows = [{"tokens": ["york"] * (count + 3), "tags": ["B-LOC"] * (count + 3)}]
    assert score(word_pieces, rows, logits_for(*["B-LOC"] * count)) == pytest.approx(2 * count / (2 * count + 3))


def test_f1_without_entities_is_zero_as_in_seqeval(word_pieces: Tokenizer) -> None:
    assert score(word_pieces, [{"tokens": ["in"], "tags": ["O"]}], logits_for("O")) == 0.0


# --- agreement


def encode(tokenizer: Tokenizer, *texts: str) -> Encoded:
    return TASK.encode(TASK.parse(texts), tokenizer, TASK.options(SPEC, {}))


def test_same_outputs_agree(word_pieces: Tokenizer) -> None:
    encoded = encode(word_pieces, "anna lives", "in york")
    logits = np.random.default_rng(0).normal(size=(encoded.batch.tokens, len(LABELS))).astype(np.float32)
    agreement = TASK.agree({"logits": logits}, {"logits": logits}, encoded, SPEC)
    assert (agreement.measure, agreement.value, agreement.flips, agreement.rows) == ("same label", 1.0, 0, 5)
    assert (agreement.max_error, agreement.relative_error, agreement.rank_correlation) == (0.0, 0.0, 1.0)
    assert agreement.cosine_min == pytest.approx(1.0)


def test_agreement_counts_tokens_except_special_ones(word_pieces: Tokenizer) -> None:
    encoded = encode(word_pieces, "anna lives", "in new york", "york")
    theirs = np.concatenate([logits_for("O", "O", "O"), logits_for("O", "O", "B-LOC"), logits_for("B-LOC")])
    ours = theirs.copy()
    ours[0] = ours[0, ::-1]  # [CLS], which is ignored
    ours[6] += 0.25  # "in": an error that flips no label
    ours[8, :] = ours[8, [3, 1, 2, 0, 4]]  # "york" of the second text
    agreement = TASK.agree({"logits": ours}, {"logits": theirs}, encoded, SPEC)
    assert (agreement.flips, agreement.rows) == (1, 7)
    assert agreement.value == pytest.approx(6 / 7)
    assert agreement.worst[0] == 1
    assert agreement.max_error == pytest.approx(np.abs(ours[8] - theirs[8]).max())
    assert agreement.scale == pytest.approx(np.abs(theirs[1]).max())
    assert agreement.is_finite


def test_flipped_label_ranks_worse_than_an_error(word_pieces: Tokenizer) -> None:
    encoded = encode(word_pieces, "in", "in", "in", "in")
    theirs = np.tile([[3.0, 2.9, 0, 0, 0]], (encoded.batch.tokens, 1)).astype(np.float32)
    ours = theirs.copy()
    ours[4] = [30, 2.9, 0, 0, 0]
    ours[10] = [2.9, 3.0, 0, 0, 0]
    assert TASK.agree({"logits": ours}, {"logits": theirs}, encoded, SPEC).worst[:2] == (3, 1)


def test_non_finite_outputs_never_agree(word_pieces: Tokenizer) -> None:
    encoded = encode(word_pieces, "anna lives", "in", "new york")
    theirs = np.ones((encoded.batch.tokens, len(LABELS)), np.float32)
    ours = theirs.copy()
    ours[-3:-1] = np.nan
    agreement = TASK.agree({"logits": ours}, {"logits": theirs}, encoded, SPEC)
    assert not agreement.is_finite
    assert (agreement.value, agreement.rows, agreement.worst) == (0.0, 6, (2,))


def test_texts_without_tokens_can_be_compared(word_pieces: Tokenizer) -> None:
    empty = word_pieces.encode([""], is_traced=True)
    encoded = Encoded(empty.batch, np.arange(1), 1, (), empty.encodings)
    logits = logits_for()
    assert TASK.agree({"logits": logits}, {"logits": logits}, encoded, SPEC).value == 1.0
