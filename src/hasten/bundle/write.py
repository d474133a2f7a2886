"""Write a bundle atomically: a crash leaves no partial bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hasten.backends import Artifact
from hasten.bundle.manifest import FILE, Manifest, is_bundle, sha256
from hasten.bundle.read import PAGE, REFERENCE_INPUTS, REFERENCE_OUTPUTS, REPORT, TOKENIZER, TRANSFORMERS, Bundle
from hasten.core.errors import translate_os_errors
from hasten.core.report import Report
from hasten.core.system import atomic_directory
from hasten.core.system.atomic_directory import AtomicDirectory
from hasten.core.tensors import Outputs

if TYPE_CHECKING:
    from hasten.tasks import Row


def check_target(target: Path, *, force: bool) -> None:
    """Raise before any work if a bundle cannot be written there."""
    atomic_directory.check_target(target, force=force, kind="bundle", is_ours=is_bundle)


class BundleWriter(AtomicDirectory):
    """Collects the files of a bundle; leaving the context without `commit` removes them."""

    def __init__(self, target: Path, *, force: bool = False) -> None:
        super().__init__(target, lambda path: check_target(path, force=force))
        self.reference_rows: Sequence[Row] = ()

    def add_graph(self, graph: Path) -> str:
        """Add the graph with its external data; return its path inside the bundle."""
        for file in (graph, *graph.parent.glob(f"{graph.name}.data*")):
            self._copy(file, Path("graph") / file.name)
        return f"graph/{graph.name}"

    def add_variant(self, artifact: Artifact) -> None:
        """Add the files of a variant."""
        for file in sorted(artifact.directory.rglob("*")):
            if file.is_file():
                relative = file.relative_to(artifact.directory)
                self._copy(file, Path("variants") / artifact.variant.name / relative)

    def add_tokenizer(self, file: Path) -> None:
        """Add tokenizer.json."""
        self._copy(file, Path(TOKENIZER))

    def add_configurations(self, folder: Path) -> None:
        """Add the configurations that transformers reads."""
        for file in sorted(folder.iterdir()):
            self._copy(file, Path(TRANSFORMERS) / file.name)

    def add_reference(self, rows: Sequence[Row], outputs: Outputs) -> None:
        """Add input rows and the outputs of the original model."""
        self.reference_rows = rows
        with translate_os_errors(f"writing {self.target}"):
            inputs = self.path / REFERENCE_INPUTS
            inputs.parent.mkdir()
            inputs.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                encoding="utf-8",
                errors="surrogatepass",
            )
            np.savez_compressed(self.path / REFERENCE_OUTPUTS, allow_pickle=False, **outputs)

    def add_report(self, report: Report) -> None:
        """Add the report of the build."""
        with translate_os_errors(f"writing {self.target}"):
            (self.path / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))

    def add_page(self, text: str) -> None:
        """Add the report as a page."""
        with translate_os_errors(f"writing {self.target}"):
            (self.path / PAGE).write_text(text, encoding="utf-8")

    def commit(self, manifest: Manifest) -> Bundle:
        """Seal the manifest with the hashes of all files and move the bundle into place."""
        # The page repeats other files, and `hasten report` writes it anew.
        files = {
            file.relative_to(self.path).as_posix(): sha256(file)
            for file in sorted(self.path.rglob("*"))
            if file.is_file() and file != self.path / PAGE
        }
        manifest = replace(manifest, files=files).sealed()
        with translate_os_errors(f"writing {self.target}"):
            (self.path / FILE).write_bytes(manifest.to_json())
        self.put_in_place()
        return Bundle(self.target, manifest)

    def _copy(self, file: Path, relative: Path) -> None:
        with translate_os_errors(f"writing {self.target}"):
            destination = self.path / relative
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, destination)
