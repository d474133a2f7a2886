"""Fixtures of server tests."""

from __future__ import annotations

import pytest

from hasten.bundle import Bundle


@pytest.fixture(scope="session")
def classifier(classifier_bundle: Bundle) -> Bundle:
    """The bundle that most server tests serve; they must not change it."""
    return classifier_bundle
