"""The manifest of a bundle: its schema, validation and migration from older versions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from hasten.core.errors import BundleError, PlanError
from hasten.core.generation_types import GENERATION_TASKS, GenerationSpec
from hasten.core.plan import Gate
from hasten.core.report import Agreement, Metric
from hasten.core.system.hardware import Machine
from hasten.core.tensors import Signature
from hasten.core.text.tokenizer import TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.tasks import TaskSpec

SCHEMA = 1
FILE = "manifest.json"

# From schema n to n + 1, on plain JSON values. Old bundles are never rejected for their age.
_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """The source of the model."""

    id: str
    revision: str | None
    architecture: str
    # The path of its ONNX graph in the model's directory; None for PyTorch weights.
    file: str | None = None


@dataclass(frozen=True, slots=True)
class VariantEntry:
    """A variant that the bundle holds, and how it was judged."""

    name: str
    backend: str
    precision: Precision
    device: str
    requires: tuple[str, ...]
    graphs: dict[str, str]
    agreement: Agreement
    metric: Metric | None = None
    # Whether the other rows of a batch can change an answer: in dynamic int8 they share a scale.
    depends_on_batch: bool = False
    # It computes correctly only on CPUs with any of these instructions; empty for any CPU.
    instructions: tuple[str, ...] = ()

    @property
    def variant(self) -> Variant:
        """Return the parsed variant."""
        return Variant(self.backend, self.precision, self.device, Variant.parse(self.name).modifiers)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    schema: int
    hasten: str
    created: str
    model: ModelOrigin
    task: TaskSpec
    tokenizer: TokenizerSpec
    signature: Signature
    graphs: dict[str, str]
    variants: tuple[VariantEntry, ...]
    # The gate of the build; None stands for the task's default.
    gate: Gate
    machine: Machine
    # SHA-256 of every file but this one, by path from the bundle's root.
    files: dict[str, str]
    # The precision of the graph's weights: the source may be a quantized graph.
    graph_precision: Precision = Precision.FP32
    # For generative models, whose graphs are in their variants only.
    generation: GenerationSpec | None = None
    # SHA-256 of this manifest without this field: the bundle's identity.
    digest: str = ""

    @property
    def chosen(self) -> VariantEntry:
        """Return the variant that the build chose."""
        return self.variants[0]

    def sealed(self) -> Manifest:
        """Return the manifest with its digest."""
        return replace(self, digest=_digest(msgspec.json.decode(msgspec.json.encode(self))))

    def to_json(self) -> bytes:
        """Return the content of manifest.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_manifest(directory: Path) -> Manifest:
    """Read and validate the manifest of a bundle."""
    file, hint = directory / FILE, "build one with: hasten build MODEL -o DIR"
    if not directory.is_dir():
        raise BundleError(f"no bundle at {directory}: no such directory", hint=hint)
    if not file.is_file():
        raise BundleError(f"{directory} is not a bundle: it has no {FILE}", hint=hint)
    resolve_inside(directory, FILE)
    try:
        raw = msgspec.json.decode(file.read_bytes())
        schema = raw["schema"]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise BundleError(f"{file} is damaged: {error}", hint="build the bundle again") from error
    if type(schema) is not int or schema < 1:
        raise BundleError(f"{file} is damaged: its schema is {schema!r}", hint="build the bundle again")
    if schema > SCHEMA:
        raise BundleError(
            f"{directory} has bundle format {schema}; this hasten reads up to {SCHEMA}", hint="pip install -U hasten"
        )
    is_sealed = raw.get("digest") == _digest(raw)
    for old in range(schema, SCHEMA):
        raw = _MIGRATIONS[old](raw)
    try:
        manifest = msgspec.convert(raw, Manifest)
    except (msgspec.ValidationError, PlanError) as error:  # PlanError: an invalid gate
        raise BundleError(f"{file} is damaged: {error}", hint="build the bundle again") from error
    if not is_sealed:
        raise BundleError(f"{file} was changed after it was built", hint="build the bundle again")
    for path in (*manifest.files, *manifest.graphs.values()):
        resolve_inside(directory, path)
    graphs = [*manifest.graphs.values()]
    graphs += [f"variants/{entry.name}/{path}" for entry in manifest.variants for path in entry.graphs.values()]
    for path in graphs:
        if path not in manifest.files:
            raise BundleError(f"{directory} is unsafe: it has no hash of the graph '{path}'")
    if (manifest.generation is not None) != (manifest.task.name in GENERATION_TASKS):
        raise BundleError(
            f"{file} is damaged: the settings of text generation do not match its task, {manifest.task.name}",
            hint="build the bundle again",
        )
    if not manifest.variants:
        raise BundleError(f"{file} lists no variant", hint="build the bundle again")
    return manifest


def _digest(raw: Mapping[str, object]) -> str:
    """Return the digest of the file's content, not of the parsed fields: fields of a later hasten do not change it."""
    content = {name: value for name, value in raw.items() if name != "digest"}
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def is_bundle(directory: Path) -> bool:
    """Return whether a directory looks like a bundle; other programs have files named manifest.json too."""
    try:
        raw = msgspec.json.decode((directory / FILE).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return isinstance(raw, dict) and {"schema", "hasten", "digest"} <= set(raw)


def resolve_inside(directory: Path, relative: str) -> Path:
    """Return the path if it stays inside the directory after following symbolic links, else raise BundleError."""
    pure = PurePosixPath(relative)
    path = directory / pure
    try:
        is_inside = path.resolve().is_relative_to(directory.resolve())
    except (OSError, ValueError, RuntimeError):  # an invalid file name, or a cycle of links
        is_inside = False
    if pure.is_absolute() or ".." in pure.parts or not is_inside:
        raise BundleError(f"{directory} is unsafe: it names the path '{relative}', which leaves the bundle")
    return path


def sha256(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
