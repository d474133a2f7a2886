"""The models a server holds, by name: loaded, replaced and taken away while others are being asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from hasten.core.errors import InputError, PlanError
from hasten.server.served import Served

READY = "READY"


class Models:
    """Readers take no lock: the mapping is replaced as a whole, never changed."""

    def __init__(self, open_model: Callable[[Path, str], Served], drain_s: float = 60.0) -> None:
        self._open = open_model
        # For one that is replaced or taken away to answer what it has taken.
        self._drain_s = drain_s
        self._served: dict[str, Served] = {}
        self._paths: dict[str, Path] = {}
        self._change = threading.Lock()

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def named(self, name: str) -> Served:
        found = self._served.get(name)
        if found is None:
            known = ", ".join(self._served) or "none"
            raise PlanError(f"there is no model '{name}'", hint=f"models: {known}")
        return found

    def only(self, name: str = "", what: Callable[[Served], bool] = lambda _: True) -> Served:
        """The model of that name or, without one, the only one that fits."""
        if name:
            return self.named(name)
        fitting = [served for served in self if what(served)]
        if len(fitting) != 1:
            names = ", ".join(served.name for served in fitting)
            wrong = f"more than one model fits: {names}" if fitting else "no model here answers that"
            raise InputError(wrong, hint='name one with "model"' if fitting else None)
        return fitting[0]

    def load(self, path: Path, name: str) -> Served:
        """Open a bundle and put it in the place of the one of that name, which first answers what it has taken.

        Where the new one cannot be opened, the old one stays.
        """
        with self._change:
            served = self._open(path, name)
            before = self._served.get(served.name)
            self._served = {**self._served, served.name: served}
            self._paths[served.name] = path
        if before is not None:
            before.close(self._drain_s)
        return served

    def unload(self, name: str) -> None:
        with self._change:
            before = self.named(name)
            self._served = {other: served for other, served in self._served.items() if other != name}
        before.close(self._drain_s)

    def know(self, path: Path, name: str) -> None:
        """Without loading it: that is done when it is asked for."""
        self._paths[name] = path

    def load_again(self, name: str) -> Served:
        """One that was loaded before, or is known, from where it was."""
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


def repository(models: Models) -> list[dict[str, str]]:
    """All that were ever loaded, and whether they are there: the index of the v2 protocol."""
    there = {served.name for served in models}
    gone = {"state": "UNAVAILABLE", "reason": "unloaded"}
    return [{"name": name, "version": "1", **({"state": READY} if name in there else gone)} for name in models.paths]
