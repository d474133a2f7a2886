"""A bundle is never written after it was built: it may lie on a read-only disk, shared by many."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.bundle import Bundle, open_bundle


@pytest.fixture(scope="module")
def bundle(quick_build: Any, tiny_classifier: Any) -> Bundle:
    return quick_build(tiny_classifier("bert"), variants=["onnxruntime-fp32", "openvino-fp32"])


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file and folder with its content and the time it was last written."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in [folder, *folder.rglob("*")]
    }


def use(path: Path) -> None:
    opened = open_bundle(path)
    opened.check()
    assert opened.report.chosen
    assert opened.reference().rows
    for entry in opened.manifest.variants:
        with hasten.load(path, entry.name) as predictor:
            assert predictor(["the cat", "a dog ran"])


def test_use_changes_nothing(bundle: Bundle) -> None:
    before = snapshot(bundle.path)
    use(bundle.path)
    assert snapshot(bundle.path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes wherever it likes, whatever the permissions say")
def test_a_bundle_nobody_may_write_still_answers(bundle: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle.path, tmp_path / "bundle")
    places = [copy, *copy.rglob("*")]
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    try:
        use(copy)
    finally:
        for place in places:
            place.chmod(0o755)


def test_a_bundle_may_be_moved(bundle: Bundle, tmp_path: Path) -> None:
    use(shutil.copytree(bundle.path, tmp_path / "elsewhere"))
