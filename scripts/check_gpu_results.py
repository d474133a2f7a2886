"""Report GPU kernels, backends and tests that have changed since their results were recorded on a GPU.

Run by `make check`. Results come from a machine with a GPU, which few contributors have: this is a warning, and an
error with `--strict`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gpu_sources import ENCODER_SOURCES, ROOT, SOURCES, TESTS, changed

RESULTS = {
    "gpu_tests": ("python benchmarks/gpu_tests.py", (*SOURCES, *TESTS)),
    "gpu": ("python benchmarks/gpu.py", ENCODER_SOURCES),
}
_MAX_NAMED = 6


def main() -> int:
    """Print a line per outdated result file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="fail if a result file is outdated")
    is_strict = parser.parse_args().strict
    findings = [finding for name in RESULTS if (finding := outdated(name))]
    for finding in findings:
        print(f"{'error' if is_strict else 'warning'}: {finding}")
    return int(is_strict and bool(findings))


def outdated(name: str) -> str | None:
    """Return which sources have changed since a result file was recorded; None if they are the same."""
    command, patterns = RESULTS[name]
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))
    hint = f"on a machine with a GPU, run {command}"
    if "sources" not in recorded:
        return f"{file.relative_to(ROOT)} names no sources: {hint}"
    if not (files := changed(recorded["sources"], *patterns)):
        return None
    named = ", ".join(files[:_MAX_NAMED]) + (f" and {len(files) - _MAX_NAMED} more" if files[_MAX_NAMED:] else "")
    return f"changed since {file.relative_to(ROOT)} of {recorded['created'][:10]}: {named}. Hint: {hint}"


if __name__ == "__main__":
    sys.exit(main())
