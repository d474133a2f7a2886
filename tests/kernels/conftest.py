"""Kernels run compiled where there is a GPU, and elsewhere on the CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when Triton is imported, which nothing else in the tests does.
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("kernels need the package 'triton'", allow_module_level=True)


@pytest.fixture(autouse=True)
def _arithmetic() -> Iterator[None]:
    """The same numbers each time; and infinities without a word, as a GPU computes them."""
    torch.manual_seed(7)
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured for models of a size that nobody has."""
    monkeypatch.setattr("hasten.backends.fused.session.FusedSession.tune", lambda *_: None)
