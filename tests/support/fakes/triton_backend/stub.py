"""A stub of tritonserver's Python backend for GPU models, which no server here can run.

It tests our side of the calls only. CPU models run in the real server (tests/e2e/test_deploy_tritonserver.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.deploy.tritonserver.models import request, run

MODULE = "triton_python_backend_utils"


class Tensor:
    """A named array."""

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        """Return the name."""
        return self._name

    def as_numpy(self) -> Any:
        """Return the array."""
        return self._value


class TritonError(Exception):
    """An error response."""

    INVALID_ARG = 3

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    """The outputs by name, or an error."""

    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Request:
    """The inputs by name, and the requested outputs."""

    def __init__(self, inputs: Mapping[str, Any], outputs: tuple[str, ...]) -> None:
        self.inputs, self._outputs = inputs, outputs

    def requested_output_names(self) -> tuple[str, ...]:
        """Return the names of the requested outputs."""
        return self._outputs


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    """Return an input, or None if the request has none of this name."""
    return Tensor(name, request.inputs[name]) if name in request.inputs else None


@contextmanager
def running(folder: Path) -> Iterator[run.TritonPythonModel]:
    """Initialize and finalize the model in a repository folder as the backend does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, sys.modules[__name__])
        request.server.cache_clear()
        model = run.TritonPythonModel()
        model.initialize({"model_repository": str(folder), "model_version": "1"})
        yield model
        model.finalize()
    request.server.cache_clear()


def ask(*lengths: int, names: tuple[str, ...], outputs: tuple[str, ...]) -> Request:
    """Make a request of rows of these lengths, padded to the longest, with reproducible tokens."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(sum(lengths)).integers(5, 40, mask.shape) * mask
    values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return Request({name: values[name].astype(np.int64) for name in names}, outputs)
