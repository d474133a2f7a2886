"""What writing a text takes: what a model brings to it, and what a request may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# The tasks of models that write, under transformers' names: text goes on, or an encoder reads one for another.
TEXT_GENERATION = "text-generation"
TEXT2TEXT_GENERATION = "text2text-generation"
WRITING = (TEXT_GENERATION, TEXT2TEXT_GENERATION)


class Finish(StrEnum):
    """Why a text ends: OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and when the text ends."""

    max_tokens: int = 128
    # Zero takes the likeliest token, always.
    temperature: float = 0.0
    # Only among so many of the likeliest; zero for all.
    top_k: int = 0
    # Only among the likeliest that together have this share of the probability.
    top_p: float = 1.0
    # Only among those that have this share of the likeliest one's probability.
    min_p: float = 0.0
    # Above one, tokens that were there before become less likely.
    repetition_penalty: float = 1.0
    # No run of so many tokens comes twice; zero for any.
    no_repeat_ngram_size: int = 0
    # Tokens, or runs of tokens, that are never written.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # It does not end by itself before.
    min_tokens: int = 0
    seed: int | None = None
    # Texts that end it; none of them is part of the answer.
    stop: tuple[str, ...] = ()
    beams: int = 1
    length_penalty: float = 1.0
    # The search is over when as many texts have ended as there are beams, whether or not a better one could.
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What one model that writes brings; stored in the manifest."""

    # Tokens that a slot can hold: prompt and answer together, or the answer alone where an encoder reads the prompt.
    context: int
    vocabulary: int
    end_ids: tuple[int, ...]
    # What an answer begins with, where an encoder reads the prompt.
    start_ids: tuple[int, ...] = ()
    # What an answer that comes to its limit is made to end with.
    forced_end_id: int | None = None
    # Whether what is forbidden to come leaves its probability to the rest, before texts are compared.
    renormalizes: bool = False
    # Jinja, as transformers has it; empty where the model knows no chat.
    chat_template: str = ""
    # The names a chat template may use: bos_token, eos_token and the like.
    special_tokens: dict[str, str] = field(default_factory=dict)
    # What the model's own generation_config asks for.
    defaults: Sampling = field(default_factory=Sampling)
