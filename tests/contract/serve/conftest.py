"""Fixtures of server tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hasten.bundle import Bundle


@pytest.fixture(scope="session")
def classifier(classifier_bundle: Bundle) -> Bundle:
    """The bundle that most server tests serve; they must not change it."""
    return classifier_bundle


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one-process"), pytest.param(4, id="four-workers", marks=pytest.mark.slow)],
)
def workers(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the servers of a module in one process, then with four API workers and an engine process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_WORKERS", str(request.param))
        yield request.param
