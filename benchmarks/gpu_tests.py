"""Run the GPU tests and record their results: compiled kernels, backends, 10,000 random batches.

    python benchmarks/gpu_tests.py [-o FILE] [pytest arguments]

By default, run all of tests/kernels and the contract suite of backends, slow tests included; a test that is skipped for
lack of a GPU fails. The results of a test file are kept until it runs again. Needs the environment of `make .venv/.dev`
with `onnxruntime-gpu[cuda,cudnn]` instead of `onnxruntime`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from provenance import provenance, require_gpu

HERE = Path(__file__).parent
DEFAULT_ARGUMENTS = ["tests/kernels", "tests/contract/backends/test_backends.py", "--require", "gpu", "--slow"]


class ResultCollector:
    """A pytest plugin that counts results by test file."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
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
    """Run the tests, update the result file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "gpu_tests.json")
    args, pytest_arguments = parser.parse_known_args()
    pytest_arguments = pytest_arguments or DEFAULT_ARGUMENTS
    require_gpu()
    collector = ResultCollector()
    options = ["--rootdir", str(HERE.parent), "-q", "-p", "no:cacheprovider"]
    code = pytest.main([*pytest_arguments, *options], [collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    previous = msgspec.json.decode(args.output.read_bytes()) if args.output.exists() else {}
    origin = {**provenance(), "arguments": pytest_arguments}
    files = previous.get("files", {}) | {name: origin | file for name, file in collector.files.items()}
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode({"files": files}), indent=1))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
