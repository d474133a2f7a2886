"""Text to rows of token ids, with the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from hasten.core.errors import BundleError
from hasten.core.tensors import Batch
from hasten.core.words import Words

# More texts at once are left to the library, which shares them out to all cores and lets other threads go on meanwhile.
_FEW = 16
# Which attribute of an encoding feeds which input of a model.
_COLUMNS = {"input_ids": "ids", "token_type_ids": "type_ids"}

# What transformers' clean_up_tokenization_spaces does, one after the other.
_TIDIED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {short}", short) for short in ("n't", "'m", "'s", "'ve", "'re")),
)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What `tokenizer.json` does not say."""

    inputs: tuple[str, ...]
    max_length: int
    pad_id: int = 0
    truncates_left: bool = False
    # Whether transformers takes out spaces before punctuation when it makes text of tokens.
    tidies_spaces: bool = False
    pads_left: bool = False
    # The token that opens a row and stands for all of it, where the tokenizer calls one so.
    cls_id: int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Unpadded rows, and which of them had to be cut to the model's limit."""

    batch: Batch
    truncated: tuple[int, ...]
    # Where texts were traced.
    encodings: Sequence[Encoding]


class _Row(NamedTuple):
    """What is read of an encoding, by the library's names."""

    ids: list[int]
    type_ids: list[int]
    is_cut: bool

    @classmethod
    def of(cls, encoding: Encoding) -> _Row:
        return cls(encoding.ids, encoding.type_ids, bool(encoding.overflowing))


