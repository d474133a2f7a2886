"""Cache of token ids per word, for WordPiece tokenizers.

BERT's tokenizers split at every space first, and the tokens of a word depend on the word alone. The library takes a few
microseconds per word, every time; the cache replaces that with a lookup. Encoding words one by one is slower than
encoding a text, so a text that is mostly new is left to the library, and only a few of its words are cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

# Words longer than this rarely repeat. The cache is cleared when full.
_MAX_WORD_CHARS, _MAX_WORDS = 32, 2**16
# Of a text that is mostly new, one word in this many is added; and of any text, at most this many words.
_WORDS_PER_ADDED, _MAX_ADDED_WORDS = 16, 1024
_SPACES = str.maketrans("\t\n\r", "   ")


class WordCache:
    """Looks up the token ids of texts. Thread-safe. `tokenizer` must neither truncate nor add special tokens."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        # Added tokens are matched before a text is split, so a text with the first character of one is not looked up.
        self._added_starts = sorted({token.content[:1] for token in tokenizer.get_added_tokens_decoder().values()})
        self._known: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, tokenizer: FastTokenizer) -> WordCache | None:
        """Return a cache, or None if the tokens of a word may depend on more than the word."""
        normalizer, model, splitter = tokenizer.normalizer, tokenizer.model, tokenizer.pre_tokenizer
        is_clean = isinstance(normalizer, BertNormalizer) and normalizer.clean_text
        if not is_clean or not isinstance(splitter, BertPreTokenizer) or not isinstance(model, WordPiece):
            return None
        # Without an unknown token, an unknown word is an error that depends on the text around it.
        if tokenizer.token_to_id(model.unk_token) is None:
            return None
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        if any(content[:1].isalnum() or any(map(str.isspace, content)) for content in added):
            return None
        return cls(tokenizer)

    def ids(self, text: str) -> list[int] | None:
        """Return the token ids of a text, or None if the tokenizer itself has to encode it."""
        # Printable text has no other white space than " ", and no characters that the normalizer removes from words.
        if not text.isprintable():
            text = text.translate(_SPACES)
            if not text.isprintable():
                return None
        for start in self._added_starts:
            if start in text:
                return None
        words, known = text.split(), self._known
        try:
            ids_of_words = [known[word] for word in words]
        except KeyError:
            # A snapshot: other threads add words and clear the cache.
            snapshot = {word: known.get(word) for word in words}
            new = [word for word, ids in snapshot.items() if ids is None]
            is_mostly_new = 2 * len(new) > len(words)
            count = max(1, len(words) // _WORDS_PER_ADDED) if is_mostly_new else len(new)
            snapshot |= self._add(new[: min(count, _MAX_ADDED_WORDS)])
            ids_of_words = [ids for word in words if (ids := snapshot[word]) is not None]
            if len(ids_of_words) < len(words):
                return None
        return list(chain.from_iterable(ids_of_words))

    def _add(self, words: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        """Encode and cache the words that are not too long; return them."""
        words = [word for word in words if len(word) <= _MAX_WORD_CHARS]
        encoding = self._tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
        ids: list[list[int]] = [[] for _ in words]
        for index, token in zip(encoding.word_ids, encoding.ids, strict=True):
            if index is not None:  # never None here: there are no special tokens
                ids[index].append(token)
        added = {word: tuple(tokens) for word, tokens in zip(words, ids, strict=True)}
        if len(self._known) + len(added) > _MAX_WORDS:
            self._known.clear()
        self._known.update(added)
        return added
