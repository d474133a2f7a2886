"""What a caller gives to go on from, as tokens: a text, a chat, or tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hasten.core.errors import InputError
from hasten.core.generation import GenerationSpec
from hasten.core.tokenizer import Tokenizer
from hasten.generation.chat import is_chat, is_continued, render
from hasten.tasks import checked_text


@dataclass(frozen=True, slots=True)
class Prompt:
    given: Any
    ids: list[int]
    # Whether the answer's first word follows the prompt's last one; a chat's answer begins anew.
    continues: bool

    @property
    def is_chat(self) -> bool:
        return is_chat(self.given)


def read_prompt(given: object, spec: GenerationSpec, tokenizer: Tokenizer) -> Prompt:
    reads_apart = bool(spec.start_ids)
    if is_chat(given):
        text = checked_text(render(spec, given), "the chat", may_be_empty=True)
        ids = tokenizer.encode_whole([text])[0].ids
        return Prompt(given, ids, not reads_apart and is_continued(given))
    if isinstance(given, list | tuple) and given and all(type(token) is int for token in given):
        check_tokens(given, spec)
        return Prompt(given, list(given), not reads_apart)
    if not isinstance(given, str):
        raise InputError(
            f"the prompt is {given!r:.80}; it must be a text or a chat",
            hint='"once upon a time", or [{"role": "user", "content": "…"}]',
        )
    text = checked_text(given, "the prompt", may_be_empty=True)
    return Prompt(given, _tokens(text, spec, tokenizer), not reads_apart)


def check_tokens(ids: Iterable[int], spec: GenerationSpec) -> None:
    for token in ids:
        if not 0 <= token < spec.vocabulary:
            raise InputError(f"there is no token {token}: the model knows {spec.vocabulary}")


def _tokens(text: str, spec: GenerationSpec, tokenizer: Tokenizer) -> list[int]:
    encoding = tokenizer.encode_whole([text])[0]
    length, limit = len(encoding) + tokenizer.special_tokens(is_pair=False), tokenizer.spec.max_length
    if length > limit:
        raise InputError(f"the prompt has {length} tokens, and the model reads up to {limit}")
    ids = tokenizer.join(encoding).ids
    # As transformers does: what begins every text begins one of which nothing is given.
    begins = tokenizer.id_of(spec.special_tokens.get("bos_token", ""))
    return [begins] if not ids and begins is not None else ids
