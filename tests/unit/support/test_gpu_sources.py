"""Test that results recorded on a GPU are reported as outdated when their sources change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_sources

SCRIPT = Path("scripts", "check_gpu_results.py")
KERNEL, TEST = "src/hasten/kernels/ops/norm.py", "tests/kernels/test_ops.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with a kernel, its test, the script, and results that were recorded for them."""
    for name in (KERNEL, TEST, SCRIPT, Path("benchmarks", "gpu_sources.py")):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        source = gpu_sources.ROOT / name
        target.write_bytes(source.read_bytes())
    results = tmp_path / "benchmarks" / "results"
    results.mkdir()
    recorded = {"created": "2026-11-19T05:00:00+00:00", "sources": gpu_sources.digests(KERNEL, TEST)}
    (results / "gpu_tests.json").write_text(json.dumps(recorded))
    (results / "gpu.json").write_text(json.dumps(recorded | {"sources": gpu_sources.digests(KERNEL)}))
    return tmp_path


def check(tree: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, tree / SCRIPT, *options], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_unchanged_sources_are_silent(tree: Path) -> None:
    assert check(tree, "--strict") == (0, "")


def test_changed_kernel_is_a_warning_and_an_error_if_strict(tree: Path) -> None:
    (tree / KERNEL).write_text("changed = True\n")
    code, printed = check(tree)
    assert code == 0
    tests, table = printed.splitlines()
    assert tests.startswith("warning: changed since benchmarks/results/gpu_tests.json of 2026-11-19: " + KERNEL)
    assert table.endswith("run python benchmarks/gpu.py")
    assert check(tree, "--strict")[0] == 1


def test_new_test_file_makes_only_the_tests_outdated(tree: Path) -> None:
    (tree / TEST).with_name("test_new.py").write_text("")
    printed = check(tree)[1].splitlines()
    assert len(printed) == 1
    assert "tests/kernels/test_new.py" in printed[0]


def test_deleted_kernel_is_reported(tree: Path) -> None:
    (tree / KERNEL).unlink()
    assert KERNEL in check(tree)[1]


def test_sources_cover_kernels_and_tests() -> None:
    assert {KERNEL, "src/hasten/backends/onnxruntime/cuda_decoder.py"} <= {*gpu_sources.digests()}
    assert {TEST, "tests/kernels/test_tuning.py"} <= {*gpu_sources.digests(*gpu_sources.TESTS)}
