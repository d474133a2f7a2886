"""Read from metadata which required packages are installed, supported, or in conflict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

# Extras for developers of hasten.
_DEVELOPER_EXTRAS = {"demo", "dev"}
# Modules that are a file, not a folder, and cannot be recognized in the package's list of files.
_MODULES = {"nvidia-ml-py": "pynvml"}


@dataclass(frozen=True, slots=True)
class Package:
    """A requirement of hasten, and the installed distribution that provides it."""

    name: str
    # The extras that require it; empty for the base installation.
    extras: tuple[str, ...]
    supported: str
    # The distribution that provides it, possibly under another name: onnxruntime-gpu for onnxruntime.
    provider: str | None = None
    version: str | None = None
    # The name it is imported by.
    module: str | None = None
    is_supported: bool = True

    @property
    def hint(self) -> str:
        """Return the command that installs it."""
        requirement = f"hasten[{self.extras[0]}]" if self.extras else f"{self.name}{self.supported}"
        return f"pip install '{requirement}'"


@dataclass(frozen=True, slots=True)
class Collision:
    """Distributions that write the same folder: the last one installed wins, and removing it breaks the other."""

    module: str
    providers: tuple[str, ...]

    @property
    def hint(self) -> str:
        """Return the commands that resolve the conflict."""
        return f"pip uninstall --yes {' '.join(self.providers)}, then pip install one of them"


def read_packages() -> tuple[list[Package], list[Collision]]:
    """Return the requirements of hasten, base first, with the installed distributions, and their conflicts."""
    providers = _providers()
    packages = [_look_up(name, extras, supported, providers) for name, (extras, supported) in _requirements().items()]
    collisions = []
    for package in packages:
        names = sorted({_name(provider) for provider in providers.get(package.module or "", ())})
        if package.module is not None and len(names) > 1:
            collisions.append(Collision(package.module, tuple(names)))
    return sorted(packages, key=lambda package: (package.extras, package.name)), collisions


def _requirements() -> dict[str, tuple[tuple[str, ...], SpecifierSet]]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    package_metadata = metadata("hasten")
    extras = [extra for extra in package_metadata.get_all("Provides-Extra") or [] if extra not in _DEVELOPER_EXTRAS]
    requirements: dict[str, tuple[tuple[str, ...], SpecifierSet]] = {}
    for requirement in map(Requirement, package_metadata.get_all("Requires-Dist") or []):
        marker = requirement.marker
        users = [extra for extra in ("", *extras) if marker is None or marker.evaluate({"extra": extra})]
        if requirement.name == "hasten" or not users:
            continue
        known_users, supported = requirements.get(requirement.name, ((), SpecifierSet()))
        # A requirement of the base is one of every extra too: it is listed for the base only.
        users = [] if "" in users else [*known_users, *users]
        requirements[requirement.name] = (tuple(users), supported & requirement.specifier)
    return requirements


def _providers() -> Mapping[str, Sequence[Distribution]]:
    """Return the distributions that installed each importable folder, by their lists of files."""
    providers: dict[str, list[Distribution]] = {}
    for candidate in distributions():
        # Searched as text: parsing the lists takes seconds.
        for folder in re.findall(r"^(\w+)/__init__\.py,", candidate.read_text("RECORD") or "", re.MULTILINE):
            providers.setdefault(folder, []).append(candidate)
    return providers


def _look_up(
    name: str, extras: tuple[str, ...], supported: SpecifierSet, providers: Mapping[str, Sequence[Distribution]]
) -> Package:
    from packaging.version import InvalidVersion

    module = _MODULES.get(name, name.replace("-", "_"))
    try:
        provider = distribution(name)
    except PackageNotFoundError:
        if module not in providers:
            return Package(name, extras, str(supported))
        provider = providers[module][0]
    if module not in providers:
        folders = [folder for folder, owners in providers.items() if _name(provider) in map(_name, owners)]
        # Packages may share a namespace: opentelemetry-sdk is opentelemetry.sdk.
        part = name.replace("-", "/")
        shared = [part.replace("/", ".")] if f"\n{part}/" in f"\n{provider.read_text('RECORD')}" else []
        module = next((folder for folder in (*folders, *shared) if not folder.startswith("_")), module)
    version = _field(provider, "Version")
    try:
        is_supported = supported.contains(version, prereleases=True)
    except InvalidVersion:
        is_supported = False
    return Package(name, extras, str(supported), _name(provider), version, module, is_supported)


def _name(provider: Distribution) -> str:
    return _field(provider, "Name")


def _field(provider: Distribution, field: str) -> str:
    """Return a field of the metadata; damaged metadata may lack it."""
    return next(iter(provider.metadata.get_all(field) or ()), "unknown")
