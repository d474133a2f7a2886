"""What a caller asks for, checked: keyword arguments, flags and JSON come through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace

from hasten.core.errors import InputError
from hasten.core.generation import Sampling
from hasten.core.registry import did_you_mean

NAMES = tuple(field.name for field in fields(Sampling))

# What transformers calls them.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "num_beams": "beams",
    "stop_strings": "stop",
    "do_sample": "temperature",
}


def sampling_of(defaults: Sampling, given: Mapping[str, object]) -> Sampling:
    """The model's own way to write, changed by what was given; None leaves it as it is."""
    asked = {name: value for name, value in given.items() if value is not None}
    for name in asked:
        if name not in NAMES:
            meant = f"here it is {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else f"there are: {', '.join(NAMES)}"
            raise InputError(f"there is no option '{name}'{did_you_mean(name, NAMES)}", hint=meant)
    changed = {name: _CHECKS[name](name, value) for name, value in asked.items()}
    # One of the two excludes the other: what is asked for comes before the model's own way.
    if changed.get("beams", 1) != 1:
        changed.setdefault("temperature", 0.0)
    elif changed.get("temperature", defaults.temperature) != 0:
        changed.setdefault("beams", 1)
    sampling = replace(defaults, **changed)  # type: ignore[arg-type]
    if sampling.beams > 1 and sampling.temperature > 0:
        raise InputError(
            f"{sampling.beams} beams look for the likeliest text, and temperature {sampling.temperature:g} draws one",
            hint="beams with temperature 0, or one beam",
        )
    return sampling


def _whole(least: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} is {value!r}; it must be a whole number, at least {least}")
        return value

    return check


def _number(allowed: Callable[[float], bool], words: str) -> Callable[[str, object], float]:
    def check(name: str, value: object) -> float:
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # a whole number may have any number of digits
                number = math.inf
        if not math.isfinite(number) or not allowed(number):
            raise InputError(f"{name} is {value!r:.80}; it must be {words}")
        return number

    return check


def _stops(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{name} is {value!r}; it must be a text or a list of texts, none of them empty")
    return tuple(texts)


def _words(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    words = value if isinstance(value, list | tuple) else None
    is_fit = words is not None and all(
        isinstance(word, list | tuple) and word and all(type(token) is int and token >= 0 for token in word)
        for word in words
    )
    if words is None or not is_fit:
        raise InputError(f"{name} is {value!r}; it must be a list of lists of token ids, none of them empty")
    return tuple(tuple(word) for word in words)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; it must be true or false")
    return value


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": _whole(1),
    "temperature": _number(lambda value: value >= 0, "a number, 0 or more"),
    "top_k": _whole(0),
    "top_p": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "min_p": _number(lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": _number(lambda value: value > 0, "a number above 0"),
    "no_repeat_ngram_size": _whole(0),
    "bad_words_ids": _words,
    "min_tokens": _whole(0),
    "seed": _whole(0),
    "stop": _stops,
    "beams": _whole(1),
    # Lengths to the power of more are no numbers any more.
    "length_penalty": _number(lambda value: abs(value) <= 20, "a number from -20 to 20"),
    "early_stopping": _flag,
}
