"""Turn texts into rows of token ids, with the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from hasten.core.errors import BundleError
from hasten.core.tensors import Batch
from hasten.core.text.word_cache import WordCache

# Larger batches go to the library, which spreads them over all cores and releases the GIL meanwhile.
_MAX_CACHED_TEXTS = 16
# The attribute of an encoding that feeds each model input.
_COLUMNS = {"input_ids": "ids", "token_type_ids": "type_ids"}

# The replacements of transformers' clean_up_tokenization_spaces, in order.
_SPACE_CLEANUPS = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {short}", short) for short in ("n't", "'m", "'s", "'ve", "'re")),
)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The tokenizer settings that `tokenizer.json` does not hold."""

    inputs: tuple[str, ...]
    max_length: int
    pad_id: int = 0
    truncates_left: bool = False
    # Whether transformers removes spaces before punctuation when it decodes tokens.
    tidies_spaces: bool = False
    pads_left: bool = False
    # The id of the [CLS] token, if the tokenizer names one.
    cls_id: int | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Unpadded rows, and the indices of those that were truncated to the model's limit."""

    batch: Batch
    truncated: tuple[int, ...]
    # Empty unless the texts were encoded with offsets.
    encodings: Sequence[Encoding]


class _Row(NamedTuple):
    """The fields of an encoding that are read, under the library's names."""

    ids: list[int]
    type_ids: list[int]
    is_truncated: bool

    @classmethod
    def of(cls, encoding: Encoding) -> _Row:
        return cls(encoding.ids, encoding.type_ids, bool(encoding.overflowing))


