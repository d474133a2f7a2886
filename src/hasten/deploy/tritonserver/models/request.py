"""What the models here share: what they were told when they were written, and how requests are answered together."""

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
from hasten.core.hardware import this_machine
from hasten.core.targets import why_not
from hasten.core.tensors import DType, Signature, TensorSpec
from hasten.core.tokenizer import Tokenizer, TokenizerSpec

ABOUT = "about.json"
TOKENIZER = "tokenizer.json"

Tensors = Mapping[str, npt.NDArray[Any]]
Read = TypeVar("Read")


@cache
def server() -> Any:
    """What tritonserver puts on the path of its stub."""
    return import_module("triton_python_backend_utils")


@dataclass(frozen=True, slots=True)
class Told:
    """Read without msgspec: the tokenizer's image needs nothing but tokenizers and NumPy."""

    folder: Path
    about: Mapping[str, Any]

    @classmethod
    def read(cls, args: Mapping[str, str]) -> Told:
        folder = Path(args["model_repository"]) / args["model_version"]
        told = cls(folder, json.loads((folder / ABOUT).read_text(encoding="utf-8")))
        # The server's backends lie beside each other.
        backends = Path(server().__file__).absolute().parents[1]
        check_onnxruntime(backends / "onnxruntime", told.about["least_onnxruntime"])
        instructions = tuple(told.about["instructions"])
        if instructions and (reason := why_not(instructions, this_machine())) is not None:
            raise UnsupportedError(f"the model does not compute right here: {reason}")
        return told

    @property
    def signature(self) -> Signature:
        raw = self.about["signature"]
        inputs, outputs = (
            tuple(TensorSpec(one["name"], DType(one["dtype"]), tuple(one["shape"]), one["pad"]) for one in raw[side])
            for side in ("inputs", "outputs")
        )
        return Signature(**{**raw, "inputs": inputs, "outputs": outputs})

    @property
    def tokenizer(self) -> Tokenizer:
        raw = self.about["tokenizer"]
        return Tokenizer.open(self.folder / TOKENIZER, TokenizerSpec(**{**raw, "inputs": tuple(raw["inputs"])}))


def check_onnxruntime(folder: Path, least: str) -> None:
    """Refuse to load beside an ONNX Runtime that would answer wrongly; it says itself which version it is."""
    library = next(iter(sorted(folder.glob("libonnxruntime.so*"))), None)
    if not least or library is None:
        return
    base = ctypes.CDLL(str(library)).OrtGetApiBase
    base.restype = ctypes.POINTER(_ApiBase)
    found = base().contents.version().decode()
    if tuple(map(int, found.split(".")[:2])) < tuple(map(int, least.split("."))):
        raise UnsupportedError(
            f"this server has ONNX Runtime {found}, in which the model answers wrongly",
            hint=f"use an image with {least} or newer, or write the repository with --variant graph",
        )


class _ApiBase(ctypes.Structure):
    """OrtApiBase, as onnxruntime_c_api.h has it since the first version."""

    _fields_ = (("api", ctypes.c_void_p), ("version", ctypes.CFUNCTYPE(ctypes.c_char_p)))


def answered(
    requests: Sequence[Any],
    read: Callable[[Any], Read],
    answer: Callable[[list[Read]], Iterable[Tensors]],
) -> list[Any]:
    """Responses in the order of the requests: what can be read is answered together, what cannot is refused alone."""
    found: list[Read | HastenError] = []
    for request in requests:
        try:
            found.append(read(request))
        except HastenError as error:
            found.append(error)
    good = [one for one in found if not isinstance(one, HastenError)]
    answers = iter(answer(good) if good else ())
    return [
        _refusal(one) if isinstance(one, HastenError) else _response(request, next(answers))
        for request, one in zip(requests, found, strict=True)
    ]


def columns(request: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """The strings of those inputs that a request brings, as many of each."""
    found = {}
    for name in names:
        tensor = server().get_input_tensor_by_name(request, name)
        if tensor is None:
            continue
        try:
            found[name] = [str(text, "utf-8") for text in tensor.as_numpy().reshape(-1)]
        except UnicodeDecodeError as error:
            raise InputError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error
    if not all(found.values()):
        raise InputError("no item given")  # the server would wait forever for a batch of nothing
    if len({len(column) for column in found.values()}) > 1:
        raise InputError("the inputs have different numbers of items")
    return found


def _response(request: Any, tensors: Tensors) -> Any:
    wanted = request.requested_output_names()
    found = [server().Tensor(name, np.ascontiguousarray(value)) for name, value in tensors.items() if name in wanted]
    return server().InferenceResponse(output_tensors=found)


def _refusal(error: HastenError) -> Any:
    kind = server().TritonError
    return server().InferenceResponse(error=kind(str(error), kind.INVALID_ARG))
