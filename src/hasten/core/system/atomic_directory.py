"""Write a directory atomically: into a hidden sibling that is renamed at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from hasten.core.errors import PlanError, translate_os_errors


@dataclass(frozen=True, slots=True)
class TargetHints:
    """The hints of errors about a target; by default those of the command line."""

    elsewhere: str = "choose another directory with -o"
    replacing: str = "--force replaces it"


_HINTS = TargetHints()


def check_target(
    target: Path, *, force: bool, kind: str, is_ours: Callable[[Path], bool], hints: TargetHints = _HINTS
) -> None:
    """Raise a PlanError, before any work, if the target cannot be written without deleting files that are not ours."""
    try:
        _check_free(target, force, kind, is_ours, hints)
        parent = next(parent for parent in target.absolute().parents if parent.exists())
        if not parent.is_dir():
            raise PlanError(f"{parent} is a file", hint=hints.elsewhere)
        # Only an attempt shows whether the parent is writable; otherwise minutes of work would fail at their end.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=parent):
            pass
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error.strerror}", hint=hints.elsewhere) from error


def _check_free(target: Path, force: bool, kind: str, is_ours: Callable[[Path], bool], hints: TargetHints) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise PlanError(f"{target} is a file", hint=hints.elsewhere)
    if not any(target.iterdir()):
        return
    if not is_ours(target):
        raise PlanError(f"{target} is not empty and holds no {kind}", hint=hints.elsewhere)
    if not force:
        raise PlanError(f"{target} already holds a {kind}", hint=hints.replacing)


class AtomicDirectory:
    """A context manager that provides `path` to write into; leaving it without `put_in_place` removes everything."""

    path: Path
    _new_parents: list[Path]

    def __init__(self, target: Path, check: Callable[[Path], None]) -> None:
        self.target = target.absolute()
        self._check = check

    def __enter__(self) -> Self:
        with translate_os_errors(f"creating a directory beside {self.target}"):
            # Nearest first. Those that are still empty at the end are removed again.
            self._new_parents = [parent for parent in self.target.parents if not parent.exists()]
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.target.name}-", dir=self.target.parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            for parent in self._new_parents:
                parent.rmdir()

    def put_in_place(self) -> None:
        """Rename the directory to its target; an older one is replaced in two renames."""
        with translate_os_errors(f"writing {self.target}"):
            self.path.chmod(0o755)
            # Check again: something else may have appeared there meanwhile.
            self._check(self.target)
            old = self.target.with_name(f"{self.path.name}-old")
            is_replacing = self.target.exists()
            if is_replacing:
                self.target.rename(old)
            try:
                self.path.rename(self.target)
            except BaseException:
                if is_replacing:
                    old.rename(self.target)
                raise
            if old.is_symlink():
                old.unlink()
            shutil.rmtree(old, ignore_errors=True)
