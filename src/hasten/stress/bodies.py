"""What to ask, in the words of the path that is asked."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hasten.core.errors import InputError

# What a model of texts is asked; rows of other tasks are asked as they are, but for what they are judged by.
_TEXTS = ("text", "text_pair")
_NOT_ASKED = ("label", "labels", "answers", "id", "score", "tags")


def body(path: str, row: Mapping[str, object], model: str) -> bytes:
    """Of one row: a text, or an object with the fields of the task."""
    names = _TEXTS if "text" in row else [name for name in row if name not in _NOT_ASKED]
    asked = {name: row[name] for name in names if name in row}
    given = asked["text"] if list(asked) == ["text"] else asked
    named = {"model": model} if model else {}
    if path.startswith("/v2/"):
        return msgspec.json.encode({"inputs": [_tensor(name, value) for name, value in asked.items()]})
    if path == "/rerank":
        return msgspec.json.encode({"query": row.get("query"), "texts": row.get("documents"), **named})
    if path == "/v1/embeddings":
        if not isinstance(given, str):
            raise InputError("an embedding is of one text, and a row has more or none", hint='as in {"text": "…"}')
        return msgspec.json.encode({"input": given, **named})
    return msgspec.json.encode({"inputs": given, **named})


def _tensor(name: str, value: object) -> dict[str, object]:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return {"name": name, "shape": [1], "datatype": "BYTES", "data": [text]}
