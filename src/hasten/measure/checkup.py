"""A package or a backend tried in a process of its own: `python -m hasten.measure.checkup`, one line of JSON out.

A broken library may take its process with it, and one that is whole may still spoil it for the next.
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

from hasten.core.execution import Execution, Trial
from hasten.core.hardware import this_machine

# A driver that hangs is broken too.
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Checkup:
    """What came of it. An `error` is one line; without one, what was imported works."""

    error: str = ""
    reason: str = ""
    hint: str = ""
    variants: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()


def check_package(module: str) -> Checkup:
    return _in_own_process("package", module)


def check_backend(name: str) -> Checkup:
    return _in_own_process("backend", name)


def _in_own_process(kind: str, name: str) -> Checkup:
    command = [sys.executable, "-m", "hasten.measure.checkup", kind, name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Checkup(f"it did not answer within {_PATIENCE_S:.0f} s")
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return Checkup(f"it crashed its process ({signal.Signals(-done.returncode).name})")
    try:
        raw: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return Checkup(f"it ended its process{f': {said[-1]}' if said else ''}")
    trials = [
        Trial(**trial | {"executed": tuple(Execution(**execution) for execution in trial["executed"])})
        for trial in raw["trials"]
    ]
    return Checkup(**raw | {"variants": tuple(raw["variants"]), "trials": tuple(trials)})


def _backend(name: str) -> Checkup:
    from hasten.backends import BACKENDS, HasTrials

    backend = BACKENDS.get(name)
    for package in backend.requires:
        import_module(package)
    machine = this_machine()
    support = backend.probe(machine)
    if not support.ok:
        return Checkup(reason=support.reason, hint=support.hint)
    variants = tuple(variant.name for variant in backend.variants(machine))
    return Checkup(variants=variants, trials=tuple(backend.trials(machine)) if isinstance(backend, HasTrials) else ())


def main() -> None:
    # The answer owns the real stdout; whatever a library prints goes to stderr.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, name = sys.argv[1:]
    try:
        if kind == "package":
            import_module(name)
            checked = Checkup()
        else:
            checked = _backend(name)
    except Exception as error:  # another's package: anything may go wrong in it
        first = (str(error).strip() or "no message").splitlines()[0]
        checked = Checkup(f"{type(error).__name__}: {first}")
    with answer:
        json.dump(asdict(checked), answer)


if __name__ == "__main__":
    main()
