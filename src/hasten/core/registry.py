"""Look up backends and tasks by name. A new one is a new file, or an entry point of another package."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from hasten.core.errors import PlanError, UnsupportedError

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion if a known word is similar, or abbreviated by `word` ('onx' for 'onnxruntime'), else ""."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close and len(word) >= 2:
        close = [name for name in names if name.startswith(word[0]) and _abbreviates(word, name)]
    return f": did you mean '{close[0]}'?" if close else ""


def _abbreviates(word: str, name: str) -> bool:
    letters = iter(name)
    return all(letter in letters for letter in word)


@dataclass
class Registry(Generic[T]):
    """Loads `<package>/<name>.py` on demand and returns the object that it exposes."""

    kind: str
    package: str
    attribute: str
    _loaded: dict[str, T] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of built-in modules and entry points, sorted."""
        return sorted({*self._built_in(), *(point.name for point in entry_points(group=self.package))})

    def get(self, name: str) -> T:
        """Return the object of this name, loaded on first use."""
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def add(self, name: str, entry: T) -> None:
        """Register an object without a package, for scripts and tests."""
        self._loaded[name] = entry

    def all(self) -> list[T]:
        """Return all objects, in the order of their names."""
        return [self.get(name) for name in self.names()]

    def _built_in(self) -> list[str]:
        folder = import_module(self.package).__path__
        # A leading underscore marks a helper module beside the entries: it exposes no object to register.
        return [
            module.name.replace("_", "-") for module in pkgutil.iter_modules(folder) if not module.name.startswith("_")
        ]

    def _load(self, name: str) -> T:
        if name in self._built_in():
            module = import_module(f"{self.package}.{name.replace('-', '_')}")
            loaded: T = getattr(module, self.attribute)
            return loaded
        for point in entry_points(group=self.package, name=name):
            try:
                plugin: T = point.load()
            except Exception as error:  # a third-party package may raise anything
                raise UnsupportedError(
                    f"the {self.kind} '{name}' of {point.value} cannot be loaded: {error}",
                    hint="update or uninstall the package it comes from",
                ) from error
            return plugin
        raise PlanError(
            f"unknown {self.kind} '{name}'{did_you_mean(name, self.names())}",
            hint=f"known: {', '.join(self.names())}",
        )
