"""What is looked up is what the library would have made of it."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from hasten.core import words
from hasten.core.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.words import Words

LETTERS = "aAbBeé中\u0301İß1.,'#[]"
# Of all kinds: that are one to some and none to others, that nobody sees, and that are taken out.
SPACES = " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u200b\u2028\u3000\ufeff\x00\x7f\ufffd"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abeβ中1.,'#[]ß", "##a", "##b", "##e", "##1", "ab", "ba"]


def backend(*, lowercase: bool = True, added: tuple[AddedToken, ...] = ()) -> FastTokenizer:
    vocabulary = {token: place for place, token in enumerate(VOCABULARY)}
    made = FastTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=20))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.add_special_tokens(VOCABULARY[:5])
    made.add_tokens(list(added))
    return made


def spec(length: int = 12, *, cuts_left: bool = False) -> TokenizerSpec:
    return TokenizerSpec(("input_ids", "token_type_ids"), length, truncates_left=cuts_left)


BOTH = [
    Tokenizer(backend(lowercase=lowercase), spec(cuts_left=cuts_left))
    for lowercase, cuts_left in product([True, False], [True, False])
]


def told(tokenizer: Tokenizer, texts: Any, *, is_traced: bool) -> Any:
    tokens = tokenizer.encode(texts, is_traced=is_traced)
    columns = {name: column.tolist() for name, column in tokens.batch.values.items()}
    return columns, tokens.batch.lengths.tolist(), tokens.truncated


texts = st.text(LETTERS + "     " + SPACES, max_size=60) | st.text(LETTERS + "   ", max_size=60) | st.text(max_size=30)


@given(st.lists(texts | st.tuples(texts, texts), max_size=4))
def test_texts_become_what_the_library_makes_of_them(some: list[Any]) -> None:
    for tokenizer in BOTH:
        expected = told(tokenizer, some, is_traced=True)
        # At first some words are new, then all that are are learnt, and at last they are known.
        assert told(tokenizer, some, is_traced=False) == expected
        with patch.object(words, "_PER_LEARNT", 1):
            assert [told(tokenizer, some, is_traced=False) for _ in range(2)] == [expected] * 2


def looked_up(text: str, **how: Any) -> bool:
    found = Words.of(backend(**how))
    with patch.object(words, "_PER_LEARNT", 1):
        return found is not None and found.ids(text) is not None


def test_which_texts_are_looked_up() -> None:
    assert looked_up("")
    assert looked_up("A ba, 'é' 中\n\tab")
    # One of a token that is found before words are, one that is taken out of a word, one that is too long to keep.
    for text in ("a [MASK] b", "a\x00b", "a b\u200b", "a " + "b" * 33):
        assert not looked_up(text)


@pytest.mark.parametrize("content", ["ab", " x", "1", "= x"])
def test_a_token_that_any_text_may_hold_leaves_all_to_the_library(content: str) -> None:
    assert looked_up("a")
    assert not looked_up("a", added=(AddedToken(content),))


def test_where_a_word_depends_on_more_than_itself_all_is_left_to_the_library() -> None:
    others: list[tuple[str, Any]] = [
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("normalizer", normalizers.NFKC()),
        ("normalizer", normalizers.BertNormalizer(clean_text=False)),
        ("model", models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]")),
    ]
    for part, other in others:
        made = backend()
        setattr(made, part, other)
        assert Words.of(made) is None
    assert Words.of(FastTokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))) is None


def test_without_a_token_for_the_unknown_a_known_word_has_an_answer() -> None:
    made = backend()
    made.model = models.WordPiece({"b": 0, "[CLS]": 2, "[SEP]": 3}, unk_token="?")
    assert told(Tokenizer(made, spec()), ["b b"], is_traced=False)[0]["input_ids"] == [2, 0, 0, 3]


def test_words_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MOST", 3)
    found = Words.of(backend())
    assert found is not None
    for text in ("a", "b", "a b", "a b ab", "a b ba", "e e e", "a", "a b e 1 ab " * 100):
        ids = found.ids(text)
        assert ids in (None, backend().encode(text, add_special_tokens=False).ids)
        assert len(found._known) <= 3


def test_of_a_text_that_is_mostly_new_a_few_words_are_learnt_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Words.of(backend())
    assert found is not None
    text = " ".join(f"a{number}" for number in range(24))
    known = []
    while found.ids(text) is None:
        known.append(len(found._known))
    assert (known, len(found._known)) == (list(range(1, 13)), 24)
    monkeypatch.setattr(words, "_MOST_LEARNT", 2)
    assert found.ids(text.replace("a", "b")) is None
    assert len(found._known) == 24 + 1
    assert found.ids(f"{text} b1 b2 b3") is None
    assert len(found._known) == 24 + 3


def test_new_words_are_all_that_is_asked_for() -> None:
    found = Words.of(backend())
    assert found is not None
    known = found.ids("a")
    assert known is not None
    asked = found._bare = MagicMock(wraps=found._bare)
    assert found.ids("a a b a") == [*known * 2, *backend().encode("b", add_special_tokens=False).ids, *known]
    asked.encode.assert_called_once_with(["b"], is_pretokenized=True, add_special_tokens=False)


def test_a_frame_that_leaves_no_room() -> None:
    for length in (2, 3):
        tokenizer = Tokenizer(backend(), spec(length))
        assert told(tokenizer, ["a b e"], is_traced=False) == told(tokenizer, ["a b e"], is_traced=True)
