"""The parts that all models share: reading their configuration and answering requests in batches."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hasten.core.errors import HastenError, InputError, UnsupportedError
from hasten.core.system.cpu_targets import incompatibility
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch, DType, IntArray, Outputs, Signature, TensorSpec, divide, gather
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec

ABOUT = "about.json"
TOKENIZER = "tokenizer.json"

Tensors = Mapping[str, npt.NDArray[Any]]
Parsed = TypeVar("Parsed")


@cache
def server() -> Any:
    """Return the module that tritonserver provides to its Python models."""
    return import_module("triton_python_backend_utils")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a model; read without msgspec, so that the tokenizer needs only tokenizers and NumPy."""

    folder: Path
    values: Mapping[str, Any]

    @classmethod
    def read(cls, args: Mapping[str, str]) -> ModelConfig:
        """Read the configuration, and raise an error if this machine would compute wrong answers."""
        folder = Path(args["model_repository"]) / args["model_version"]
        config = cls(folder, json.loads((folder / ABOUT).read_text(encoding="utf-8")))
        # The server's backends are in sibling directories.
        backends = Path(server().__file__).absolute().parents[1]
        check_onnxruntime(backends / "onnxruntime", config.values["least_onnxruntime"])
        instructions = tuple(config.values["instructions"])
        if instructions and (reason := incompatibility(instructions, this_machine())) is not None:
            raise UnsupportedError(f"the model would compute wrong answers on this machine: {reason}")
        return config

    @property
    def signature(self) -> Signature:
        """Return the signature of the variant."""
        raw = self.values["signature"]
        inputs, outputs = (
            tuple(
                TensorSpec(spec["name"], DType(spec["dtype"]), tuple(spec["shape"]), spec["pad"]) for spec in raw[side]
            )
            for side in ("inputs", "outputs")
        )
        return Signature(**{**raw, "inputs": inputs, "outputs": outputs})

    @property
    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer."""
        raw = self.values["tokenizer"]
        return Tokenizer.open(self.folder / TOKENIZER, TokenizerSpec(**{**raw, "inputs": tuple(raw["inputs"])}))


def check_onnxruntime(folder: Path, min_version: str) -> None:
    """Raise an error if the ONNX Runtime in the folder is too old to compute the variant correctly."""
    library = next(iter(sorted(folder.glob("libonnxruntime.so*"))), None)
    if not min_version or library is None:
        return
    base = ctypes.CDLL(str(library)).OrtGetApiBase
    base.restype = ctypes.POINTER(_ApiBase)
    version = base().contents.version().decode()
    if tuple(map(int, version.split(".")[:2])) < tuple(map(int, min_version.split("."))):
        raise UnsupportedError(
            f"ONNX Runtime {version} of this server computes the model incorrectly",
            hint=f"use an image with {min_version} or newer, or write the repository with --variant graph",
        )


class _ApiBase(ctypes.Structure):
    """OrtApiBase of onnxruntime_c_api.h, unchanged since the first version."""

    _fields_ = (("api", ctypes.c_void_p), ("version", ctypes.CFUNCTYPE(ctypes.c_char_p)))


def answer_requests(
    requests: Sequence[Any],
    parse: Callable[[Any], Parsed],
    answer: Callable[[list[Parsed]], Iterable[Tensors]],
) -> list[Any]:
    """Return the responses in order: valid requests are answered together, invalid ones rejected individually."""
    results: list[Parsed | HastenError] = []
    for request in requests:
        try:
            results.append(parse(request))
        except HastenError as error:
            results.append(error)
    valid = [result for result in results if not isinstance(result, HastenError)]
    answers = iter(answer(valid) if valid else ())
    return [
        error_response(result) if isinstance(result, HastenError) else _response(request, next(answers))
        for request, result in zip(requests, results, strict=True)
    ]


def read_strings(request: Any, name: str) -> list[str] | None:
    """Return the strings of an input; None if the request does not have it."""
    tensor = server().get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    try:
        return [str(text, "utf-8") for text in tensor.as_numpy().reshape(-1)]
    except UnicodeDecodeError as error:
        raise InputError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error


def read_columns(request: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the strings of the inputs that a request has; all inputs must have the same number of items."""
    columns = {name: column for name in names if (column := read_strings(request, name)) is not None}
    if not all(columns.values()):
        raise InputError("the request has no items")  # the server would wait forever for an empty batch
    if len({len(column) for column in columns.values()}) > 1:
        raise InputError("the inputs have different numbers of items")
    return columns


def parse_options(text: str, name: str, example: str) -> dict[str, Any]:
    """Parse the JSON object of an input."""
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{name} is not a JSON object such as {example}: {error}") from error


def run_together(
    batches: Sequence[Batch],
    groups: Callable[[IntArray], Iterable[IntArray]],
    run: Callable[[Batch], Outputs],
    signature: Signature,
) -> list[Outputs]:
    """Run the rows of all requests in groups that are formed by length, and return the outputs of each request."""
    whole = Batch.concatenate(batches)
    parts = [(rows, run(whole.take(rows))) for rows in groups(whole.lengths)]
    return divide(gather(parts, whole, signature), batches, signature)


def _response(request: Any, tensors: Tensors) -> Any:
    names = request.requested_output_names()
    outputs = [server().Tensor(name, np.ascontiguousarray(value)) for name, value in tensors.items() if name in names]
    return server().InferenceResponse(output_tensors=outputs)


def error_response(error: HastenError, *, is_internal: bool = False) -> Any:
    """Return the response that reports an error, by default one of the client."""
    kind = server().TritonError
    return server().InferenceResponse(error=kind(str(error), kind.INTERNAL if is_internal else kind.INVALID_ARG))
