"""The packages hasten works with, as their metadata says: which are installed, which versions fit, which collide."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

# For people who work on hasten itself.
_OWN_EXTRAS = {"demo", "dev"}
# A file, not a folder, and none that its list of files would tell from an example beside it.
_MODULES = {"nvidia-ml-py": "pynvml"}


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement of hasten's, and what is there of it."""

    name: str
    # The extras that bring it; what has none belongs to the base.
    extras: tuple[str, ...]
    supported: str
    # The distribution that provides it, which may go by another name: onnxruntime-gpu for onnxruntime.
    provider: str | None = None
    version: str | None = None
    # What it is imported by.
    module: str | None = None
    is_supported: bool = True

    @property
    def hint(self) -> str:
        return (
            f"pip install 'hasten[{self.extras[0]}]'" if self.extras else f"pip install '{self.name}{self.supported}'"
        )


@dataclass(frozen=True, slots=True)
class Collision:
    """Distributions that write the same folder: the last one installed wins, and removing it breaks the other."""

    module: str
    providers: tuple[str, ...]

    @property
    def hint(self) -> str:
        return f"pip uninstall --yes {' '.join(self.providers)}, then pip install the one that you want"


def read_packages() -> tuple[list[Package], list[Collision]]:
    """What hasten's own metadata asks for, base first, looked up among what is installed."""
    providers = _providers()
    packages = [_look_up(name, extras, fits, providers) for name, (extras, fits) in _requirements().items()]
    collisions = []
    for package in packages:
        names = sorted({_field(found, "Name") for found in providers.get(package.module or "", ())})
        if package.module is not None and len(names) > 1:
            collisions.append(Collision(package.module, tuple(names)))
    return sorted(packages, key=lambda package: (package.extras, package.name)), collisions


def _requirements() -> dict[str, tuple[tuple[str, ...], SpecifierSet]]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    about = metadata("hasten")
    extras = [extra for extra in about.get_all("Provides-Extra") or [] if extra not in _OWN_EXTRAS]
    found: dict[str, tuple[tuple[str, ...], SpecifierSet]] = {}
    for requirement in map(Requirement, about.get_all("Requires-Dist") or []):
        marker = requirement.marker
        users = [extra for extra in ("", *extras) if marker is None or marker.evaluate({"extra": extra})]
        if requirement.name == "hasten" or not users:
            continue
        before, fits = found.get(requirement.name, ((), SpecifierSet()))
        # What the base needs, every extra needs too: only what comes on top belongs to one.
        found[requirement.name] = (() if "" in users else (*before, *users), fits & requirement.specifier)
    return found


def _providers() -> Mapping[str, Sequence[Distribution]]:
    """The distributions that wrote each importable folder, by their own lists of files."""
    found: dict[str, list[Distribution]] = {}
    for candidate in distributions():
        # Searched as text: parsing the lists takes seconds.
        for folder in re.findall(r"^(\w+)/__init__\.py,", candidate.read_text("RECORD") or "", re.MULTILINE):
            found.setdefault(folder, []).append(candidate)
    return found


def _look_up(
    name: str, extras: tuple[str, ...], fits: SpecifierSet, providers: Mapping[str, Sequence[Distribution]]
) -> Package:
    from packaging.version import InvalidVersion

    module = _MODULES.get(name, name.replace("-", "_"))
    try:
        provider = distribution(name)
    except PackageNotFoundError:
        if module not in providers:
            return Package(name, extras, str(fits))
        provider = providers[module][0]
    if module not in providers:
        folders = [folder for folder, writers in providers.items() if _field(provider, "Name") in map(_name, writers)]
        # Of a namespace that packages share, each writes a part: opentelemetry-sdk is opentelemetry.sdk.
        part = name.replace("-", "/")
        shared = [part.replace("/", ".")] if f"\n{part}/" in f"\n{provider.read_text('RECORD')}" else []
        module = next((folder for folder in (*folders, *shared) if not folder.startswith("_")), module)
    version = _field(provider, "Version")
    try:
        is_supported = fits.contains(version, prereleases=True)
    except InvalidVersion:
        is_supported = False
    return Package(name, extras, str(fits), _name(provider), version, module, is_supported)


def _name(found: Distribution) -> str:
    return _field(found, "Name")


def _field(found: Distribution, field: str) -> str:
    """Damaged metadata has none of them."""
    return next(iter(found.metadata.get_all(field) or ()), "unknown")
