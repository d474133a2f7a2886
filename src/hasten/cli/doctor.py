"""hasten doctor: report which packages and backends work on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.core.placement import SelfTest
    from hasten.measure.doctor import BackendHealth, Diagnosis
    from hasten.measure.packages import Package


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the command has only the common ones."""


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.core.errors import UnsupportedError
    from hasten.measure.doctor import diagnose

    diagnosis = diagnose()
    if args.json:
        _print_json(diagnosis)
    else:
        _print_diagnosis(diagnosis)
    return UnsupportedError.exit_code if diagnosis.problems else 0


# Printed with the standard library alone: the packages that other commands print with may be broken.


def _print_json(diagnosis: Diagnosis) -> None:
    import json
    from dataclasses import asdict

    print(json.dumps(asdict(diagnosis), indent=2, ensure_ascii=False))


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    machine = diagnosis.machine
    print(machine)
    print(f"{machine.system}, Python {machine.python}, {' '.join(machine.instructions)}\n")
    _print_table(("package", "installed", "supported", "for"), [_package(package) for package in diagnosis.packages])
    rows: list[tuple[str, ...]] = []
    for backend in diagnosis.backends:
        rows += _backend(backend)
    _print_table(("backend", "status", "variants, and where operators ran"), rows)
    for problem in diagnosis.problems:
        print(f"✗ {problem.message}")
        if problem.hint:
            print(f"  hint: {problem.hint}")
    if not diagnosis.problems:
        print("✓ everything installed works")


def _package(package: Package) -> tuple[str, ...]:
    needed_for = ", ".join(package.extras) or "base"
    if package.version is None:
        return package.name, "–", package.supported, f"{needed_for}: {package.hint}"
    installed = package.version if package.provider == package.name else f"{package.version} ({package.provider})"
    return package.name, installed, package.supported, needed_for + ("" if package.is_supported else "  ✗")


def _backend(backend: BackendHealth) -> list[tuple[str, ...]]:
    reason = ": ".join(filter(None, (backend.reason, backend.hint)))
    offers = ", ".join(backend.variants) or "no variants unless requested by name"
    first = (backend.name, backend.health.value, reason or offers)
    return [first, *(("", "", _self_test(test)) for test in backend.trials)]


def _self_test(test: SelfTest) -> str:
    total = sum(execution.count for execution in test.executed)
    elsewhere = sum(execution.count for execution in test.elsewhere)
    line = test.requested
    if total:
        line += f": {total - elsewhere} of {total} operators"
    for device in dict.fromkeys(execution.on for execution in test.elsewhere):
        line += f"; on {device}: " + ", ".join(ran.operator for ran in test.elsewhere if ran.on == device)
    return line + (f" – {test.note}" if test.note else "")


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
