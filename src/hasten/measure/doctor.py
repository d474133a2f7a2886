"""Diagnose this machine: which packages and backends work, and where operators really run.

Each backend and package is tried in its own process. This module imports only the standard library before hasten is
known to import, so that it still reports when hasten itself is broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

from hasten.core.errors import HastenError
from hasten.core.placement import SelfTest
from hasten.core.system.hardware import GPU_FAILURE_HINT, Machine, this_machine
from hasten.measure.isolated_probe import check_backend, check_package
from hasten.measure.packages import Package, read_packages

if TYPE_CHECKING:
    from hasten.backends import Backend
    from hasten.core.registry import Registry

# The module that every prediction imports, whatever the backend.
_BASE_MODULE = "hasten.predictor"


class Health(StrEnum):
    """The state of a backend on this machine."""

    WORKS = "works"
    ABSENT = "absent"  # not installed, or not for this machine
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """A backend with the variants it offers and the results of its self-tests."""

    name: str
    health: Health
    reason: str = ""
    hint: str = ""
    variants: tuple[str, ...] = ()
    trials: tuple[SelfTest, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """An installed package or backend that is broken, unsupported or in conflict; absence is not a problem."""

    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of `hasten doctor`."""

    machine: Machine
    packages: tuple[Package, ...]
    backends: tuple[BackendHealth, ...]
    problems: tuple[Problem, ...]


def diagnose() -> Diagnosis:
    """Check all packages and backends on this machine."""
    machine = this_machine()
    packages, problems = _packages()
    if machine.gpu_failure:
        problems.append(Problem(f"the CUDA driver fails: {machine.gpu_failure}", GPU_FAILURE_HINT))
    base = check_package(_BASE_MODULE)
    with ThreadPoolExecutor(machine.cores) as pool:
        if base.error:
            broken = _broken(pool, [package for package in packages if not package.extras])
            problems += broken or [Problem(f"hasten does not import: {base.error}", "pip install hasten")]
            return Diagnosis(machine, tuple(packages), (), tuple(problems))
        from hasten.backends import BACKENDS, Backend
        from hasten.tasks import TASKS

        backends, failures = _load(BACKENDS, Backend)
        problems += failures + _load(TASKS, object)[1]
        # Reinstalled under the installed name: installing onnxruntime beside onnxruntime-gpu breaks both.
        providers = {package.module: package.provider for package in packages}
        checked = pool.map(partial(_check_backend, providers), backends)
        tried = {module for backend in backends for module in backend.requires}
        problems += _broken(pool, [package for package in packages if package.module not in tried])
        health = tuple(checked)
    problems += [
        Problem(f"the backend '{backend.name}' is broken: {backend.reason}", backend.hint)
        for backend in health
        if backend.health is Health.BROKEN
    ]
    return Diagnosis(machine, tuple(packages), health, tuple(problems))


def _packages() -> tuple[list[Package], list[Problem]]:
    try:
        packages, collisions = read_packages()
    except PackageNotFoundError:
        return [], [Problem("hasten was not installed by pip: the versions it needs are unknown")]
    except ImportError as error:
        return [], [Problem(f"packaging does not import: {error}", _reinstall("packaging"))]
    unsupported = [
        Problem(
            f"{package.provider} {package.version} is not in the range hasten supports ({package.supported})",
            f"pip install --upgrade '{package.provider}{package.supported}'",
        )
        for package in packages
        if not package.is_supported
    ]
    colliding = [
        Problem(
            f"{' and '.join(collision.providers)} are installed together and both write the folder"
            f" '{collision.module}': either of them may run",
            collision.hint,
        )
        for collision in collisions
    ]
    return packages, unsupported + colliding


def _broken(pool: ThreadPoolExecutor, packages: Sequence[Package]) -> list[Problem]:
    """Return a problem for each installed package that does not import."""
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


def _load(registry: Registry[Any], contract: type) -> tuple[list[Any], list[Problem]]:
    """Return the registered objects, and a problem for each extension that does not load or has the wrong type."""
    loaded, problems = [], []
    for name in registry.names():
        try:
            entry = registry.get(name)
        except HastenError as error:
            problems.append(Problem(error.message, error.hint or ""))
            continue
        if isinstance(entry, contract):
            loaded.append(entry)
        else:
            problems.append(Problem(f"the object registered as the {registry.kind} '{name}' is not a {registry.kind}"))
    return loaded, problems


def _check_backend(providers: Mapping[str | None, str | None], backend: Backend) -> BackendHealth:
    from hasten.backends import probe_packages

    if not probe_packages(backend).ok:
        # Its own reason comes first: without a GPU there is no need to install packages for one.
        support = backend.probe(this_machine())
        return BackendHealth(backend.name, Health.ABSENT, support.reason, support.hint)
    result = check_backend(backend.name)
    if result.error:
        packages = [providers.get(module) or module for module in backend.requires]
        return BackendHealth(backend.name, Health.BROKEN, result.error, _reinstall(*packages))
    if result.reason:
        return BackendHealth(backend.name, Health.ABSENT, result.reason, result.hint)
    failed = [f"{trial.requested}: {trial.note}" for trial in result.trials if not trial.is_ok]
    health = Health.BROKEN if failed else Health.WORKS
    return BackendHealth(backend.name, health, "; ".join(failed), "", result.variants, result.trials)


def _reinstall(*packages: str) -> str:
    return f"pip install --force-reinstall {' '.join(packages)}"
