"""Write tritonserver's configuration files in protobuf's text format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Fields by name; a list is a repeated field.
Value: TypeAlias = str | int | Mapping[str, "Value"] | Sequence["Value"]
Message: TypeAlias = Mapping[str, Value]


class Word(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


def to_text(message: Message, depth: int = 0) -> str:
    """Return the message in text format, indented by `depth` levels."""
    return "".join(_field(name, value, "  " * depth, depth) for name, value in message.items())


def entries(mapping: Mapping[str, Value]) -> list[Value]:
    """Return a map as protobuf writes it: as a repeated field of keys and values."""
    return [{"key": key, "value": value} for key, value in mapping.items()]


def _field(name: str, value: Value, indent: str, depth: int) -> str:
    if isinstance(value, Mapping):
        inner = to_text(value, depth + 1)
        return f"{indent}{name} {{\n{inner}{indent}}}\n" if inner else f"{indent}{name} {{ }}\n"
    if isinstance(value, str | int):
        return f"{indent}{name}: {_scalar(value)}\n"
    if all(isinstance(item, int) for item in value):
        return f"{indent}{name}: {list(value)}\n"
    return "".join(_field(name, item, indent, depth) for item in value)


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | Word) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a model in terms of the Open Inference Protocol; dims exclude the batch axis."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_optional: bool = False
    # Whether requests of different lengths may be batched; the backend then separates them.
    is_ragged: bool = False
    # The file beside the configuration with a label for each entry.
    labels: str = ""

    def to_message(self) -> Message:
        """Return the tensor as a message of the configuration."""
        kind = "STRING" if self.datatype == "BYTES" else self.datatype
        message: dict[str, Value] = {"name": self.name, "data_type": Word(f"TYPE_{kind}"), "dims": self.dims}
        if self.is_optional:
            message["optional"] = True
        if self.is_ragged:
            message["allow_ragged_batch"] = True
        if self.labels:
            message["label_filename"] = self.labels
        return message
