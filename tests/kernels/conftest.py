"""Run kernels compiled where there is a GPU, and elsewhere on the CPU through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is imported, and no other tests import Triton.
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("kernels need the package 'triton'", allow_module_level=True)


@pytest.fixture(autouse=True)
def _reproducible_arithmetic() -> Iterator[None]:
    """Fix the seed, and allow infinities without warnings, as on a GPU."""
    torch.manual_seed(7)
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.fixture
def exact_transformed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights that are transformed when they are read in fp32, where the interpreter computes in fp32.

    Weights of test models are rounded to half precision beforehand, but transformed ones would be rounded again.
    """
    from hasten.kernels import weights
    from hasten.kernels.pre_norm_encoder import PreNormGeometry

    cast = weights.cast
    if DEVICE == "cpu":
        monkeypatch.setattr(
            weights,
            "cast",
            lambda model, dtype: model if type(model.geometry) is PreNormGeometry else cast(model, dtype),
        )


@pytest.fixture(autouse=True)
def _no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip tuning: the sizes of the test models are irrelevant."""
    monkeypatch.setattr("hasten.backends.fused.session.FusedSession.tune", lambda *_: None)
