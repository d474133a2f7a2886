"""Open a bundle and check its format, hashes and paths."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hasten.backends import BACKENDS, Artifact
from hasten.bundle.manifest import Manifest, VariantEntry, read_manifest, resolve_inside, sha256
from hasten.core.errors import BundleError, PlanError, UnsupportedError
from hasten.core.registry import did_you_mean
from hasten.core.report import Report
from hasten.core.tensors import FloatArray
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import Variant

if TYPE_CHECKING:
    from hasten.tasks import Row

TOKENIZER = "tokenizer/tokenizer.json"
# The directory of config.json and tokenizer_config.json, which transformers reads.
TRANSFORMERS = "transformers"
REPORT = "report.json"
# The most important measurements as a page, which is not sealed.
PAGE = "report.html"
REFERENCE_INPUTS = "reference/inputs.jsonl"
REFERENCE_OUTPUTS = "reference/outputs.npz"
GRAPH_BACKEND = "graph"
# The reference outputs of a sound bundle hardly compress: they are floats of a model. A bundle whose outputs expand to
# more than this many times their file plus a margin is made to exhaust the memory.
_MAX_EXPANSION, EXPANSION_MARGIN_BYTES = 100, 2**24


@dataclass(frozen=True, slots=True)
class Reference:
    """Input rows and the raw outputs of the original model."""

    rows: tuple[Row, ...]
    outputs: dict[str, FloatArray]


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk. Files are checked against their hashes when they are used."""

    path: Path
    manifest: Manifest

    @cached_property
    def report(self) -> Report:
        """Return the report of the build."""
        try:
            return msgspec.json.decode(self._checked(REPORT).read_bytes(), type=Report)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, PlanError) as error:
            raise BundleError(f"{self.path / REPORT} is damaged: {error}") from error

    @property
    def chosen(self) -> VariantEntry:
        """Return the variant that the build chose."""
        return self.manifest.chosen

    def entry(self, name: str) -> VariantEntry:
        """Return the variant of this name."""
        known = {entry.name: entry for entry in self.manifest.variants}
        if name not in known:
            raise PlanError(
                f"the bundle has no variant '{name}'{did_you_mean(name, known)}", hint=f"it has: {', '.join(known)}"
            )
        return known[name]

    def artifact(self, entry: VariantEntry) -> Artifact:
        """Return the files of a variant after checking its backend and their hashes."""
        _check_backend(self.path, entry)
        folder = f"variants/{entry.name}"
        self._check_folder(folder)
        return Artifact(entry.variant, self.manifest.signature, self.path / folder, entry.graphs)

    def graph(self) -> Artifact:
        """Return the portable graph, which ONNX Runtime runs on any machine."""
        self._check_folder("graph")
        graphs = {name: path.removeprefix("graph/") for name, path in self.manifest.graphs.items()}
        variant = Variant(GRAPH_BACKEND, self.manifest.graph_precision)
        return Artifact(variant, self.manifest.signature, self.path / "graph", graphs)

    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer."""
        return Tokenizer.open(self._checked(TOKENIZER), self.manifest.tokenizer)

    def configuration(self, name: str) -> Path | None:
        """Return a file that transformers reads, such as config.json; None in older bundles, which lack them."""
        file = f"{TRANSFORMERS}/{name}"
        return self._checked(file) if file in self.manifest.files else None

    def reference(self) -> Reference:
        """Read the stored rows and outputs."""
        # Not splitlines: texts may contain separators that JSON does not escape.
        try:
            text = self._checked(REFERENCE_INPUTS).read_text(encoding="utf-8", errors="surrogatepass")
            rows = tuple(json.loads(row) for row in text.rstrip("\n").split("\n"))
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError("a row is not an object")
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{self.path / REFERENCE_INPUTS} is damaged: {error}") from error
        file = self._checked(REFERENCE_OUTPUTS)
        try:
            # Opened here: NumPy does not close a file that is not an archive.
            with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                _check_expansion(arrays.zip)
                outputs = {name: arrays[name] for name in arrays.files}
        except Exception as error:  # zipfile and NumPy raise a dozen classes for damaged archives
            raise BundleError(f"{self.path / REFERENCE_OUTPUTS} is damaged: {error}") from error
        return Reference(rows, outputs)

    def check(self) -> None:
        """Check the hash of every file, and that the directory has no others."""
        for name in self.manifest.files:
            self._checked(name)
        self._check_unlisted(self.path)

    def _check_folder(self, folder: str) -> None:
        names = [name for name in self.manifest.files if name.startswith(f"{folder}/")]
        if not names:
            raise BundleError(f"{self.path} lists no file under {folder}/", hint="build the bundle again")
        for name in names:
            self._checked(name)
        # A runtime opens what a graph names: weights in a file without a hash could be exchanged unnoticed.
        self._check_unlisted(self.path / folder)

    def _check_unlisted(self, folder: Path) -> None:
        names = {
            file.relative_to(self.path).as_posix()
            for file in folder.rglob("*")
            if file.is_symlink() or not file.is_dir()
        }
        # Files beside the manifest (README.md, .DS_Store) are never read; files in our folders might be.
        extra = sorted(name for name in names - set(self.manifest.files) if "/" in name and not name.startswith("."))
        if extra:
            raise BundleError(
                f"{self.path} has a file that its manifest does not list: {extra[0]}", hint="remove it, or build again"
            )

    def _checked(self, name: str) -> Path:
        path = resolve_inside(self.path, name)
        if not path.is_file():
            raise BundleError(f"{self.path} is incomplete: {name} is missing", hint="build the bundle again")
        if name not in self.manifest.files or sha256(path) != self.manifest.files[name]:
            raise BundleError(
                f"{self.path} was changed after it was built: {name} does not match its hash", hint="build it again"
            )
        return path


def open_bundle(path: Path | str) -> Bundle:
    """Open a bundle and validate its manifest.

    Links are followed here, once: a deployment that moves a link to another version meanwhile must not mix the two.
    """
    directory = _follow_links(Path(path).expanduser())
    bundle = Bundle(directory, read_manifest(directory))
    for entry in bundle.manifest.variants:
        # A backend of a package that is not installed here is checked when its variant is used.
        with suppress(PlanError, UnsupportedError):
            _check_backend(directory, entry)
    return bundle


def _check_expansion(archive: zipfile.ZipFile) -> None:
    """Raise ValueError for an archive that would fill the memory: a few megabytes of it may hold gigabytes."""
    entries = archive.infolist()
    size, compressed = sum(entry.file_size for entry in entries), sum(entry.compress_size for entry in entries)
    if size > _MAX_EXPANSION * compressed + EXPANSION_MARGIN_BYTES:
        raise ValueError(f"its {compressed} bytes expand to {size}")


def _follow_links(path: Path) -> Path:
    """Return the real path; a path without links stays as the caller wrote it, for messages."""
    real = path.resolve()
    return path if real == path.absolute() else real


def _check_backend(directory: Path, entry: VariantEntry) -> None:
    """Reject a backend that does not declare that bundles may store it: PyTorch's unpickles, which runs code."""
    if not getattr(BACKENDS.get(entry.backend), "is_stored", False):
        raise BundleError(
            f"{directory} holds the variant {entry.name} of the backend '{entry.backend}', which a bundle cannot store",
            hint="do not use a bundle from this source; build the model yourself",
        )
