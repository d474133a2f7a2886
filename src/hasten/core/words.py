"""Ids of words that came before: a text of words that are known needs no tokenizer.

BERT's tokenizers cut at every space first, and what becomes of a word depends on the word alone. The library takes some
microseconds for each word, every time. For words apart it takes longer than for a text, so that a text most of which is
new is left to it, and a few of its words are learnt for the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

# Longer ones hardly come twice. When there are too many it begins anew.
_LONGEST, _MOST = 32, 2**16
# Of so many words of a text that is mostly new one is learnt; and of any text no more than so many.
_PER_LEARNT, _MOST_LEARNT = 16, 1024
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
        added = [token.content for token in bare.get_added_tokens_decoder().values()]
        if any(content[:1].isalnum() or any(map(str.isspace, content)) for content in added):
            return None
        return cls(bare)

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
            # Of this moment: other threads learn, and begin anew.
            here = {word: known.get(word) for word in words}
            new = [word for word, ids in here.items() if ids is None]
            is_mostly_new = 2 * len(new) > len(words)
            few = max(1, len(words) // _PER_LEARNT) if is_mostly_new else len(new)
            here |= self._learnt(new[: min(few, _MOST_LEARNT)])
            found = [ids for word in words if (ids := here[word]) is not None]
            if len(found) < len(words):
                return None
        return list(chain.from_iterable(found))

    def _learnt(self, words: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        """All but those that are too long."""
        kept = [word for word in words if len(word) <= _LONGEST]
        encoding = self._bare.encode(kept, is_pretokenized=True, add_special_tokens=False)
        ids: list[list[int]] = [[] for _ in kept]
        for place, token in zip(encoding.word_ids, encoding.ids, strict=True):
            if place is not None:  # as none is: nothing stands around words
                ids[place].append(token)
        found = {word: tuple(tokens) for word, tokens in zip(kept, ids, strict=True)}
        if len(self._known) + len(found) > _MOST:
            self._known.clear()
        self._known.update(found)
        return found
