"""What an engine is built for: shapes, a place, a precision; and the record that lies beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from hasten.core.errors import StageError
from hasten.core.plan import Range, Shapes
from hasten.core.tensors import BATCH, SEQUENCE, DType, Shape, TensorSpec
from hasten.core.variant import Precision

Dims: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """Shapes that an engine takes, and the one it is tuned for."""

    min: Shape
    opt: Shape
    max: Shape


@dataclass(frozen=True, slots=True)
class Place:
    """An engine runs where it was built, and with the version that built it."""

    gpu: str
    capability: str
    tensorrt: str

    def __str__(self) -> str:
        return f"{self.gpu} ({self.capability}) with TensorRT {self.tensorrt}"


@dataclass(frozen=True, slots=True)
class Order:
    profiles: tuple[Profile, ...]
    # The most memory an engine may need beside weights and tensors; None leaves it to TensorRT.
    workspace_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of an engine without loading it."""

    place: Place
    order: Order
    # What the products of the graph are typed in, and TensorRT keeps to.
    precision: Precision
    # What the engine takes and gives, as it says itself.
    inputs: dict[str, DType]
    outputs: dict[str, DType]


def profiles(shapes: Shapes, max_length: int) -> tuple[Profile, ...]:
    """The shapes that were asked for and, where a text may be shorter or longer, one for all that the model takes.

    Both end at the same number of rows, so that any batch of that many fits one of them.
    """
    batch, sequence = shapes.batch, shapes.sequence.at_most(max_length)
    usual = Profile(*(Shape(*sizes) for sizes in zip(_ends(batch), _ends(sequence), strict=True)))
    # Tuned for what is neither usual nor rare: a long text, alone.
    whole = Profile(Shape(1, 1), Shape(1, max_length), Shape(batch.max, max_length))
    return (usual,) if (usual.min, usual.max) == (whole.min, whole.max) else (usual, whole)


def _ends(size: Range) -> tuple[int, int, int]:
    return size.min, size.opt, size.max


def dims(spec: TensorSpec, shape: Shape) -> Dims:
    """Of an input, in a batch of this shape."""
    sizes = {BATCH: shape.batch, SEQUENCE: shape.sequence}
    return tuple(size if isinstance(size, int) else sizes[size] for size in spec.shape)


def fitting(ranges: Sequence[Mapping[str, tuple[Dims, Dims]]], given: Mapping[str, Dims]) -> int | None:
    """The first profile that takes inputs of these sizes, by its least and largest ones."""
    for place, bounds in enumerate(ranges):
        if all(_is_within(given[name], *ends) for name, ends in bounds.items()):
            return place
    return None


def _is_within(sizes: Dims, least: Dims, most: Dims) -> bool:
    return len(sizes) == len(least) and all(
        low <= size <= high for low, size, high in zip(least, sizes, most, strict=True)
    )


def engine_name(graph: Path, order: Order, place: Place) -> str:
    """What an engine that is built again is called in the cache: another graph, order or place has another name."""
    digest = hashlib.sha256(msgspec.json.encode((order, place)))
    for file in sorted((graph, *graph.parent.glob(f"{graph.name}.data*"))):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"{digest.hexdigest()[:32]}.plan"


def timings_name(place: Place) -> str:
    """The file of kernels' times: TensorRT takes only those of the same GPU and version."""
    words = f"{place.gpu}-{place.capability}-{place.tensorrt}"
    return f"{''.join(letter if letter.isalnum() or letter in '.-' else '_' for letter in words)}.timings"


def read_record(file: Path) -> Record:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"{file} does not say what its engine is: {error}", hint="build the bundle again") from error
