"""Open Inference Protocol v2 for encoders, independent of the transport (HTTP or gRPC): tensors in, tensors out.

A model takes texts (`BYTES`, one tensor for each of the task's fields) or token ids (`input_ids`, `attention_mask`, …).
It returns tensors by the graph's names and, decoded, `answer`: JSON, one string per item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, Protocol

import msgspec
import numpy as np

from hasten.core.errors import HastenError, InputError, PlanError
from hasten.core.tensors import ATTENTION_MASK, BATCH, Batch, Outputs, real_positions, repad
from hasten.server.http.exchange import to_json_value
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.models.registry import Model
from hasten.server.protocols.routes import require_encoder
from hasten.server.request_records import RequestStats
from hasten.tasks import Encoded

Tensor = np.ndarray[Any, Any]

VERSION = "1"
ANSWER = "answer"
BYTES = "BYTES"
_IDS, _TYPE_IDS = "input_ids", "token_type_ids"
_DTYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
_DATATYPES = {np.dtype(kind): name for name, kind in _DTYPES.items()}
_MAX_VALUES = 2**28
# Python types allowed for values in JSON, by the kind of the dtype; NumPy itself would convert strings to numbers.
_VALUE_TYPES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
_DEFAULT_PRIORITY = 2
_UNSUPPORTED_PARAMETERS = ("shared_memory_region", "classification")
_MAX_AXES = 8
_MAX_TIMEOUT_US = 10**15


class Inference(msgspec.Struct, frozen=True):
    """A decoded request; strings are arrays of `str` objects."""

    tensors: Mapping[str, Tensor]
    # The requested outputs; all of them if empty.
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = {}


class Output(msgspec.Struct, frozen=True):
    """An output tensor: numbers, or a list of byte strings."""

    name: str
    value: Tensor | list[bytes]

    @property
    def datatype(self) -> str:
        """Return the protocol's name of the data type."""
        return BYTES if isinstance(self.value, list) else _DATATYPES[self.value.dtype]

    @property
    def shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return [len(self.value)] if isinstance(self.value, list) else list(self.value.shape)

    def to_json(self) -> Any:
        """Return the values, flattened: texts, or an array, which is written as JSON without a list."""
        return [text.decode() for text in self.value] if isinstance(self.value, list) else self.value.ravel()

    def to_bytes(self) -> bytes:
        """Return little-endian numbers, or strings that each follow their length in four bytes."""
        if isinstance(self.value, list):
            return b"".join(len(text).to_bytes(4, "little") + text for text in self.value)
        return self.value.tobytes()


OnDone = Callable[[list[Output] | HastenError, RequestStats | None], None]
OnTextDelta = Callable[[list[Output]], None]


@singledispatch
def infer(
    model: Model,
    inference: Inference,
    on_done: OnDone,
    on_text_delta: OnTextDelta | None = None,  # noqa: ARG001 - encoders do not stream
) -> Callable[[], None]:
    """Run a request on the model's engine; return a function that cancels it. Generative models register their own.

    Text deltas go to `on_text_delta` if the request asks for a stream; the last one goes to `on_done`.
    """
    encoder = require_encoder(model)
    tensors = inference.tensors
    is_tokens = _IDS in tensors
    names = _output_names(encoder, inference.outputs, is_tokens)

    def decode(outputs: Outputs, encoded: Encoded) -> list[Output]:
        return [_output(encoder, name, outputs, encoded) for name in names]

    priority, timeout_s = priority_and_timeout(inference.parameters) if inference.parameters else (0, None)
    if is_tokens:
        return encoder.submit(
            lambda: rows_of(encoder, tensors), decode, on_done, priority=priority, timeout_s=timeout_s
        )
    return encoder.submit_payload(
        lambda: items_of(encoder, tensors), decode, on_done, priority=priority, timeout_s=timeout_s
    )


def priority_and_timeout(parameters: Mapping[str, Any]) -> tuple[int, float | None]:
    """Return priority and timeout in seconds; tritonserver's timeout is in microseconds, and 0 means none."""
    priority, timeout = (parameters.get(name, 0) for name in ("priority", "timeout"))
    if not all(type(number) is int and 0 <= number < 2**64 for number in (priority, timeout)):
        raise InputError("priority and timeout must be non-negative integers")
    # In the protocol 1 is the highest priority and 0 the default, which corresponds to 2.
    return priority - _DEFAULT_PRIORITY if priority else 0, min(timeout, _MAX_TIMEOUT_US) / 1e6 if timeout else None


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """An input or output of a model."""

    name: str
    datatype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorDescription]
    outputs: list[TensorDescription]


