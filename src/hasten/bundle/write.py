"""Writing a bundle: into a hidden sibling, then one rename. A crash leaves nothing that looks like a bundle."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from hasten.backends import Artifact
from hasten.bundle.manifest import FILE, Manifest, is_bundle, sha256
from hasten.bundle.read import REFERENCE_INPUTS, REFERENCE_OUTPUTS, REPORT, TOKENIZER, Bundle
from hasten.core.errors import PlanError, translate_os_errors
from hasten.core.report import Report
from hasten.core.tensors import Outputs

if TYPE_CHECKING:
    from hasten.tasks import Row


def check_target(target: Path, *, force: bool) -> None:
    """Before any work: whether a bundle can be written there, without ever deleting what is not a bundle."""
    try:
        _check_free(target, force=force)
        above = next(parent for parent in target.absolute().parents if parent.exists())
        if not above.is_dir():
            raise PlanError(f"{above} is a file", hint="choose another place with -o")
        # Tried, since nothing else tells for sure: it is written beside its place, at the end of minutes of work.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=above):
            pass
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error.strerror}", hint="choose another place with -o") from error


def _check_free(target: Path, *, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise PlanError(f"{target} is a file", hint="choose another place with -o")
    if not any(target.iterdir()):
        return
    if not is_bundle(target):
        raise PlanError(f"{target} is not empty and holds no bundle", hint="choose another place with -o")
    if not force:
        raise PlanError(f"{target} already holds a bundle", hint="--force replaces it")


class BundleWriter:
    """A context: leaving it without `commit` removes everything."""

    def __init__(self, target: Path, *, force: bool = False) -> None:
        self.target = target.absolute()
        self._force = force

    def __enter__(self) -> Self:
        with translate_os_errors(f"making a directory beside {self.target}"):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._work = Path(tempfile.mkdtemp(prefix=f".{self.target.name}-", dir=self.target.parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    def add_graph(self, graph: Path) -> str:
        """The graph with its external data; returns its path inside the bundle."""
        for file in (graph, *graph.parent.glob(f"{graph.name}.data*")):
            self._copy(file, Path("graph") / file.name)
        return f"graph/{graph.name}"

    def add_variant(self, artifact: Artifact) -> None:
        for file in sorted(artifact.directory.rglob("*")):
            if file.is_file():
                relative = file.relative_to(artifact.directory)
                self._copy(file, Path("variants") / artifact.variant.name / relative)

    def add_tokenizer(self, file: Path) -> None:
        self._copy(file, Path(TOKENIZER))

    def add_reference(self, rows: Sequence[Row], outputs: Outputs) -> None:
        with translate_os_errors(f"writing {self.target}"):
            inputs = self._work / REFERENCE_INPUTS
            inputs.parent.mkdir()
            inputs.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                encoding="utf-8",
                errors="surrogatepass",
            )
            np.savez_compressed(self._work / REFERENCE_OUTPUTS, allow_pickle=False, **outputs)

    def add_report(self, report: Report) -> None:
        with translate_os_errors(f"writing {self.target}"):
            (self._work / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))

    def commit(self, manifest: Manifest) -> Bundle:
        """Seal with the hashes of all files and move into place, replacing an older bundle in two renames."""
        files = {
            file.relative_to(self._work).as_posix(): sha256(file)
            for file in sorted(self._work.rglob("*"))
            if file.is_file()
        }
        manifest = replace(manifest, files=files).sealed()
        with translate_os_errors(f"writing {self.target}"):
            (self._work / FILE).write_bytes(manifest.to_json())
            self._work.chmod(0o755)
            self._swap_in()
        return Bundle(self.target, manifest)

    def _swap_in(self) -> None:
        # Asked again: something else may have appeared there while the build was running.
        check_target(self.target, force=self._force)
        old = self.target.with_name(f"{self._work.name}-old")
        is_replacing = self.target.exists()
        if is_replacing:
            self.target.rename(old)
        try:
            self._work.rename(self.target)
        except BaseException:
            if is_replacing:
                old.rename(self.target)
            raise
        if old.is_symlink():
            old.unlink()
        shutil.rmtree(old, ignore_errors=True)

    def _copy(self, file: Path, place: Path) -> None:
        with translate_os_errors(f"writing {self.target}"):
            destination = self._work / place
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, destination)
