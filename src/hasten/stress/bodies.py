"""What to ask, in the words of the path that is asked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hasten.core.errors import InputError

# What data files hold beside what a model is asked.
_NOT_ASKED = ("label", "labels", "answers", "id")


def body(path: str, row: Mapping[str, object], model: str) -> bytes:
    """Of one row: a text, or an object with the fields of the task."""
    text = row.get("text")
    given = text if isinstance(text, str) else {name: one for name, one in row.items() if name not in _NOT_ASKED}
    named = {"model": model} if model else {}
    if path.startswith("/v2/"):
        return msgspec.json.encode({"inputs": _tensors({"text": text} if isinstance(text, str) else row)})
    if path == "/rerank":
        return msgspec.json.encode({"query": row.get("query"), "texts": row.get("documents"), **named})
    if path == "/v1/embeddings":
        return msgspec.json.encode({"input": _text(given), **named})
    return msgspec.json.encode({"inputs": given, **named})


def _tensors(row: Mapping[str, object]) -> list[dict[str, object]]:
    return [
        {"name": name, "shape": [1], "datatype": "BYTES", "data": [value if isinstance(value, str) else _json(value)]}
        for name, value in row.items()
        if name not in _NOT_ASKED
    ]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise InputError("an embedding is of a text, and a row has none", hint='as in {"text": "…"}')
    return given
