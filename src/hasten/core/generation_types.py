"""Types of text generation: the parameters of a request and the properties of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

# The generation tasks under transformers' names: decoders continue a text, encoder-decoders answer one with another.
TEXT_GENERATION = "text-generation"
TEXT2TEXT_GENERATION = "text2text-generation"
# The Auto classes of transformers by task.
AUTO_CLASSES = {TEXT_GENERATION: "AutoModelForCausalLM", TEXT2TEXT_GENERATION: "AutoModelForSeq2SeqLM"}
GENERATION_TASKS = tuple(AUTO_CLASSES)


# Bounds of a server on the options of a request, so that no sequence adds more than a few milliseconds to a decode
# step (tests/unit/generation/test_options.py). The Python API has none.
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 16, 128
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 1024, 32
MAX_NO_REPEAT_NGRAM_SIZE = 32


class Finish(StrEnum):
    """Finish reasons, under OpenAI's names."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that choose the next token and end the text."""

    max_tokens: int = 128
    # Zero always takes the most likely token (greedy decoding).
    temperature: float = 0.0
    # Sample among the k most likely tokens; zero for all.
    top_k: int = 0
    # Sample among the most likely tokens that together have this share of the probability.
    top_p: float = 1.0
    # Sample among tokens that have at least this share of the most likely token's probability.
    min_p: float = 0.0
    # Above one, tokens that occurred before become less likely.
    repetition_penalty: float = 1.0
    # No n-gram of this size occurs twice; zero allows any.
    no_repeat_ngram_size: int = 0
    # Token sequences that are never generated.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # The end-of-sequence tokens are suppressed until then.
    min_tokens: int = 0
    seed: int | None = None
    # Strings that end the text; none of them is part of the answer.
    stop: tuple[str, ...] = ()
    num_beams: int = 1
    length_penalty: float = 1.0
    # End the search once as many texts have ended as there are beams, even if a better one could follow.
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """The properties of one generative model; stored in the manifest."""

    # Tokens that a slot can hold: prompt and answer together, or only the answer if an encoder reads the prompt.
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # The first tokens of every answer, if an encoder reads the prompt.
    decoder_start_token_ids: tuple[int, ...] = ()
    # The token that is forced at the end of an answer that reaches its limit.
    forced_eos_token_id: int | None = None
    # Whether beam search normalizes probabilities again after tokens were suppressed.
    renormalize_logits: bool = False
    # Jinja, as in transformers; empty if the model does not support chats.
    chat_template: str = ""
    # The names a chat template may use: bos_token, eos_token and the like.
    special_tokens: dict[str, str] = field(default_factory=dict)
    # The defaults of the model's generation_config.
    defaults: SamplingParams = field(default_factory=SamplingParams)
