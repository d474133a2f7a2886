"""Convert prompts to tokens: a text, a chat, or token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hasten.core.errors import InputError
from hasten.core.generation_types import GenerationSpec
from hasten.core.text.input_checks import check_text
from hasten.core.text.tokenizer import Tokenizer
from hasten.generation.chat import is_chat, is_continued, render


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the caller passed it, and its tokens."""

    source: Any
    ids: list[int]
    # Whether the answer continues the last word of the prompt; the answer of a chat begins anew.
    continues: bool

    @property
    def is_chat(self) -> bool:
        """Return whether the prompt is a chat."""
        return is_chat(self.source)


def read_prompt(source: object, spec: GenerationSpec, tokenizer: Tokenizer) -> Prompt:
    """Check a prompt and encode it."""
    has_encoder = bool(spec.decoder_start_token_ids)
    if is_chat(source):
        text = check_text(render(spec, source), "the chat", may_be_empty=True)
        ids = tokenizer.encode_whole([text])[0].ids
        return Prompt(source, ids, not has_encoder and is_continued(source))
    if isinstance(source, list | tuple) and source and all(type(token) is int for token in source):
        check_tokens(source, spec)
        return Prompt(source, list(source), not has_encoder)
    if not isinstance(source, str):
        raise InputError(
            f"the prompt is {source!r:.80}; it must be a text or a chat",
            hint='"once upon a time", or [{"role": "user", "content": "…"}]',
        )
    text = check_text(source, "the prompt", may_be_empty=True)
    return Prompt(source, _encode(text, spec, tokenizer), not has_encoder)


def check_tokens(ids: Iterable[int], spec: GenerationSpec) -> None:
    """Raise InputError for a token outside the vocabulary."""
    for token in ids:
        if not 0 <= token < spec.vocab_size:
            raise InputError(f"token id {token} is out of range: the vocabulary size is {spec.vocab_size}")


def _encode(text: str, spec: GenerationSpec, tokenizer: Tokenizer) -> list[int]:
    encoding = tokenizer.encode_whole([text])[0]
    length, limit = len(encoding) + tokenizer.special_tokens(is_pair=False), tokenizer.spec.max_length
    if length > limit:
        raise InputError(f"the prompt has {length} tokens, and the model reads up to {limit}")
    ids = tokenizer.join(encoding).ids
    # As in transformers, an empty prompt becomes the beginning-of-sequence token.
    bos_token_id = tokenizer.id_of(spec.special_tokens.get("bos_token", ""))
    return [bos_token_id] if not ids and bos_token_id is not None else ids