class Tokenizer:
    def __init__(self, backend: FastTokenizer, spec: TokenizerSpec) -> None:
        # Files in the wild pad to a fixed length and truncate elsewhere (all-MiniLM: 128); neither is wanted here.
        backend.no_padding()
        side = "left" if spec.truncates_left else "right"
        backend.enable_truncation(spec.max_length, strategy="longest_first", direction=side)
        self._backend = backend
        self.spec = spec

    @classmethod
    def open(cls, file: Path, spec: TokenizerSpec) -> Tokenizer:
        try:
            return cls(FastTokenizer.from_file(str(file)), spec)
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise BundleError(f"{file} is not a tokenizer: {error}") from error

    def encode(self, texts: Sequence[str | tuple[str, str]], *, is_traced: bool = False) -> Tokens:
        """One row per text or pair of texts; traced, encodings say from where in a text tokens are, which is slower."""
        if is_traced:
            return self._tokens(self._backend.encode_batch(list(texts)))
        rows = [self._looked_up(text) for text in texts] if len(texts) <= _FEW else [None] * len(texts)
        unknown = [text for text, row in zip(texts, rows, strict=True) if row is None]
        encodings = iter(self._backend.encode_batch_fast(unknown) if unknown else ())
        found = [row or _Row.of(next(encodings)) for row in rows]
        return Tokens(self._batch(found), tuple(place for place, row in enumerate(found) if row.is_cut), ())

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> Tokens:
        """One row per sentence that is already cut into words."""
        return self._tokens(self._backend.encode_batch([list(words) for words in sentences], is_pretokenized=True))

    def encode_whole(self, texts: Sequence[str]) -> list[Encoding]:
        """Texts as they are: nothing cut, no special tokens. For tasks that cut and join in ways of their own."""
        return self._unfinished.encode_batch(list(texts), add_special_tokens=False)

    def join(self, first: Encoding, second: Encoding | None = None) -> Encoding:
        """One row of parts that fit together, with the special tokens around them."""
        return self._backend.post_process(first, second)

    def join_each(self, first: Encoding, seconds: Sequence[Encoding]) -> Tokens:
        """A row for each second, all with the same first, which alone is cut: each second must leave it some room."""
        room = self.spec.max_length - self.special_tokens(is_pair=True)
        by_length: dict[int, list[int]] = {}
        for row, second in enumerate(seconds):
            by_length.setdefault(len(second), []).append(row)
        batches: list[Batch] = []
        truncated: list[int] = []
        for length, rows in by_length.items():
            is_cut = len(first) + length > room
            truncated += rows if is_cut else ()
            joined = self.join(self.cut(first, room - length) if is_cut else first, seconds[rows[0]])
            # Seconds of one length make rows that differ in their own tokens alone: ten thousand need a few joins.
            columns = {
                name: np.tile(np.array(getattr(joined, column), np.int32), (len(rows), 1))
                for name, column in _COLUMNS.items()
            }
            is_second = [sequence == 1 for sequence in joined.sequence_ids]
            columns["input_ids"][:, is_second] = [seconds[row].ids for row in rows]
            values = {name: columns[name].ravel() for name in self.spec.inputs}
            batches.append(Batch(values, np.full(len(rows), len(joined), np.int32)))
        order = np.argsort(np.concatenate(list(by_length.values())))
        return Tokens(Batch.concatenate(batches).take(order), tuple(sorted(truncated)), ())

    def cut(self, encoding: Encoding, length: int) -> Encoding:
        """Its first tokens, or its last where the model reads those."""
        rest = Encoding.merge([encoding], growing_offsets=False)
        # Cut from the other end, and keep what is cut off: what `truncate` leaves drags the rest along into every join.
        rest.truncate(len(encoding) - length, direction="right" if self.spec.truncates_left else "left")
        kept = rest.overflowing
        return Encoding.merge(kept if self.spec.truncates_left else kept[::-1], growing_offsets=False)

    def special_tokens(self, *, is_pair: bool) -> int:
        """How many tokens `join` adds."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def tokens(self, encodings: Sequence[Encoding], truncated: Sequence[int] = ()) -> Tokens:
        """Rows of encodings that were joined here."""
        return Tokens(self._batch(encodings), tuple(truncated), encodings)

    def to_text(self, tokens: Sequence[str]) -> str:
        """Tokens put together again, as transformers' convert_tokens_to_string does."""
        decoder = self._backend.decoder
        return decoder.decode(list(tokens)) if decoder is not None else " ".join(tokens)

    def decode(self, ids: Sequence[int], *, skips_special: bool = False) -> str:
        """Token ids as text again, as transformers' decode has it."""
        text = self._backend.decode(list(ids), skip_special_tokens=skips_special)
        if self.spec.tidies_spaces:
            for untidy, tidy in _TIDIED:
                text = text.replace(untidy, tidy)
        return text

    def may_change(self, text: str) -> bool:
        """Whether tokens that follow may change the end of a decoded text: half a character, an untidy space."""
        if text.endswith("\ufffd"):
            return True
        return self.spec.tidies_spaces and any(
            text.endswith(untidy[:size]) for untidy, _ in _TIDIED for size in range(1, len(untidy))
        )

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    @cached_property
    def size(self) -> int:
        """One more than the largest id of a token, added ones included: some vocabularies have gaps."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    @property
    def marks_subwords(self) -> bool:
        """Whether tokens that go on with a word carry a mark of it, as WordPiece's ## does."""
        return bool(getattr(self._backend.model, "continuing_subword_prefix", None))

    @property
    def unknown_id(self) -> int | None:
        # Byte-level and Unigram models do not name their unknown token; transformers calls it one of these.
        names = (getattr(self._backend.model, "unk_token", None), "<unk>", "[UNK]")
        return next((found for name in names if name and (found := self._backend.token_to_id(name)) is not None), None)

    def _batch(self, rows: Sequence[Encoding | _Row]) -> Batch:
        return Batch.from_rows({name: [getattr(row, _COLUMNS[name]) for row in rows] for name in self.spec.inputs})

    def _looked_up(self, text: str | tuple[str, str]) -> _Row | None:
        """What the library would make of it, where that is known."""
        if self._frame is None or not isinstance(text, str):
            return None
        words, before, after = self._frame
        ids = words.ids(text)
        if ids is None:
            return None
        room = self.spec.max_length - len(before) - len(after)
        kept = ids[max(0, len(ids) - room) :] if self.spec.truncates_left else ids[:room]
        row = [*before, *kept, *after]
        return _Row(row, [0] * len(row), len(ids) > room)

    @cached_property
    def _frame(self) -> tuple[Words, list[int], list[int]] | None:
        """Words that can be looked up, and the ids that stand before and after them."""
        words = Words.of(self._unfinished)
        if words is None:
            return None
        sample = self._unfinished.encode("a", add_special_tokens=False)
        whole = self.join(sample)
        size = len(whole) - len(sample)
        before = next(
            (place for place in range(size + 1) if whole.ids[place : place + len(sample)] == sample.ids), None
        )
        if before is None or any(whole.type_ids) or size >= self.spec.max_length:
            return None
        return words, whole.ids[:before], whole.ids[before + len(sample) :]

    def _tokens(self, encodings: Sequence[Encoding]) -> Tokens:
        return self.tokens(encodings, [row for row, encoding in enumerate(encodings) if encoding.overflowing])

    @cached_property
    def _unfinished(self) -> FastTokenizer:
        """The same without its last step, which `join` does: done twice, it moves byte-level offsets twice."""
        backend, bare = self._backend, FastTokenizer(self._backend.model)  # the model is shared, not copied
        if backend.normalizer is not None:
            bare.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            bare.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        bare.add_tokens([added[token_id] for token_id in sorted(added)])
        return bare
