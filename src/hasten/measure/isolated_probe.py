"""Try a package or a backend in its own process: `python -m hasten.measure.isolated_probe`, which prints JSON.

A broken library may crash its process, and a working one may still disturb the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from hasten.core.placement import OperatorPlacement, SelfTest
from hasten.core.system.hardware import this_machine

# A driver that hangs is broken too.
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Checkup:
    """The result of a probe. An `error` is one line; without one, the import works."""

    error: str = ""
    reason: str = ""
    hint: str = ""
    variants: tuple[str, ...] = ()
    trials: tuple[SelfTest, ...] = ()


def check_package(module: str) -> Checkup:
    """Import a module in its own process."""
    return _in_own_process("package", module)


def check_backend(name: str) -> Checkup:
    """Import, probe and self-test a backend in its own process."""
    return _in_own_process("backend", name)


def _in_own_process(kind: str, name: str) -> Checkup:
    command = [sys.executable, "-m", "hasten.measure.isolated_probe", kind, name]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Checkup(f"no answer within {_TIMEOUT_S:.0f} s")
    errors = [line.strip() for line in completed.stderr.splitlines() if line.strip()]
    if completed.returncode < 0:
        return Checkup(f"it crashed its process ({signal.Signals(-completed.returncode).name})")
    try:
        raw: dict[str, Any] = json.loads(completed.stdout)
    except ValueError:
        return Checkup(f"it ended its process{f': {errors[-1]}' if errors else ''}")
    trials = [
        SelfTest(**trial | {"executed": tuple(OperatorPlacement(**execution) for execution in trial["executed"])})
        for trial in raw["trials"]
    ]
    return Checkup(**raw | {"variants": tuple(raw["variants"]), "trials": tuple(trials)})


def _probe_backend(name: str) -> Checkup:
    from hasten.backends import BACKENDS, SupportsSelfTest

    backend = BACKENDS.get(name)
    for package in backend.requires:
        import_module(package)
    machine = this_machine()
    support = backend.probe(machine)
    if not support.ok:
        return Checkup(reason=support.reason, hint=support.hint)
    variants = tuple(variant.name for variant in backend.variants(machine))
    trials = tuple(backend.trials(machine)) if isinstance(backend, SupportsSelfTest) else ()
    return Checkup(variants=variants, trials=trials)


def main() -> None:
    """Run the probe named on the command line."""
    # The result owns the real stdout; output of libraries goes to stderr.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, name = sys.argv[1:]
    try:
        if kind == "package":
            import_module(name)
            result = Checkup()
        else:
            result = _probe_backend(name)
    except Exception as error:  # third-party code may raise anything
        first = (str(error).strip() or "no message").splitlines()[0]
        result = Checkup(f"{type(error).__name__}: {first}")
    with output:
        json.dump(asdict(result), output)


if __name__ == "__main__":
    main()
