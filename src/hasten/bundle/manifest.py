"""The manifest: what a bundle says about itself, its schema version and the way from older ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from hasten.core.errors import BundleError, PlanError
from hasten.core.generation import GenerationSpec
from hasten.core.hardware import Machine
from hasten.core.plan import Gate
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
    # The ONNX graph it came as, by its path in the model's directory; None where it came as weights.
    file: str | None = None


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
    # Whether a row may be answered otherwise beside other rows: where they share a scale, as in dynamic int8.
    depends_on_batch: bool = False
    # It computes right only where the processor has any of these; empty: anywhere.
    instructions: tuple[str, ...] = ()

    @property
    def variant(self) -> Variant:
        return Variant(self.backend, self.precision, self.device, Variant.parse(self.name).ways)


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
    # The gate as it was asked for; None stands for the task's default.
    gate: Gate
    machine: Machine
    # SHA-256 of every file but this one, by path from the bundle's root.
    files: dict[str, str]
    # What the graph's weights are stored in: a model may come as a quantized graph.
    graph_precision: Precision = Precision.FP32
    # Of a model that writes, which holds its graphs with its variants alone.
    generation: GenerationSpec | None = None
    # SHA-256 of this manifest without this field: the bundle's identity.
    digest: str = ""

    @property
    def chosen(self) -> VariantEntry:
        return self.variants[0]

    def sealed(self) -> Manifest:
        return replace(self, digest=_digest(msgspec.json.decode(msgspec.json.encode(self))))

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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise BundleError(f"{file} is damaged: {error}", hint="build the bundle again") from error
    if type(schema) is not int or schema < 1:
        raise BundleError(f"{file} is damaged: its schema is {schema!r}", hint="build the bundle again")
    if schema > SCHEMA:
        raise BundleError(
            f"{directory} has bundle format {schema}; this hasten reads up to {SCHEMA}",
            hint="pip install -U hasten",
        )
    is_sealed = raw.get("digest") == _digest(raw)
    for old in range(schema, SCHEMA):
        raw = _MIGRATIONS[old](raw)
    try:
        manifest = msgspec.convert(raw, Manifest)
    except (msgspec.ValidationError, PlanError) as error:  # PlanError: a gate that no plan would allow
        raise BundleError(f"{file} is damaged: {error}", hint="build the bundle again") from error
    if not is_sealed:
        raise BundleError(f"{file} was changed after it was built", hint="build the bundle again")
    for path in (*manifest.files, *manifest.graphs.values()):
        inside(directory, path)
    graphs = [*manifest.graphs.values()]
    graphs += [f"variants/{entry.name}/{path}" for entry in manifest.variants for path in entry.graphs.values()]
    for path in graphs:
        if path not in manifest.files:
            raise BundleError(f"{directory} is unsafe: it names the graph '{path}', of which it holds no hash")
    if not manifest.variants:
        raise BundleError(f"{file} lists no variant", hint="build the bundle again")
    return manifest


def _digest(raw: Mapping[str, object]) -> str:
    """Of what stands in the file, not of what is read from it: a field that a later hasten adds changes nothing."""
    content = {name: value for name, value in raw.items() if name != "digest"}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def is_bundle(directory: Path) -> bool:
    """Whether a directory looks like one of ours; other programs have files called manifest.json too."""
    try:
        raw = msgspec.json.decode((directory / FILE).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(raw, dict) and {"schema", "hasten", "digest"} <= set(raw)


def inside(directory: Path, relative: str) -> Path:
    """The path, if it stays in the directory, symbolic links followed."""
    pure = PurePosixPath(relative)
    path = directory / pure
    try:
        is_inside = path.resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError):  # a name no file can have, links in a circle
        is_inside = False
    if pure.is_absolute() or ".." in pure.parts or not is_inside:
        raise BundleError(f"{directory} is unsafe: it names the path '{relative}', which leaves the bundle")
    return path


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