@singledispatch
def describe(model: Model) -> Metadata:
    """Return the metadata of a model. Generative models register their own."""
    encoder = require_encoder(model)
    outputs = [
        TensorDescription(
            spec.name,
            _DATATYPES[np.dtype(spec.dtype.value)],
            [size if isinstance(size, int) else -1 for size in spec.shape],
        )
        for spec in encoder.signature.outputs
        if _is_row_wise(encoder)
    ]
    # The required inputs; some tasks accept a text_pair as well.
    return metadata_of(model, [texts(name) for name in encoder.task.fields], [*outputs, texts(ANSWER)])


def metadata_of(model: Model, inputs: list[TensorDescription], outputs: list[TensorDescription]) -> Metadata:
    """Return the metadata of a model with these inputs and outputs."""
    return Metadata(model.name, [VERSION], f"hasten_{model.variant}", inputs, outputs)


def texts(name: str) -> TensorDescription:
    """Describe a tensor of any number of texts."""
    return TensorDescription(name, BYTES, [-1])


def check_version(version: str) -> None:
    """Raise unless this is the only version that models have."""
    if version not in ("", VERSION):
        raise PlanError(f"model version {version} does not exist", hint=f"use version {VERSION}")


def reject_parameters(tensor: str, parameters: Mapping[str, Any]) -> None:
    """Reject parameters of an input or output that would change the result and are not supported."""
    for name in _UNSUPPORTED_PARAMETERS:
        if name in parameters:
            raise InputError(f"parameter {name} of '{tensor}' is not supported")


class HasShape(Protocol):
    """The description of an input tensor in a request."""

    name: str
    datatype: str

    @property
    def shape(self) -> Sequence[int]:
        """Return the shape."""


