"""Backends and tasks by name. A new one is a new file, or an entry point of another package."""

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
    """The known word that looks like it, or whose letters it abbreviates: 'onx' means 'onnxruntime'."""
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
    """Loads `<package>/<name>.py` on demand and hands out the object it exposes."""

    kind: str
    package: str
    attribute: str
    _loaded: dict[str, T] = field(default_factory=dict)

    def names(self) -> list[str]:
        return sorted({*self._built_in(), *(point.name for point in entry_points(group=self.package))})

    def get(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def add(self, name: str, thing: T) -> None:
        """For scripts and tests that bring their own without a package."""
        self._loaded[name] = thing

    def all(self) -> list[T]:
        return [self.get(name) for name in self.names()]

    def _built_in(self) -> list[str]:
        folder = import_module(self.package).__path__
        return [module.name.replace("_", "-") for module in pkgutil.iter_modules(folder)]

    def _load(self, name: str) -> T:
        if name in self._built_in():
            module = import_module(f"{self.package}.{name.replace('-', '_')}")
            loaded: T = getattr(module, self.attribute)
            return loaded
        for point in entry_points(group=self.package, name=name):
            try:
                plugin: T = point.load()
            except Exception as error:  # another's package: anything may go wrong in it
                raise UnsupportedError(
                    f"the {self.kind} '{name}' of {point.value} cannot be loaded: {error}",
                    hint="update or uninstall the package it comes from",
                ) from error
            return plugin
        raise PlanError(
            f"unknown {self.kind} '{name}'{did_you_mean(name, self.names())}",
            hint=f"known: {', '.join(self.names())}",
        )
