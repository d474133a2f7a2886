"""What works on this machine and what does not: packages, backends, and what really executes.

Each backend and package is tried for real in a process of its own. This one imports nothing but the standard library
before hasten has proven to import, so that it still answers when that is what is broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

from hasten.core.errors import HastenError
from hasten.core.execution import Trial
from hasten.core.hardware import Machine, this_machine
from hasten.measure.checkup import check_backend, check_package
from hasten.measure.packages import Collision, Package, read_packages

if TYPE_CHECKING:
    from hasten.backends import Backend
    from hasten.core.registry import Registry

# What answering from a bundle imports, whatever the backend.
_BASE = "hasten.predictor"


class Health(StrEnum):
    WORKS = "works"
    ABSENT = "absent"  # not installed, or not for this machine
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class BackendHealth:
    name: str
    health: Health
    reason: str = ""
    hint: str = ""
    variants: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is installed, and broken, outside its range or colliding. What is merely absent is none."""

    what: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    machine: Machine
    packages: tuple[Package, ...]
    backends: tuple[BackendHealth, ...]
    problems: tuple[Problem, ...]


def diagnose() -> Diagnosis:
    machine = this_machine()
    packages, problems = _packages()
    base = check_package(_BASE)
    with ThreadPoolExecutor(machine.cores) as pool:
        if base.error:
            broken = _broken(pool, [package for package in packages if not package.extras])
            problems += broken or [Problem(f"hasten does not import: {base.error}", "pip install hasten")]
            return Diagnosis(machine, tuple(packages), (), tuple(problems))
        from hasten.backends import BACKENDS, Backend
        from hasten.tasks import TASKS

        backends, failures = _loaded(BACKENDS, Backend)
        problems += failures + _loaded(TASKS, object)[1]
        # To be reinstalled under the name it goes by: asking for onnxruntime beside onnxruntime-gpu breaks both.
        providers = {package.module: package.provider for package in packages}
        looked_at = pool.map(partial(_look_at, providers), backends)
        tried = {module for backend in backends for module in backend.requires}
        problems += _broken(pool, [package for package in packages if package.module not in tried])
        health = tuple(looked_at)
    problems += [
        Problem(f"the backend '{one.name}' is broken: {one.reason}", one.hint)
        for one in health
        if one.health is Health.BROKEN
    ]
    return Diagnosis(machine, tuple(packages), health, tuple(problems))


def _packages() -> tuple[list[Package], list[Problem]]:
    try:
        packages, collisions = read_packages()
    except PackageNotFoundError:
        return [], [Problem("hasten was not installed by pip, so which versions it needs is not known")]
    except ImportError as error:
        return [], [Problem(f"packaging does not import: {error}", _reinstall("packaging"))]
    return packages, [*_unsupported(packages), *_colliding(collisions)]


def _unsupported(packages: Iterable[Package]) -> list[Problem]:
    return [
        Problem(f"{package.provider} {package.version} is not in the range hasten supports ({package.supported})",
                f"pip install --upgrade '{package.provider}{package.supported}'")
        for package in packages
        if not package.is_supported
    ]  # fmt: skip


def _colliding(collisions: Iterable[Collision]) -> list[Problem]:
    return [
        Problem(
            f"{' and '.join(both.providers)} are installed together and write the same folder '{both.module}':"
            " which one runs is an accident",
            both.hint,
        )
        for both in collisions
    ]


def _broken(pool: ThreadPoolExecutor, packages: Sequence[Package]) -> list[Problem]:
    """Installed packages that do not import."""
    installed = [package for package in packages if package.module is not None]
    checked = pool.map(check_package, [package.module or "" for package in installed])
    return [
        Problem(
            f"{package.provider} {package.version} does not import: {result.error}",
            _reinstall(package.provider or package.name),
        )
        for package, result in zip(installed, checked, strict=True)
        if result.error
    ]


def _loaded(registry: Registry[Any], contract: type) -> tuple[list[Any], list[Problem]]:
    """What is registered, and which extensions of other packages do not load or are something else."""
    loaded, problems = [], []
    for name in registry.names():
        try:
            thing = registry.get(name)
        except HastenError as error:
            problems.append(Problem(error.message, error.hint or ""))
            continue
        if isinstance(thing, contract):
            loaded.append(thing)
        else:
            problems.append(Problem(f"what is registered as the {registry.kind} '{name}' is none"))
    return loaded, problems


def _look_at(providers: Mapping[str | None, str | None], backend: Backend) -> BackendHealth:
    from hasten.backends import probe_packages

    if not probe_packages(backend).ok:
        # What it says itself may come before that: who has no GPU need not install anything for it.
        support = backend.probe(this_machine())
        return BackendHealth(backend.name, Health.ABSENT, support.reason, support.hint)
    found = check_backend(backend.name)
    if found.error:
        packages = [providers.get(module) or module for module in backend.requires]
        return BackendHealth(backend.name, Health.BROKEN, found.error, _reinstall(*packages))
    if found.reason:
        return BackendHealth(backend.name, Health.ABSENT, found.reason, found.hint)
    failed = [f"{trial.asked}: {trial.note}" for trial in found.trials if not trial.is_ok]
    health = Health.BROKEN if failed else Health.WORKS
    return BackendHealth(backend.name, health, "; ".join(failed), "", found.variants, found.trials)


def _reinstall(*packages: str) -> str:
    return f"pip install --force-reinstall {' '.join(packages)}"
