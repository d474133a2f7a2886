"""A directory that appears whole or not at all: written into a hidden sibling, then renamed into place."""

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
class Hints:
    """What else can be done, in the words of whoever was asked: the command line's, if not others."""

    elsewhere: str = "choose another place with -o"
    replacing: str = "--force replaces it"


_HINTS = Hints()


def check_target(
    target: Path, *, force: bool, what: str, is_ours: Callable[[Path], bool], hints: Hints = _HINTS
) -> None:
    """Before any work: whether it can be written there, without ever deleting what we did not write."""
    try:
        _check_free(target, force, what, is_ours, hints)
        above = next(parent for parent in target.absolute().parents if parent.exists())
        if not above.is_dir():
            raise PlanError(f"{above} is a file", hint=hints.elsewhere)
        # Tried, since nothing else tells for sure: it is written beside its place, at the end of minutes of work.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=above):
            pass
    except OSError as error:
        raise PlanError(f"{target} cannot be written: {error.strerror}", hint=hints.elsewhere) from error


def _check_free(target: Path, force: bool, what: str, is_ours: Callable[[Path], bool], hints: Hints) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise PlanError(f"{target} is a file", hint=hints.elsewhere)
    if not any(target.iterdir()):
        return
    if not is_ours(target):
        raise PlanError(f"{target} is not empty and holds no {what}", hint=hints.elsewhere)
    if not force:
        raise PlanError(f"{target} already holds a {what}", hint=hints.replacing)


class Staging:
    """A context: leaving it without `put_in_place` removes everything. `path` is where to write meanwhile."""

    path: Path
    _made: list[Path]

    def __init__(self, target: Path, check: Callable[[Path], None]) -> None:
        self.target = target.absolute()
        self._check = check

    def __enter__(self) -> Self:
        with translate_os_errors(f"making a directory beside {self.target}"):
            # Nearest first: those that are empty in the end go again.
            self._made = [above for above in self.target.parents if not above.exists()]
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.target.name}-", dir=self.target.parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            for above in self._made:
                above.rmdir()

    def put_in_place(self) -> None:
        """By renaming it, replacing an older one in two renames."""
        with translate_os_errors(f"writing {self.target}"):
            self.path.chmod(0o755)
            # Asked again: something else may have appeared there meanwhile.
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
