"""Check the texts and numbers of a request, from Python, the command line or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hasten.core.errors import InputError


def check_min(name: str, value: object, minimum: int = 1, alternative: str = "") -> None:
    """Raise InputError for a number below the minimum; `alternative` is appended to the message."""
    if isinstance(value, int) and value < minimum:
        raise InputError(f"{name} is {value}; it must be at least {minimum}{alternative}")


def list_items(payload: object, empty_message: str = "no text to process", hint: str | None = None) -> Sequence[object]:
    """Return the items of a payload, a list or a single item; `empty_message` begins the error for an empty list."""
    items = payload if isinstance(payload, list | tuple) else [payload]
    if not items:
        raise InputError(f"{empty_message}: the list is empty", hint=hint)
    return items


def parse_texts(payload: object) -> list[str | tuple[str, str]]:
    """Return the texts and pairs of a payload: "…", {"text": …, "text_pair": …}, or a list of those."""
    return [_parse_text(entry, position) for position, entry in enumerate(list_items(payload), 1)]


def parse_single_texts(payload: object, task: str) -> list[str]:
    """Return the texts of a payload without pairs; `task` is the name in the error for a pair."""
    texts = []
    for position, text in enumerate(parse_texts(payload), 1):
        if not isinstance(text, str):
            raise InputError(f'item {position} has a "text_pair", but {task} takes one text at a time')
        texts.append(text)
    return texts


def _parse_text(entry: object, position: int) -> str | tuple[str, str]:
    if isinstance(entry, Mapping):
        if "text" not in entry:
            raise InputError(f'item {position} has no "text"; its fields are: {", ".join(map(str, entry))}')
        pair = entry.get("text_pair")
        text = check_text(entry["text"], f"text {position}")
        return text if pair is None else (text, check_text(pair, f"text_pair {position}"))
    return check_text(entry, f"text {position}")


def check_text(text: object, name: str, *, may_be_empty: bool = False) -> str:
    """Return the text, or raise InputError if it is not a valid string; `name` says in the message which one it is."""
    if not isinstance(text, str):
        raise InputError(f"{name} is {type(text).__name__}, not a string")
    if not may_be_empty and not text.strip():
        raise InputError(f"{name} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not valid Unicode: lone surrogate at character {error.start}") from error
    return text


def check_texts(texts: object, name: str, position: int) -> tuple[str, ...]:
    """Return the texts of a list in an item, where `name` is plural; raise InputError if one of them is not valid."""
    if not isinstance(texts, list | tuple):
        raise InputError(f'"{name}" of item {position} is {type(texts).__name__}, not a list of strings')
    if not texts:
        raise InputError(f"item {position} has no {name}: the list is empty")
    singular = name.removesuffix("s")
    return tuple(check_text(text, f"{singular} {number} of item {position}") for number, text in enumerate(texts, 1))
