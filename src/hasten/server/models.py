"""The models a server holds, by name: loaded, replaced and taken away while others are being asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from hasten.bundle import Bundle
from hasten.bundle.manifest import FILE
from hasten.core.errors import InputError, PlanError, UnavailableError
from hasten.core.variant import Variant

READY = "READY"


class Runs(Protocol):
    """What is asked of an engine, whatever its model does."""

    @property
    def waiting(self) -> int: ...

    def expire(self, now: float) -> None: ...

    def hung_s(self, now: float) -> float: ...


class Model(Protocol):
    """A bundle that is being served: one that answers (`served.py`) or one that writes (`served_writer.py`)."""

    @property
    def name(self) -> str: ...

    @property
    def bundle(self) -> Bundle: ...

    @property
    def variant(self) -> Variant: ...

    @property
    def instances(self) -> int: ...

    @property
    def since(self) -> float: ...

    @property
    def engine(self) -> Runs: ...

    def close(self, drain_s: float = 0.0) -> bool: ...


# Opens a bundle under a name, in the place of the one that has it, if any.
Opener = Callable[[Path, str, Model | None], Model]
# Of every file: its name, what it is on the disk, when it was written, and its size.
Stamp = frozenset[tuple[str, int, int, int]]


class Models:
    """Readers take no lock: the mappings are replaced as a whole, never changed."""

    def __init__(self, open_model: Opener, drain_s: float = 60.0) -> None:
        self._open = open_model
        # For one that is replaced or taken away to answer what it has taken.
        self._drain_s = drain_s
        self._served: dict[str, Model] = {}
        # Those that are still to be loaded for the first time.
        self._coming: frozenset[str] = frozenset()
        self._paths: dict[str, Path] = {}
        # What was on the disk when it was last tried to load it.
        self._stamps: dict[str, Stamp | None] = {}
        self._change = threading.Lock()

    def __iter__(self) -> Iterator[Model]:
        return iter(self._served.values())

    def named(self, name: str) -> Model:
        found = self._served.get(name)
        if found is None and name in self._coming:
            raise UnavailableError(f"'{name}' is not loaded yet")
        if found is None:
            known = ", ".join(self._served) or "none"
            raise PlanError(f"there is no model '{name}'", hint=f"models: {known}")
        return found

    def only(self, name: str = "", what: Callable[[Model], bool] = lambda _: True) -> Model:
        """The model of that name or, without one, the only one that fits."""
        if name:
            return self.named(name)
        if self._coming:
            # Which it is, is known when all are there.
            raise UnavailableError("the models are not loaded yet")
        fitting = [served for served in self if what(served)]
        if len(fitting) != 1:
            names = ", ".join(served.name for served in fitting)
            wrong = f"more than one model fits: {names}" if fitting else "no model here answers that"
            raise InputError(wrong, hint='name one with "model"' if fitting else None)
        return fitting[0]

    @property
    def is_complete(self) -> bool:
        return not self._coming

    def expect(self, names: Iterable[str]) -> None:
        """They will be loaded: whoever asks for one of them before is told to wait."""
        self._coming = frozenset(names)

    def load(self, path: Path, name: str) -> Model:
        """Open a bundle and put it in the place of the one of that name, which first answers what it has taken.

        Where the new one cannot be opened, the old one stays.
        """
        with self._change:
            before, served = self._replace(path, name)
        if before is not None:
            before.close(self._drain_s)
        return served

    def refresh(self, path: Path, name: str) -> Model | None:
        """Load it where what is on the disk is not what it was last tried with; None where it is, or is being made."""
        with self._change:
            stamp = stamp_of(path)
            if stamp is None or stamp == self._stamps.get(name):
                return None
            before, served = self._replace(path, name)
        if before is not None:
            before.close(self._drain_s)
        return served

    def _replace(self, path: Path, name: str) -> tuple[Model | None, Model]:
        # Before it is read: what changes meanwhile is not missed.
        self._stamps[name] = stamp_of(path)
        before = self._served.get(name)
        served = self._open(path, name, before)
        self._served = {**self._served, name: served}
        self._coming -= {name}
        self._paths[name] = path
        return before, served

    def unload(self, name: str) -> None:
        with self._change:
            before = self.named(name)
            self._served = {other: served for other, served in self._served.items() if other != name}
        before.close(self._drain_s)

    def know(self, path: Path, name: str) -> None:
        """Without loading it: that is done when it is asked for."""
        self._paths[name] = path

    def load_again(self, name: str) -> Model:
        """One that was loaded before, or is known, from where it was."""
        if name in self._coming:
            raise UnavailableError(f"'{name}' is not loaded yet")
        path = self._paths.get(name)
        if path is None:
            raise PlanError(f"'{name}' is none of this server's models", hint=f"known: {', '.join(self._paths)}")
        return self.load(path, name)

    @property
    def paths(self) -> dict[str, Path]:
        """Of all that were ever loaded, or are known."""
        return dict(self._paths)

    def close(self, drain_s: float) -> bool:
        """Answer what was taken, then stop; whether all of it was answered in time."""
        threads = []
        done: list[bool] = []
        for served in self:
            thread = threading.Thread(target=lambda one=served: done.append(one.close(drain_s)))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        return all(done)


def stamp_of(path: Path) -> Stamp | None:
    """None while it is being replaced. All files, not the manifest alone: those that come file by file come last."""
    try:
        if not (path / FILE).is_file():
            return None
        found = ((file, file.stat()) for file in path.rglob("*") if file.is_file())
        return frozenset(
            (str(file.relative_to(path)), about.st_ino, about.st_mtime_ns, about.st_size) for file, about in found
        )
    except OSError:
        return None


def repository(models: Models) -> list[dict[str, str]]:
    """All that were ever loaded, and whether they are there: the index of the v2 protocol."""
    there = {served.name for served in models}
    gone = {"state": "UNAVAILABLE", "reason": "unloaded"}
    return [{"name": name, "version": "1", **({"state": READY} if name in there else gone)} for name in models.paths]
