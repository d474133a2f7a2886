"""Describe what an engine is built for: optimization profiles, platform and precision, and their record on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from hasten.core.errors import StageError
from hasten.core.plan import Range, Shapes
from hasten.core.tensors import DType, Shape
from hasten.core.variant import Precision

Dims: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile: the shapes that an engine takes, and the one it is tuned for."""

    min: Shape
    opt: Shape
    max: Shape


@dataclass(frozen=True, slots=True)
class EnginePlatform:
    """The kind of GPU and the TensorRT version that an engine is built with and runs on."""

    gpu: str
    capability: str
    tensorrt: str

    def __str__(self) -> str:
        return f"{self.gpu} ({self.capability}) with TensorRT {self.tensorrt}"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The options that an engine is built with."""

    profiles: tuple[Profile, ...]
    # Limit of the memory beside weights and tensors; None leaves it to TensorRT.
    workspace_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The description of an engine, stored beside it. The field names are part of the file format."""

    platform: EnginePlatform
    spec: EngineSpec
    # The precision of the matmuls, from the types of the graph.
    precision: Precision
    # Types as reported by the engine.
    inputs: dict[str, DType]
    outputs: dict[str, DType]


def profiles(shapes: Shapes, max_length: int) -> tuple[Profile, ...]:
    """Return a profile for the requested shapes and, if texts may be shorter or longer, one for all others.

    Both have the same maximum number of rows, so that every batch up to that size fits one of them.
    """
    batch, sequence = shapes.batch, shapes.sequence.at_most(max_length)
    requested = Profile(*(Shape(*sizes) for sizes in zip(_bounds(batch), _bounds(sequence), strict=True)))
    # Tuned for a single long text, which is less common than the requested shapes but not rare.
    full = Profile(Shape(1, 1), Shape(1, max_length), Shape(batch.max, max_length))
    return (requested,) if (requested.min, requested.max) == (full.min, full.max) else (requested, full)


def _bounds(size: Range) -> tuple[int, int, int]:
    return size.min, size.opt, size.max


def find_profile(ranges: Sequence[Mapping[str, tuple[Dims, Dims]]], shapes: Mapping[str, Dims]) -> int | None:
    """Return the index of the first profile that accepts inputs of these shapes, or None."""
    for index, bounds in enumerate(ranges):
        if all(_is_within(shapes[name], *limits) for name, limits in bounds.items()):
            return index
    return None


def _is_within(sizes: Dims, smallest: Dims, largest: Dims) -> bool:
    return len(sizes) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, sizes, largest, strict=True)
    )


def engine_name(graph: Path, spec: EngineSpec, platform: EnginePlatform) -> str:
    """Return the file name of a rebuilt engine in the cache, a hash of graph, spec and platform."""
    digest = hashlib.sha256(msgspec.json.encode((spec, platform)))
    for file in sorted((graph, *graph.parent.glob(f"{graph.name}.data*"))):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return f"{digest.hexdigest()[:32]}.plan"


def timing_cache_name(platform: EnginePlatform) -> str:
    """Return the file name of the timing cache: TensorRT accepts only one of the same GPU and version."""
    name = f"{platform.gpu}-{platform.capability}-{platform.tensorrt}"
    return f"{''.join(letter if letter.isalnum() or letter in '.-' else '_' for letter in name)}.timings"


def read_record(file: Path) -> EngineRecord:
    """Read the record of an engine."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=EngineRecord)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StageError(f"cannot read the engine record {file}: {error}", hint="build the bundle again") from error
