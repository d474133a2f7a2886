"""Ids of words that came before: a text of words that are known needs no tokenizer.

BERT's tokenizers cut at every space first, and what becomes of a word depends on the word alone. The library takes some
microseconds for each word, every time.
"""

from __future__ import annotations

from itertools import chain

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

# Longer ones hardly come twice. When there are too many it begins anew.
_LONGEST, _MOST = 32, 2**16
_SPACES = str.maketrans("\t\n\r", "   ")


class Words:
    """Any thread's. `bare` neither cuts texts off nor puts tokens around them."""

    def __init__(self, bare: FastTokenizer) -> None:
        self._bare = bare
        # Tokens that are found in a text before it is cut: whoever has a sign of one is none of ours.
        self._signs = sorted({token.content[:1] for token in bare.get_added_tokens_decoder().values()})
        self._known: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, bare: FastTokenizer) -> Words | None:
        """None where a word's tokens may depend on more than the word."""
        normalizer, model = bare.normalizer, bare.model
        is_clean = isinstance(normalizer, BertNormalizer) and normalizer.clean_text
        if not is_clean or not isinstance(bare.pre_tokenizer, BertPreTokenizer) or not isinstance(model, WordPiece):
            return None
        # Some vocabularies have none: then a word that is unknown is an error, of the text that it is in.
        if bare.token_to_id(model.unk_token) is None:
            return None
        words = cls(bare)
        return None if any(sign.isalnum() or sign.isspace() for sign in words._signs) else words

    def ids(self, text: str) -> list[int] | None:
        """None of a text that the tokenizer itself has to see."""
        # What is printable has no other space than the usual one, and nothing that is taken out of words.
        if not text.isprintable():
            text = text.translate(_SPACES)
            if not text.isprintable():
                return None
        for sign in self._signs:
            if sign in text:
                return None
        words, known = text.split(), self._known
        try:
            found = [known[word] for word in words]
        except KeyError:
            if max(map(len, words)) > _LONGEST:
                return None
            found = self._learnt(words)
        return list(chain.from_iterable(found))

    def _learnt(self, words: list[str]) -> list[tuple[int, ...]]:
        unknown = list(dict.fromkeys(words))
        encodings = self._bare.encode_batch_fast(unknown, add_special_tokens=False)
        found = {word: tuple(encoding.ids) for word, encoding in zip(unknown, encodings, strict=True)}
        if len(self._known) + len(found) > _MOST:
            self._known.clear()
        self._known.update(found)
        return [found[word] for word in words]
