"""The part of tritonserver's Python backend that our models call, where no server can run them: those for a GPU.

What it proves is our side of the calls. On processors the real one is asked (tests/e2e/test_deploy_tritonserver.py).
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
    def __init__(self, name: str, value: Any) -> None:
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._value


class TritonError(Exception):
    INVALID_ARG = 3

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class InferenceResponse:
    def __init__(self, output_tensors: Any = (), error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Request:
    def __init__(self, inputs: Mapping[str, Any], outputs: tuple[str, ...]) -> None:
        self.inputs, self._outputs = inputs, outputs

    def requested_output_names(self) -> tuple[str, ...]:
        return self._outputs


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return Tensor(name, request.inputs[name]) if name in request.inputs else None


@contextmanager
def running(folder: Path) -> Iterator[run.TritonPythonModel]:
    """The model in a folder of a repository, as the backend starts and ends it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, sys.modules[__name__])
        request.server.cache_clear()
        model = run.TritonPythonModel()
        model.initialize({"model_repository": str(folder), "model_version": "1"})
        yield model
        model.finalize()
    request.server.cache_clear()


def ask(*lengths: int, names: tuple[str, ...], outputs: tuple[str, ...]) -> Request:
    """Rows of so many tokens, padded to the longest; the same tokens each time."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(sum(lengths)).integers(5, 40, mask.shape) * mask
    values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return Request({name: values[name].astype(np.int64) for name in names}, outputs)
