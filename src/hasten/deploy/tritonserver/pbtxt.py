"""tritonserver's configuration files: protobuf's text format, for the few kinds of values that they need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Fields by name; a list is a field that repeats.
Value: TypeAlias = str | int | Mapping[str, "Value"] | Sequence["Value"]
Message: TypeAlias = Mapping[str, Value]


class Word(str):
    """A value of an enumeration: it stands without quotes."""

    __slots__ = ()


def to_text(message: Message, depth: int = 0) -> str:
    return "".join(_field(name, value, "  " * depth, depth) for name, value in message.items())


def entries(mapping: Mapping[str, Value]) -> list[Value]:
    """A map, which protobuf writes as a field that repeats."""
    return [{"key": key, "value": value} for key, value in mapping.items()]


def _field(name: str, value: Value, indent: str, depth: int) -> str:
    if isinstance(value, Mapping):
        inner = to_text(value, depth + 1)
        return f"{indent}{name} {{\n{inner}{indent}}}\n" if inner else f"{indent}{name} {{ }}\n"
    if isinstance(value, str | int):
        return f"{indent}{name}: {_scalar(value)}\n"
    if all(isinstance(one, int) for one in value):
        return f"{indent}{name}: {list(value)}\n"
    return "".join(_field(name, one, indent, depth) for one in value)


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | Word) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a model takes or gives, in the words of the v2 protocol; dims are without the axis of the batch."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    is_optional: bool = False
    # Requests of other lengths may run together with it: who executes them takes them apart.
    is_ragged: bool = False
    # The file beside the configuration that has a name for each entry.
    labels: str = ""

    def to_message(self) -> Message:
        kind = "STRING" if self.datatype == "BYTES" else self.datatype
        message: dict[str, Value] = {"name": self.name, "data_type": Word(f"TYPE_{kind}"), "dims": self.dims}
        if self.is_optional:
            message["optional"] = True
        if self.is_ragged:
            message["allow_ragged_batch"] = True
        if self.labels:
            message["label_filename"] = self.labels
        return message
