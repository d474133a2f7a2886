"""Check generation options: keyword arguments, command line flags and JSON fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import fields, replace

from hasten.core.errors import InputError
from hasten.core.generation_types import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_NO_REPEAT_NGRAM_SIZE,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from hasten.core.registry import did_you_mean

NAMES = tuple(field.name for field in fields(SamplingParams))

# The names of other libraries for our options.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "stop_strings": "stop",
    "do_sample": "temperature",
}


def sampling_params(defaults: SamplingParams, options: Mapping[str, object]) -> SamplingParams:
    """Return the defaults of the model, changed by these options; None leaves the default."""
    changed = {}
    for name, value in options.items():
        if value is None:
            continue
        if name not in NAMES:
            hint = f"use {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else f"known: {', '.join(NAMES)}"
            raise InputError(f"unknown option '{name}'{did_you_mean(name, NAMES)}", hint=hint)
        changed[name] = _CHECKS[name](name, value)
    # Beam search and sampling exclude each other: an explicit option overrides the default of the model.
    if changed.get("num_beams", 1) != 1:
        changed.setdefault("temperature", 0.0)
    elif changed.get("temperature", defaults.temperature) != 0:
        changed.setdefault("num_beams", 1)
    sampling = replace(defaults, **changed)  # type: ignore[arg-type]
    if sampling.num_beams > 1 and sampling.temperature > 0:
        raise InputError(
            f"{sampling.num_beams} beams with temperature {sampling.temperature:g} are not supported: beam search does"
            " not sample",
            hint="use temperature 0, or num_beams=1",
        )
    return sampling


def check_bounds(sampling: SamplingParams, names: Container[str]) -> None:
    """Raise an error if one of these options, which a client has set, would slow down the sequences of others."""
    stops, words = sampling.stop, sampling.bad_words_ids
    for name, size, limit, unit in (
        ("stop", len(stops), MAX_STOP_STRINGS, "texts"),
        ("stop", max(map(len, stops), default=0), MAX_STOP_CHARACTERS, "characters in a text"),
        ("bad_words_ids", len(words), MAX_BAD_WORDS, "words"),
        ("bad_words_ids", max(map(len, words), default=0), MAX_BAD_WORD_TOKENS, "tokens in a word"),
    ):
        if name in names and size > limit:
            raise InputError(f"{name} has {size} {unit}, and this server accepts up to {limit}")
    size = sampling.no_repeat_ngram_size
    if "no_repeat_ngram_size" in names and size > MAX_NO_REPEAT_NGRAM_SIZE:
        raise InputError(f"no_repeat_ngram_size is {size}, and this server accepts up to {MAX_NO_REPEAT_NGRAM_SIZE}")


def whole_number(minimum: int) -> Callable[[str, object], int]:
    """Return a check that an option is a whole number, at least `minimum`."""

    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise InputError(f"{name} is {value!r}; it must be a whole number, at least {minimum}")
        return value

    return check


def _number(is_allowed: Callable[[float], bool], requirement: str) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # an int may have any number of digits
                number = math.inf
        if not math.isfinite(number) or not is_allowed(number):
            raise InputError(f"{name} is {value!r:.80}; it must be {requirement}")
        return number

    return check


def _stops(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{name} is {value!r}; it must be a text or a list of texts, none of them empty")
    return tuple(texts)


def _words(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    words = value if isinstance(value, list | tuple) else None
    is_valid = words is not None and all(
        isinstance(word, list | tuple) and word and all(type(token) is int and token >= 0 for token in word)
        for word in words
    )
    if words is None or not is_valid:
        raise InputError(f"{name} is {value!r}; it must be a list of lists of token ids, none of them empty")
    return tuple(tuple(word) for word in words)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be true or false")
    return value


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": whole_number(1),
    "temperature": _number(lambda value: value >= 0, "a number, 0 or more"),
    "top_k": whole_number(0),
    "top_p": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "min_p": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": _number(lambda value: value > 0, "a number above 0"),
    "no_repeat_ngram_size": whole_number(0),
    "bad_words_ids": _words,
    "min_tokens": whole_number(0),
    "seed": whole_number(0),
    "stop": _stops,
    "num_beams": whole_number(1),
    # Larger powers of a length overflow.
    "length_penalty": _number(lambda value: abs(value) <= 20, "a number from -20 to 20"),
    "early_stopping": _flag,
}
