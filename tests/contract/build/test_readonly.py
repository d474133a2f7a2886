"""A bundle is not modified after its build: it may be on a read-only disk or shared."""

from __future__ import annotations

import hashlib
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
    """Return the content hash and modification time of every file and folder."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_mtime_ns,
        )
        for path in [folder, *folder.rglob("*")]
    }


def use_bundle(path: Path) -> None:
    opened = open_bundle(path)
    opened.check()
    assert opened.report.chosen
    assert opened.reference().rows
    for entry in opened.manifest.variants:
        with hasten.load(path, entry.name) as predictor:
            assert predictor(["the cat", "a dog ran"])


def test_using_a_bundle_does_not_modify_it(bundle: Bundle) -> None:
    before = snapshot(bundle.path)
    use_bundle(bundle.path)
    assert snapshot(bundle.path) == before


def test_moved_bundle_answers(bundle: Bundle, tmp_path: Path) -> None:
    use_bundle(shutil.copytree(bundle.path, tmp_path / "elsewhere"))
