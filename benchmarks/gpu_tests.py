"""Run the GPU tests in several processes and record their results: compiled kernels, backends, generation.

    python benchmarks/gpu_tests.py [-o FILE] [--processes N] [--timeout SECONDS] [pytest arguments]

By default, run the test files of `gpu_sources.TESTS`, slow tests included; a test that is skipped for lack of a GPU
fails. The results are of one run, with digests of the sources and tests that it covers: `scripts/check_gpu_results.py`
compares them with the working tree. Needs the environment of `make .venv/.dev` with `onnxruntime-gpu[cuda,cudnn]`
instead of `onnxruntime`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpu_sources import ROOT, SOURCES, TESTS, digests
from provenance import provenance, require_gpu

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu_tests.json"
OPTIONS = ["--require", "gpu", "--slow"]
# Set for the process of one test file: the file that it writes its results to.
_RESULT = "_HASTEN_GPU_TEST_RESULT"


class ResultCollector:
    """A pytest plugin that counts the results of a test file."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"passed": 0, "skipped": Counter(), "failed": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test."""
        if report.failed:
            self.result["failed"].append(report.nodeid)
        elif report.skipped:
            self._skip(report)
        elif report.when == "call":
            self.result["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be collected."""
        if report.failed:
            self.result["failed"].append(report.nodeid)
        elif report.skipped:
            self._skip(report)

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        is_reason = isinstance(report.longrepr, tuple)
        self.result["skipped"][report.longrepr[2] if is_reason else str(report.longrepr)] += 1


def main() -> int:
    """Run the tests, write the result file and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a test file is stopped")
    parser.add_argument("--files", nargs="+", help="test files (default: those of gpu_sources.TESTS)")
    args, pytest_arguments = parser.parse_known_args()
    files = args.files or list(digests(*TESTS))
    options = pytest_arguments or OPTIONS
    if "gpu" in options:
        require_gpu()
    results: dict[str, Any] = {
        **provenance(),
        "arguments": options,
        "sources": digests(*SOURCES, *TESTS),
        "untested": sorted({*digests(*TESTS)} - {*files}),
        "files": {},
    }
    with tempfile.TemporaryDirectory(prefix="hasten-") as work, ThreadPoolExecutor(args.processes) as pool:
        # Files that took longest in the recorded run go first.
        jobs = {
            file: pool.submit(run_file, file, options, Path(work, f"{index}.json"), args.timeout)
            for index, file in enumerate(sorted(files, key=_recorded_seconds(), reverse=True))
        }
        for file, job in jobs.items():
            results["files"][file] = job.result()
            # Written after each file, so that a failure does not lose the others.
            args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    failed = [test for result in results["files"].values() for test in result["failed"]]
    passed = sum(result["passed"] for result in results["files"].values())
    print(f"{passed} passed, {len(failed)} failed", *failed, sep="\n")
    return int(bool(failed))


def run_file(file: str, options: Sequence[str], output: Path, timeout_s: float) -> dict[str, Any]:
    """Run one test file in a process of its own; without its result, the whole file counts as failed."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, file, *options]
    try:
        process = subprocess.run(
            command,
            env=os.environ | {_RESULT: str(output)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        printed = process.stdout
    except subprocess.TimeoutExpired as error:
        printed = f"stopped after {timeout_s:.0f} s\n{(error.stdout or b'').decode(errors='replace')}"
    seconds = time.perf_counter() - begin
    if output.exists():
        result: dict[str, Any] = msgspec.json.decode(output.read_bytes())
    else:
        result = {"passed": 0, "skipped": {}, "failed": [file]}
    if result["failed"]:
        print(printed[-8000:], flush=True)
    print(f"{file}: {result['passed']} passed, {len(result['failed'])} failed in {seconds:.0f} s", flush=True)
    return result | {"seconds": seconds}


def run_pytest(output: Path, arguments: Sequence[str]) -> int:
    """Run pytest in this process and write the results of its only file."""
    collector = ResultCollector()
    options = ["--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider", "--show-capture=no", "--tb=short"]
    code = pytest.main([*arguments, *options], [collector])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        output.write_bytes(msgspec.json.encode(collector.result))
    return int(code)


def _recorded_seconds() -> Any:
    recorded = msgspec.json.decode(RESULTS.read_bytes())["files"] if RESULTS.exists() else {}
    # A new file may take long.
    return lambda file: recorded.get(file, {}).get("seconds", float("inf"))


if __name__ == "__main__":
    if _RESULT in os.environ:
        sys.exit(run_pytest(Path(os.environ.pop(_RESULT)), sys.argv[1:]))
    sys.exit(main())
