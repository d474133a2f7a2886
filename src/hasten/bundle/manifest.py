"""The manifest: what a bundle says about itself, its schema version and the way from older ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from hasten.core.errors import BundleError
from hasten.core.hardware import Machine
from hasten.core.report import Agreement, Metric
from hasten.core.tensors import Signature
from hasten.core.tokenizer import TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.tasks import TaskSpec

SCHEMA = 1
FILE = "manifest.json"

# From schema n to n + 1, on plain JSON values. Old bundles are never refused for their age.
_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Where the model came from."""

    id: str
    revision: str | None
    architecture: str


@dataclass(frozen=True, slots=True)
class VariantEntry:
    name: str
    backend: str
    precision: Precision
    device: str
    requires: tuple[str, ...]
    graphs: dict[str, str]
    agreement: Agreement
    metric: Metric | None = None

    @property
    def variant(self) -> Variant:
        return Variant(self.backend, self.precision, self.device)


@dataclass(frozen=True, slots=True)
class Manifest:
    schema: int
    hasten: str
    created: str
    model: ModelOrigin
    task: TaskSpec
    tokenizer: TokenizerSpec
    signature: Signature
    graphs: dict[str, str]
    variants: tuple[VariantEntry, ...]
    min_agreement: float
    max_drop: float | None
    machine: Machine
    # SHA-256 of every file but this one, by path from the bundle's root.
    files: dict[str, str]
    # SHA-256 of this manifest without this field: the bundle's identity.
    digest: str = ""

    @property
    def chosen(self) -> VariantEntry:
        return self.variants[0]

    def sealed(self) -> Manifest:
        return replace(self, digest=self._digest())

    def _digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(replace(self, digest=""), order="sorted")).hexdigest()

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_manifest(directory: Path) -> Manifest:
    file = directory / FILE
    if not directory.is_dir():
        raise BundleError(
            f"no bundle at {directory}: no such directory", hint="make one with: hasten build MODEL -o DIR"
        )
    if not file.is_file():
        raise BundleError(
            f"{directory} is not a bundle: it has no {FILE}", hint="make one with: hasten build MODEL -o DIR"
        )
    try:
        raw = msgspec.json.decode(file.read_bytes())
        schema = raw["schema"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise BundleError(f"{file} is damaged: {error}", hint="build the bundle again") from error
    if not isinstance(schema, int) or schema > SCHEMA:
        raise BundleError(
            f"{directory} has bundle format {schema}; this hasten reads up to {SCHEMA}",
            hint="pip install -U hasten",
        )
    for old in range(schema, SCHEMA):
        raw = _MIGRATIONS[old](raw)
    try:
        manifest = msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise BundleError(f"{file} is damaged: {error}", hint="build the bundle again") from error
    if schema == SCHEMA and manifest.digest != manifest._digest():
        raise BundleError(f"{file} was changed after it was built", hint="build the bundle again")
    for path in (*manifest.files, *manifest.graphs.values()):
        inside(directory, path)
    if not manifest.variants:
        raise BundleError(f"{file} lists no variant", hint="build the bundle again")
    return manifest


def inside(directory: Path, relative: str) -> Path:
    """The path, if it stays in the directory, symbolic links followed."""
    pure = PurePosixPath(relative)
    path = directory / pure
    if pure.is_absolute() or ".." in pure.parts or not path.resolve().is_relative_to(directory.resolve()):
        raise BundleError(f"{directory} is unsafe: it names the path '{relative}', which leaves the bundle")
    return path


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
