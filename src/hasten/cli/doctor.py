"""hasten doctor"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.core.execution import Trial
    from hasten.measure.doctor import BackendHealth, Diagnosis
    from hasten.measure.packages import Package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none of its own."""


def main(args: argparse.Namespace) -> int:
    from hasten.core.errors import UnsupportedError
    from hasten.measure.doctor import diagnose

    found = diagnose()
    if args.json:
        _print_json(found)
    else:
        _print_diagnosis(found)
    return UnsupportedError.exit_code if found.problems else 0


# Printed with the standard library alone: what the other commands print with may be what is broken.


def _print_json(found: Diagnosis) -> None:
    import json
    from dataclasses import asdict

    print(json.dumps(asdict(found), indent=2, ensure_ascii=False))


def _print_diagnosis(found: Diagnosis) -> None:
    machine = found.machine
    print(machine)
    print(f"{machine.system}, Python {machine.python}, {' '.join(machine.instructions)}\n")
    _print_table(("package", "installed", "supported", "for"), [_package(package) for package in found.packages])
    rows: list[tuple[str, ...]] = []
    for backend in found.backends:
        rows += _backend(backend)
    _print_table(("backend", "here", "what it offers, and what really executed"), rows)
    for problem in found.problems:
        print(f"✗ {problem.what}")
        if problem.hint:
            print(f"  hint: {problem.hint}")
    if not found.problems:
        print("✓ all that is installed works")


def _package(package: Package) -> tuple[str, ...]:
    needed_for = ", ".join(package.extras) or "base"
    if package.version is None:
        return package.name, "–", package.supported, f"{needed_for}: {package.hint}"
    installed = package.version if package.provider == package.name else f"{package.version} ({package.provider})"
    return package.name, installed, package.supported, needed_for + ("" if package.is_supported else "  ✗")


def _backend(backend: BackendHealth) -> list[tuple[str, ...]]:
    reason = ": ".join(filter(None, (backend.reason, backend.hint)))
    offers = ", ".join(backend.variants) or "nothing unless asked for by name"
    first = (backend.name, backend.health.value, reason or offers)
    return [first, *(("", "", _trial(trial)) for trial in backend.trials)]


def _trial(trial: Trial) -> str:
    total = sum(execution.count for execution in trial.executed)
    elsewhere = sum(execution.count for execution in trial.elsewhere)
    line = trial.asked
    if total:
        line += f": {total - elsewhere} of {total} operators"
    for place in dict.fromkeys(execution.on for execution in trial.elsewhere):
        line += f"; on {place}: " + ", ".join(ran.operator for ran in trial.elsewhere if ran.on == place)
    return line + (f" – {trial.note}" if trial.note else "")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