class Tokenizer:
    """Encodes texts into unpadded rows and decodes token ids. Thread-safe."""

    def __init__(self, backend: FastTokenizer, spec: TokenizerSpec) -> None:
        # Files in the wild pad to a fixed length and truncate elsewhere (all-MiniLM: 128); neither is wanted here.
        backend.no_padding()
        side = "left" if spec.truncates_left else "right"
        backend.enable_truncation(spec.max_length, strategy="longest_first", direction=side)
        self._backend = backend
        self.spec = spec
        self._limited: dict[int, Tokenizer] = {}

    @classmethod
    def open(cls, file: Path, spec: TokenizerSpec) -> Tokenizer:
        """Load a `tokenizer.json`."""
        if unknown := set(spec.inputs) - set(_COLUMNS):
            raise BundleError(f"{file} cannot feed the inputs {', '.join(sorted(unknown))}")
        if not spec.inputs:
            raise BundleError(f"{file} feeds no inputs: the manifest names none")
        try:
            tokenizer = cls(FastTokenizer.from_file(str(file)), spec)
            # A file may be damaged where only a text shows it.
            tokenizer._backend.encode("a")
        except BaseException as error:
            # The library raises bare Exception for every kind of damage, and its panics are not even that.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise BundleError(f"{file} is not a tokenizer: {error}") from error
        return tokenizer

    def limited_to(self, max_length: int | None) -> Tokenizer:
        """Return this tokenizer with another maximum length, copied once; itself for the same length or None."""
        if max_length is None or max_length == self.spec.max_length:
            return self
        if max_length not in self._limited:
            backend = FastTokenizer.from_str(self._backend.to_str())
            self._limited[max_length] = Tokenizer(backend, replace(self.spec, max_length=max_length))
        return self._limited[max_length]

    def encode(self, texts: Sequence[str | tuple[str, str]], *, is_traced: bool = False) -> Tokens:
        """Return one row per text or pair of texts.

        With `is_traced`, encodings map tokens to positions in the text, which is slower.
        """
        if is_traced:
            return self.tokens(self._backend.encode_batch(list(texts)))
        if len(texts) > _MAX_CACHED_TEXTS:
            return self._encode_many(texts)
        rows = [self._look_up(text) for text in texts]
        unknown = [text for text, row in zip(texts, rows, strict=True) if row is None]
        encodings = iter(self._backend.encode_batch_fast(unknown) if unknown else ())
        encoded = [row or _Row.of(next(encodings)) for row in rows]
        return Tokens(self._batch(encoded), tuple(index for index, row in enumerate(encoded) if row.is_truncated), ())

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> Tokens:
        """Return one row per sentence that is already split into words."""
        return self.tokens(self._backend.encode_batch([list(words) for words in sentences], is_pretokenized=True))

    def encode_whole(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode texts without truncation or special tokens, for tasks that truncate and join by themselves."""
        return self._bare.encode_batch(list(texts), add_special_tokens=False)

    def join(self, first: Encoding, second: Encoding | None = None) -> Encoding:
        """Return one row of a text or a pair that fits, with its special tokens."""
        return self._backend.post_process(first, second)

    def join_each(self, first: Encoding, seconds: Sequence[Encoding]) -> Tokens:
        """Return a row per second text, paired with `first`. Only `first` is truncated: seconds must leave it room."""
        room = self.spec.max_length - self.special_tokens(is_pair=True)
        by_length: dict[int, list[int]] = {}
        for row, second in enumerate(seconds):
            by_length.setdefault(len(second), []).append(row)
        batches: list[Batch] = []
        truncated: list[int] = []
        for length, rows in by_length.items():
            is_truncated = len(first) + length > room
            truncated += rows if is_truncated else ()
            joined = self.join(self.cut(first, room - length) if is_truncated else first, seconds[rows[0]])
            # Rows whose second texts have equal lengths differ only in those tokens: one join serves all of them.
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
        """Return the first `length` tokens, or the last if the model truncates on the left."""
        rest = Encoding.merge([encoding], growing_offsets=False)
        # Truncate from the other end and keep the overflow: what `truncate` leaves carries the rest into every join.
        rest.truncate(len(encoding) - length, direction="right" if self.spec.truncates_left else "left")
        parts = rest.overflowing
        return Encoding.merge(parts if self.spec.truncates_left else parts[::-1], growing_offsets=False)

    def special_tokens(self, *, is_pair: bool) -> int:
        """Return the number of tokens that `join` adds."""
        return self._backend.num_special_tokens_to_add(is_pair)

    def tokens(self, encodings: Sequence[Encoding]) -> Tokens:
        """Return the rows of encodings; those with an overflow count as truncated."""
        truncated = tuple(row for row, encoding in enumerate(encodings) if encoding.overflowing)
        return Tokens(self._batch(encodings), truncated, encodings)

    def to_text(self, tokens: Sequence[str]) -> str:
        """Join tokens into text, as transformers' convert_tokens_to_string does."""
        decoder = self._backend.decoder
        return decoder.decode(list(tokens)) if decoder is not None else " ".join(tokens)

    def decode(self, ids: Sequence[int], *, skips_special: bool = False) -> str:
        """Return the text of token ids, as transformers' decode does."""
        text = self._backend.decode(list(ids), skip_special_tokens=skips_special)
        if self.spec.tidies_spaces:
            for spaced, tidy in _SPACE_CLEANUPS:
                text = text.replace(spaced, tidy)
        return text

    def may_change(self, text: str) -> bool:
        """Return whether further tokens may change the end of a decoded text: half a character, a space to remove."""
        if text.endswith("\ufffd"):
            return True
        return self.spec.tidies_spaces and any(
            text.endswith(spaced[:size]) for spaced, _ in _SPACE_CLEANUPS for size in range(1, len(spaced))
        )

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) or ""

    @cached_property
    def size(self) -> int:
        """Return one more than the largest token id, added tokens included: some vocabularies have gaps."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary does not contain it."""
        return self._backend.token_to_id(token)

    @cached_property
    def marks_subwords(self) -> bool:
        """Return whether tokens that continue a word have a prefix, such as WordPiece's ##."""
        return bool(getattr(self._backend.model, "continuing_subword_prefix", None))

    @cached_property
    def unknown_id(self) -> int | None:
        """Return the id of the unknown token, if there is one."""
        # Byte-level and Unigram models do not name their unknown token; transformers calls it one of these.
        names = (getattr(self._backend.model, "unk_token", None), "<unk>", "[UNK]")
        return next((id_ for name in names if name and (id_ := self._backend.token_to_id(name)) is not None), None)

    def _encode_many(self, texts: Sequence[str | tuple[str, str]]) -> Tokens:
        """Encode texts that are not looked up; of each row, Python reads little more than its ids."""
        encodings = self._backend.encode_batch_fast(list(texts))
        lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
        tokens = int(lengths.sum())
        has_types = not self._has_no_types or any(not isinstance(text, str) for text in texts)
        values = {}
        for name in self.spec.inputs:
            if name == "token_type_ids" and not has_types:
                values[name] = np.zeros(tokens, np.int32)
            else:
                rows = (getattr(encoding, _COLUMNS[name]) for encoding in encodings)
                values[name] = np.fromiter(chain.from_iterable(rows), np.int32, tokens)
        truncated = tuple(row for row, encoding in enumerate(encodings) if encoding.overflowing)
        return Tokens(Batch(values, lengths), truncated, ())

    @cached_property
    def _has_no_types(self) -> bool:
        """Return whether all token types of a single text are zero."""
        return not any(self._backend.encode("a").type_ids)

    def _batch(self, rows: Sequence[Encoding | _Row]) -> Batch:
        return Batch.from_rows({name: [getattr(row, _COLUMNS[name]) for row in rows] for name in self.spec.inputs})

    def _look_up(self, text: str | tuple[str, str]) -> _Row | None:
        """Return the row that the library would return, if all words of the text are cached."""
        if self._frame is None or not isinstance(text, str):
            return None
        cache, before, after = self._frame
        ids = cache.ids(text)
        if ids is None:
            return None
        room = self.spec.max_length - len(before) - len(after)
        fitting = ids[max(0, len(ids) - room) :] if self.spec.truncates_left else ids[:room]
        row = [*before, *fitting, *after]
        return _Row(row, [0] * len(row), len(ids) > room)

    @cached_property
    def _frame(self) -> tuple[WordCache, list[int], list[int]] | None:
        """Return the word cache, and the special tokens before and after a text; None if texts cannot be looked up."""
        cache = WordCache.of(self._bare)
        if cache is None:
            return None
        sample = self._bare.encode("a", add_special_tokens=False)
        whole = self.join(sample)
        size = len(whole) - len(sample)
        before = next((start for start in range(size + 1) if whole.ids[start:][: len(sample)] == sample.ids), None)
        if before is None or any(whole.type_ids) or size >= self.spec.max_length:
            return None
        return cache, whole.ids[:before], whole.ids[before + len(sample) :]

    @cached_property
    def _bare(self) -> FastTokenizer:
        """Return the tokenizer without post-processing, which `join` does: doing it twice shifts offsets."""
        backend, bare = self._backend, FastTokenizer(self._backend.model)  # the model is shared, not copied
        if backend.normalizer is not None:
            bare.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            bare.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        bare.add_tokens([added[token_id] for token_id in sorted(added)])
        return bare
