"""Request bodies for the protocol of each path."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hasten.core.errors import InputError

# Fields of tasks on texts; rows of other tasks are sent as they are, without the fields for evaluation.
_TEXT_FIELDS = ("text", "text_pair")
_EVALUATION_FIELDS = ("label", "labels", "answers", "id", "score", "tags")


def body(path: str, row: Mapping[str, object], model: str) -> bytes:
    """Return the body for one row: a text, or an object with the fields of the task."""
    names = _TEXT_FIELDS if "text" in row else [name for name in row if name not in _EVALUATION_FIELDS]
    fields = {name: row[name] for name in names if name in row}
    inputs = fields["text"] if list(fields) == ["text"] else fields
    model_field = {"model": model} if model else {}
    if path.startswith("/v2/"):
        texts = [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in fields.values()]
        data = zip(fields, texts, strict=True)
        tensors = [{"name": name, "shape": [1], "datatype": "BYTES", "data": [text]} for name, text in data]
        return msgspec.json.encode({"inputs": tensors})
    if path == "/rerank":
        return msgspec.json.encode({"query": row.get("query"), "texts": row.get("documents"), **model_field})
    if path.endswith("/score"):
        return msgspec.json.encode({"text_1": row.get("text"), "text_2": row.get("text_pair"), **model_field})
    if path == "/v1/embeddings":
        if not isinstance(inputs, str):
            raise InputError(
                "an embedding request needs exactly one text per row", hint='write rows such as {"text": "…"}'
            )
        return msgspec.json.encode({"input": inputs, **model_field})
    return msgspec.json.encode({"inputs": inputs, **model_field})
