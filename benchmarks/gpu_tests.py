"""The tests that a GPU is for, run on one, and what came of them: compiled kernels, backends, 10,000 random batches.

    python benchmarks/gpu_tests.py [-o FILE] [pytest's own arguments]

Without arguments: all of tests/kernels and the contract of backends, the slow ones too, where to be skipped for want of
a GPU is to fail. A file that was run before keeps what is told of it until it is run again. In the environment of
`make .venv/.dev`, with `onnxruntime-gpu[cuda,cudnn]` in the place of `onnxruntime`: that is required too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from origin import needs_gpu, origin

HERE = Path(__file__).parent
USUAL = ["tests/kernels", "tests/contract/test_backends.py", "--require", "gpu", "--slow"]


class Told:
    """What pytest reports, by file."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[0]
        file = self.files.setdefault(name, {"passed": 0, "skipped": Counter(), "failed": []})
        file["seconds"] = file.get("seconds", 0.0) + report.duration
        if report.failed:
            file["failed"].append(report.nodeid)
        elif report.skipped:
            file["skipped"][report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.when == "call":
            file["passed"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "gpu_tests.json")
    args, given = parser.parse_known_args()
    needs_gpu()
    told = Told()
    code = pytest.main([*(given or USUAL), "--rootdir", str(HERE.parent), "-q", "-p", "no:cacheprovider"], [told])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    before = msgspec.json.decode(args.output.read_bytes()) if args.output.exists() else {}
    where = {**origin(), "arguments": given or USUAL}
    files = before.get("files", {}) | {name: where | file for name, file in told.files.items()}
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode({"files": files}), indent=1))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
