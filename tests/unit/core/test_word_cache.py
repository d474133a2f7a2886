"""Looked-up token ids equal those of the tokenizer library."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from hasten.core.text import word_cache
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec
from hasten.core.text.word_cache import WordCache

LETTERS = "aAbBeé中\u0301İß1.,'#[]"
# White space of all kinds: some only by certain definitions, some invisible, some removed by the normalizer.
SPACES = " \t\n\r\x0b\x0c\x1c\x85\xa0\u1680\u200b\u2028\u3000\ufeff\x00\x7f\ufffd"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abeβ中1.,'#[]ß", "##a", "##b", "##e", "##1", "ab", "ba"]


def backend(*, lowercase: bool = True, added: tuple[AddedToken, ...] = ()) -> FastTokenizer:
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    built = FastTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=20))
    built.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    built.add_special_tokens(VOCABULARY[:5])
    built.add_tokens(list(added))
    return built


def spec(length: int = 12, *, truncates_left: bool = False) -> TokenizerSpec:
    return TokenizerSpec(("input_ids", "token_type_ids"), length, truncates_left=truncates_left)


TOKENIZERS = [
    Tokenizer(backend(lowercase=lowercase), spec(truncates_left=truncates_left))
    for lowercase, truncates_left in product([True, False], [True, False])
]


def encoded(tokenizer: Tokenizer, texts: Any, *, is_traced: bool) -> Any:
    tokens = tokenizer.encode(texts, is_traced=is_traced)
    columns = {name: column.tolist() for name, column in tokens.batch.values.items()}
    return columns, tokens.batch.lengths.tolist(), tokens.truncated


texts = st.text(LETTERS + "     " + SPACES, max_size=60) | st.text(LETTERS + "   ", max_size=60) | st.text(max_size=30)


@given(st.lists(texts | st.tuples(texts, texts), max_size=4))
def test_looked_up_tokens_equal_those_of_the_library(batch: list[Any]) -> None:
    for tokenizer in TOKENIZERS:
        expected = encoded(tokenizer, batch, is_traced=True)
        # At first some words are new, then all new ones are cached, and at last all are known.
        assert encoded(tokenizer, batch, is_traced=False) == expected
        with patch.object(word_cache, "_WORDS_PER_ADDED", 1):
            assert [encoded(tokenizer, batch, is_traced=False) for _ in range(2)] == [expected] * 2


def is_looked_up(text: str, **options: Any) -> bool:
    cache = WordCache.of(backend(**options))
    with patch.object(word_cache, "_WORDS_PER_ADDED", 1):
        return cache is not None and cache.ids(text) is not None


def test_texts_with_special_tokens_or_odd_characters_are_not_looked_up() -> None:
    assert is_looked_up("")
    assert is_looked_up("A ba, 'é' 中\n\tab")
    # A special token, characters that the normalizer removes, and a word too long to cache.
    for text in ("a [MASK] b", "a\x00b", "a b\u200b", "a " + "b" * 33):
        assert not is_looked_up(text)


@pytest.mark.parametrize("content", ["ab", " x", "1", "= x"])
def test_added_token_of_plain_characters_disables_the_cache(content: str) -> None:
    assert is_looked_up("a")
    assert not is_looked_up("a", added=(AddedToken(content),))


def test_tokenizer_with_context_dependent_words_has_no_cache() -> None:
    others: list[tuple[str, Any]] = [
        ("pre_tokenizer", pre_tokenizers.Whitespace()),
        ("normalizer", normalizers.NFKC()),
        ("normalizer", normalizers.BertNormalizer(clean_text=False)),
        ("model", models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]")),
    ]
    for part, other in others:
        built = backend()
        setattr(built, part, other)
        assert WordCache.of(built) is None
    assert WordCache.of(FastTokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))) is None


def test_tokenizer_without_unknown_token_encodes_known_words() -> None:
    built = backend()
    built.model = models.WordPiece({"b": 0, "[CLS]": 2, "[SEP]": 3}, unk_token="?")
    assert encoded(Tokenizer(built, spec()), ["b b"], is_traced=False)[0]["input_ids"] == [2, 0, 0, 3]


def test_cache_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_WORDS", 3)
    cache = WordCache.of(backend())
    assert cache is not None
    for text in ("a", "b", "a b", "a b ab", "a b ba", "e e e", "a", "a b e 1 ab " * 100):
        ids = cache.ids(text)
        assert ids in (None, backend().encode(text, add_special_tokens=False).ids)
        assert len(cache._known) <= 3


def test_few_words_of_a_mostly_new_text_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WordCache.of(backend())
    assert cache is not None
    text = " ".join(f"a{number}" for number in range(24))
    known = []
    while cache.ids(text) is None:
        known.append(len(cache._known))
    assert (known, len(cache._known)) == (list(range(1, 13)), 24)
    monkeypatch.setattr(word_cache, "_MAX_ADDED_WORDS", 2)
    assert cache.ids(text.replace("a", "b")) is None
    assert len(cache._known) == 24 + 1
    assert cache.ids(f"{text} b1 b2 b3") is None
    assert len(cache._known) == 24 + 3


def test_only_new_words_are_encoded() -> None:
    cache = WordCache.of(backend())
    assert cache is not None
    known = cache.ids("a")
    assert known is not None
    library = cache._tokenizer = MagicMock(wraps=cache._tokenizer)
    assert cache.ids("a a b a") == [*known * 2, *backend().encode("b", add_special_tokens=False).ids, *known]
    library.encode.assert_called_once_with(["b"], is_pretokenized=True, add_special_tokens=False)


def test_special_tokens_that_fill_the_limit_disable_the_cache() -> None:
    for length in (2, 3):
        tokenizer = Tokenizer(backend(), spec(length))
        assert encoded(tokenizer, ["a b e"], is_traced=False) == encoded(tokenizer, ["a b e"], is_traced=True)
