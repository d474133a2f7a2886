"""A bundle on disk, read with every check: format, hashes, paths."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hasten.backends import MODEL, Artifact
from hasten.bundle.manifest import Manifest, VariantEntry, inside, read_manifest, sha256
from hasten.core.errors import BundleError, PlanError
from hasten.core.registry import did_you_mean
from hasten.core.report import Report
from hasten.core.tensors import FloatArray
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Variant

if TYPE_CHECKING:
    from hasten.tasks import Row

TOKENIZER = "tokenizer/tokenizer.json"
# What transformers knows the model by: config.json and tokenizer_config.json.
TRANSFORMERS = "transformers"
REPORT = "report.json"
REFERENCE_INPUTS = "reference/inputs.jsonl"
REFERENCE_OUTPUTS = "reference/outputs.npz"
GRAPH_BACKEND = "graph"


@dataclass(frozen=True, slots=True)
class Reference:
    """Texts and what the original model answered to them, raw."""

    rows: tuple[Row, ...]
    outputs: dict[str, FloatArray]


@dataclass(frozen=True)
class Bundle:
    path: Path
    manifest: Manifest

    @cached_property
    def report(self) -> Report:
        try:
            return msgspec.json.decode(self._checked(REPORT).read_bytes(), type=Report)
        except msgspec.DecodeError as error:
            raise BundleError(f"{self.path / REPORT} is damaged: {error}") from error

    @property
    def chosen(self) -> VariantEntry:
        return self.manifest.chosen

    def entry(self, name: str) -> VariantEntry:
        known = {entry.name: entry for entry in self.manifest.variants}
        if name not in known:
            raise PlanError(
                f"the bundle holds no variant '{name}'{did_you_mean(name, known)}",
                hint=f"it holds: {', '.join(known)}",
            )
        return known[name]

    def artifact(self, entry: VariantEntry) -> Artifact:
        """The variant's files, their hashes checked."""
        folder = f"variants/{entry.name}"
        self._check_folder(folder)
        return Artifact(entry.variant, self.manifest.signature, self.path / folder, entry.graphs)

    def graph(self) -> Artifact:
        """The graph itself, which ONNX Runtime runs anywhere."""
        self._check_folder("graph")
        graphs = {name: path.removeprefix("graph/") for name, path in self.manifest.graphs.items()}
        variant = Variant(GRAPH_BACKEND, self.manifest.graph_precision)
        return Artifact(variant, self.manifest.signature, self.path / "graph", graphs)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self._checked(TOKENIZER), self.manifest.tokenizer)

    def configuration(self, name: str) -> Path | None:
        """A file that transformers reads, such as config.json; None in a bundle from before they were stored."""
        file = f"{TRANSFORMERS}/{name}"
        return self._checked(file) if file in self.manifest.files else None

    def reference(self) -> Reference:
        # Not splitlines: texts may hold separators that JSON does not escape.
        try:
            text = self._checked(REFERENCE_INPUTS).read_text(encoding="utf-8", errors="surrogatepass")
            rows = tuple(json.loads(row) for row in text.rstrip("\n").split("\n"))
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError("a row is not an object")
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{self.path / REFERENCE_INPUTS} is damaged: {error}") from error
        try:
            # Opened here, since NumPy leaves a file open that turns out to be no archive.
            with self._checked(REFERENCE_OUTPUTS).open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
                outputs = {name: arrays[name] for name in arrays.files}
        except (ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise BundleError(f"{self.path / REFERENCE_OUTPUTS} is damaged: {error}") from error
        return Reference(rows, outputs)

    def check(self) -> None:
        """Every file, its hash, and that nothing else lies in the directory."""
        for name in self.manifest.files:
            self._checked(name)
        found = {
            file.relative_to(self.path).as_posix()
            for file in self.path.rglob("*")
            if file.is_symlink() or not file.is_dir()
        }
        # What lands beside the manifest (README.md, .DS_Store) is never read; what lies in our folders might be.
        extra = sorted(name for name in found - set(self.manifest.files) if "/" in name and not name.startswith("."))
        if extra:
            raise BundleError(
                f"{self.path} holds a file its manifest does not list: {extra[0]}", hint="remove it, or build again"
            )

    def _check_folder(self, folder: str) -> None:
        names = [name for name in self.manifest.files if name.startswith(f"{folder}/")]
        if not names:
            raise BundleError(f"{self.path} lists no file under {folder}/", hint="build the bundle again")
        for name in names:
            self._checked(name)

    def _checked(self, name: str) -> Path:
        path = inside(self.path, name)
        if not path.is_file():
            raise BundleError(f"{self.path} is incomplete: {name} is missing", hint="build the bundle again")
        if name not in self.manifest.files or sha256(path) != self.manifest.files[name]:
            raise BundleError(
                f"{self.path} was changed after it was built: {name} does not match its hash",
                hint="build it again",
            )
        return path


def open_bundle(path: Path | str) -> Bundle:
    directory = Path(path).expanduser()
    return Bundle(directory, read_manifest(directory))


__all__ = ["GRAPH_BACKEND", "MODEL", "Bundle", "Reference", "open_bundle"]
