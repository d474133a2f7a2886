"""Vocabularies of word pieces, and texts of words that no text before has had."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from latency import WORDS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from hasten.bundle import Bundle
from hasten.bundle.read import TOKENIZER

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Together with syllables, about as many pieces as BERT has.
_WORDS = 28_000
_CONSONANTS = ["b", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "st", "tr", "pl", "gr"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
_CODAS = ("", "n", "r", "s", "l", "t")
_MARK = "##"
# Words of one request are looked for among this many.
_CANDIDATES = 20_000


def word_piece_tokenizer() -> Any:
    """Return a BERT tokenizer with a generated vocabulary: the words of the requests, syllables, and pairs of them."""
    syllables = ["".join(parts) for parts in product(_CONSONANTS, _VOWELS, _CODAS)]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789")
    random = np.random.default_rng(0)
    words = ("".join(pair) for pair in random.choice(syllables, (_WORDS, 2)).tolist())
    endings = [_MARK + ending for ending in (*letters, *syllables)]
    pieces = dict.fromkeys([*SPECIAL, *letters, *WORDS.split(), *syllables, *words, *endings])
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token=SPECIAL[1]))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return backend


class UnseenTexts:
    """Texts of new words, each a word of the vocabulary with an ending from it, as rare words are in real text."""

    def __init__(self, bundle: Bundle, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(bundle.path / TOKENIZER))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        self.pieces = len(vocabulary)
        # Sorted, since the order of the vocabulary differs between processes.
        alphabetic = sorted(piece for piece in vocabulary if re.fullmatch(rf"({_MARK})?[a-z]+", piece))
        self._stems = [piece for piece in alphabetic if not piece.startswith(_MARK) and len(piece) > 1]
        self._endings = [piece.removeprefix(_MARK) for piece in alphabetic if piece.startswith(_MARK)]
        self._random = np.random.default_rng(seed)
        self._seen: set[str] = set()
        self._words = self._new_words()

    def take(self, lengths: Sequence[int]) -> list[str]:
        """Return a text per length in tokens, special tokens included; a text may be one token shorter."""
        return [self._text(length - 2) for length in lengths]

    def _text(self, tokens: int) -> str:
        words: list[str] = []
        while tokens > 1 or not words:
            word, pieces = next(self._words)
            if pieces <= tokens:
                words.append(word)
                tokens -= pieces
        return " ".join(words)

    def _new_words(self) -> Iterator[tuple[str, int]]:
        """Yield new words with their numbers of pieces, which are two or more."""
        while True:
            pairs = zip(
                self._random.choice(self._stems, _CANDIDATES).tolist(),
                self._random.choice(self._endings, _CANDIDATES).tolist(),
                strict=True,
            )
            words = [word for word in dict.fromkeys(map("".join, pairs)) if word not in self._seen]
            self._seen.update(words)
            encodings = self._tokenizer.encode_batch(words, add_special_tokens=False)
            counts = ((word, len(encoding.ids)) for word, encoding in zip(words, encodings, strict=True))
            yield from ((word, count) for word, count in counts if count > 1)