def check_items(model: Model, inputs: Iterable[HasShape]) -> None:
    """Raise an error if inputs have too many items by their shapes; called before their values are walked."""
    for tensor in inputs:
        values = check_shape(tensor.name, tensor.shape)
        model.check_items(values if tensor.datatype == BYTES else next(iter(tensor.shape), 1))


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> Tensor:
    """Return a tensor from its binary form, which `Output.to_bytes` writes."""
    count = check_shape(name, shape)
    if datatype == BYTES:
        strings: list[str] = []
        offset = 0
        while offset < len(data):
            if len(strings) == count:
                raise InputError(f"input '{name}' has more strings than its shape {list(shape)}")
            end = offset + 4 + int.from_bytes(data[offset : offset + 4], "little")
            if end > len(data) or len(data) - offset < 4:
                raise InputError(f"input '{name}' ends in the middle of a string")
            strings.append(to_text(name, data[offset + 4 : end]))
            offset = end
        return from_values(name, datatype, shape, strings)
    dtype = np.dtype(_dtype(name, datatype)).newbyteorder("<")
    if len(data) != (expected := count * dtype.itemsize):
        raise InputError(f"input '{name}' has {len(data)} bytes, but {datatype} of shape {list(shape)} has {expected}")
    return np.frombuffer(data, dtype).reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """Return a tensor from its flattened values."""
    if len(values) != check_shape(name, shape):
        raise InputError(f"input '{name}' has {len(values)} values, but its shape is {list(shape)}")
    if datatype == BYTES:
        if not set(map(type, values)) <= {str}:
            raise InputError(f"input '{name}' is BYTES, but not all of its values are strings")
        return np.array(values, object).reshape(shape)
    dtype = np.dtype(_dtype(name, datatype))
    if not set(map(type, values)) <= _VALUE_TYPES[dtype.kind]:
        raise InputError(f"input '{name}' is {datatype}, but not all of its values are")
    try:
        return np.array(values, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise InputError(f"input '{name}' is not valid {datatype}: {error}") from error


def to_text(name: str, data: bytes | memoryview) -> str:
    """Decode a string of an input."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error


def check_shape(name: str, shape: Sequence[int]) -> int:
    """Return the number of values of a shape, or raise if it is invalid or too large."""
    count, is_valid = 1, len(shape) <= _MAX_AXES
    for size in shape[:_MAX_AXES]:
        is_valid = is_valid and 0 <= size <= _MAX_VALUES
        count *= size
    if not is_valid or count > _MAX_VALUES:
        raise InputError(f"input '{name}' has an invalid shape: {list(shape)}")
    return count


def items_of(model: EncoderModel, tensors: Mapping[str, Tensor]) -> object:
    """Return what the task parses: texts, or objects with its fields."""
    fields = model.task.fields
    known = (*fields, "text_pair") if fields == ("text",) and model.task.takes_pairs else fields
    for name, tensor in tensors.items():
        if name not in known:
            raise InputError(f"the model has no input '{name}'", hint=f"its inputs are {', '.join(known)} or input_ids")
        if tensor.dtype != object:
            raise InputError(f"input '{name}' must be BYTES")
        if tensor.ndim not in (1, 2) or (tensor.ndim == 2 and tensor.shape[1] != 1):
            raise InputError(f"input '{name}' has the shape {list(tensor.shape)}: it must be [n] or [n, 1]")
    for name in fields:
        if name not in tensors:
            raise InputError(f"input '{name}' is missing")
    columns = {name: tensor.reshape(-1).tolist() for name, tensor in tensors.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise InputError("the inputs have different numbers of items")
    if list(columns) == ["text"]:
        return columns["text"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: _list_or_text(value) for name, value in row.items()} for row in rows]


def rows_of(model: EncoderModel, tensors: Mapping[str, Tensor]) -> Encoded:
    """Return a batch of the given token ids, without the padding that the mask marks."""
    signature = model.signature
    names = [spec.name for spec in signature.inputs]
    for name, tensor in tensors.items():
        if name not in names and name not in (ATTENTION_MASK, _TYPE_IDS):
            raise InputError(f"the model has no input '{name}'", hint=f"its inputs are {', '.join(names)}")
        if tensor.dtype.kind not in "iu" or tensor.ndim != 2 or tensor.shape != tensors[_IDS].shape:
            raise InputError(f"input '{name}' must be integers of the same shape as input_ids, [n, tokens]")
    ids = tensors[_IDS]
    if not ids.size:
        raise InputError("input_ids is empty")
    if ids.min() < 0 or ids.max() >= model.tokenizer.size:
        raise InputError(f"a token id is not between 0 and {model.tokenizer.size - 1}")
    mask = tensors[ATTENTION_MASK] != 0 if ATTENTION_MASK in tensors else np.ones(ids.shape, bool)
    lengths = mask.sum(axis=1).astype(np.int32)
    if not lengths.all() or not np.array_equal(mask, real_positions(lengths, ids.shape[1], signature.pads_left)):
        raise InputError("attention_mask must be ones, then zeros, with at least one 1 in each row")
    if lengths.max() > signature.max_length:
        raise InputError(f"a row has {lengths.max()} tokens, but the model supports {signature.max_length}")
    types = tensors.get(_TYPE_IDS) if _TYPE_IDS in names else None
    if types is not None and (types.min() < 0 or types.max() > model.token_types):
        raise InputError(f"a token type is not between 0 and {model.token_types}")
    columns = {}
    for spec in signature.inputs:
        if spec.name != ATTENTION_MASK:
            tensor = tensors.get(spec.name, np.zeros(ids.shape, np.int32))
            columns[spec.name] = tensor[mask].astype(np.int32)
    rows = len(ids)
    return Encoded(Batch(columns, lengths), np.arange(rows), rows, (), ())


def _dtype(name: str, datatype: str) -> Any:
    if datatype not in _DTYPES:
        hint = f"supported: BYTES, {', '.join(_DTYPES)}"
        raise InputError(f"input '{name}' has an unknown datatype: {datatype}", hint=hint)
    return _DTYPES[datatype]


def _list_or_text(value: str) -> object:
    """Decode a field that is a list (choices, documents, labels) from JSON."""
    if value.startswith("["):
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(value, type=list[str])
    return value


def _output_names(model: EncoderModel, requested: Sequence[str], is_tokens: bool) -> Sequence[str]:
    numeric = [spec.name for spec in model.signature.outputs] if is_tokens or _is_row_wise(model) else []
    known = numeric + ([] if is_tokens else [ANSWER])
    for name in requested:
        if name not in known:
            hint = f"outputs for these inputs: {', '.join(known)}"
            raise InputError(f"the model has no output '{name}' for these inputs", hint=hint)
    return tuple(dict.fromkeys(requested)) or known


def _is_row_wise(model: EncoderModel) -> bool:
    """Return whether a text is one row with one entry in each output."""
    return model.task.axes == (BATCH,) and model.task.fields == ("text",)


def _output(model: EncoderModel, name: str, outputs: Outputs, encoded: Encoded) -> Output:
    if name == ANSWER:
        answers = model.task.decode(outputs, encoded, model.default_options)
        return Output(name, [msgspec.json.encode(answer, enc_hook=to_json_value) for answer in answers])
    spec = next(spec for spec in model.signature.outputs if spec.name == name)
    if not spec.is_per_token:
        return Output(name, np.ascontiguousarray(outputs[name]))
    # (rows, tokens, …) with zeros for padding.
    lengths = encoded.batch.lengths
    return Output(name, repad(outputs[name], lengths, int(lengths.max()), model.signature.pads_left))
