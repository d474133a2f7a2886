"""What the Open Inference Protocol v2 means, whether it comes by HTTP or by gRPC: tensors in, tensors out.

A model takes texts (`BYTES`, one tensor for each of the task's fields) or token ids (`input_ids`, `attention_mask`, …)
and gives tensors by the graph's names and, decoded, `answer`: JSON, one string an item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hasten.core.errors import AccuracyError, BundleError, HastenError, InputError, PlanError, TooLargeError
from hasten.core.tensors import ATTENTION_MASK, BATCH, Batch, Outputs, TensorSpec, real_positions, repad
from hasten.server.engine import Measured
from hasten.server.exchange import plain
from hasten.server.models import Models
from hasten.server.served import Served
from hasten.tasks import Encoded

Tensor = np.ndarray[Any, Any]

VERSION = "1"
ANSWER = "answer"
BYTES = "BYTES"
_IDS, _TYPE_IDS = "input_ids", "token_type_ids"
_TYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}
_MOST_VALUES = 2**28
# What values may be where they come one by one, by the kind of the tensor; NumPy would make numbers of strings.
_VALUES: dict[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
_USUAL = 2
_REFUSED = ("shared_memory_region", "classification")
_MOST_AXES = 8
_MOST_US = 10**15


class Inference(msgspec.Struct, frozen=True):
    """A request, read: strings are arrays of `str` objects."""

    tensors: Mapping[str, Tensor]
    # The outputs that are wanted; all there are, where none is named.
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = {}


class Output(msgspec.Struct, frozen=True):
    """One of an answer: numbers, or as many byte strings."""

    name: str
    value: Tensor | list[bytes]

    @property
    def datatype(self) -> str:
        return BYTES if isinstance(self.value, list) else _NAMES[self.value.dtype]

    @property
    def shape(self) -> list[int]:
        return [len(self.value)] if isinstance(self.value, list) else list(self.value.shape)

    def to_list(self) -> list[Any]:
        if isinstance(self.value, list):
            return [text.decode() for text in self.value]
        return list(self.value.ravel().tolist())

    def to_bytes(self) -> bytes:
        """Little-endian numbers, or strings each with its length in four bytes before it."""
        if isinstance(self.value, list):
            return b"".join(len(text).to_bytes(4, "little") + text for text in self.value)
        return self.value.tobytes()


def infer(
    served: Served, inference: Inference, on_done: Callable[[list[Output] | HastenError, Measured | None], None]
) -> Callable[[], None]:
    """Answer it, on a thread of the engine's; what is called to withdraw it is returned."""
    tensors = inference.tensors
    is_tokens = _IDS in tensors
    wanted = _wanted(served, inference.outputs, is_tokens)

    def decode(outputs: Outputs, encoded: Encoded) -> list[Output]:
        return [_output(served, name, outputs, encoded) for name in wanted]

    priority, timeout_s = order(inference.parameters) if inference.parameters else (0, None)
    if is_tokens:
        return served.submit(lambda: rows_of(served, tensors), decode, on_done, priority=priority, timeout_s=timeout_s)
    return served.ask(lambda: items_of(served, tensors), decode, on_done, priority=priority, timeout_s=timeout_s)


def order(parameters: Mapping[str, Any]) -> tuple[int, float | None]:
    """A request's priority and time, as tritonserver has them: microseconds, 0 for none."""
    priority, timeout = (parameters.get(name, 0) for name in ("priority", "timeout"))
    if not all(type(number) is int and 0 <= number < 2**64 for number in (priority, timeout)):
        raise InputError("priority and timeout are whole numbers, from 0 on")
    # The highest priority is 1, and 0 the usual, which for us is 2.
    return priority - _USUAL if priority else 0, min(timeout, _MOST_US) / 1e6 if timeout else None


@dataclass(frozen=True, slots=True)
class Described:
    name: str
    datatype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Metadata:
    name: str
    versions: list[str]
    platform: str
    inputs: list[Described]
    outputs: list[Described]


def describe(served: Served) -> Metadata:
    outputs = [
        Described(spec.name, _NAMES[np.dtype(spec.dtype.value)], _shape(spec))
        for spec in served.signature.outputs
        if _is_plain(served)
    ]
    return Metadata(
        served.name,
        [VERSION],
        f"hasten_{served.variant}",
        # All that a client must send; some tasks take a text_pair as well.
        [Described(name, BYTES, [-1]) for name in served.task.fields],
        [*outputs, Described(ANSWER, BYTES, [-1])],
    )


def check_version(version: str) -> None:
    """Of a model: there is one."""
    if version not in ("", VERSION):
        raise PlanError(f"there is no version {version} of it", hint=f"there is version {VERSION}")


def load(models: Models, name: str, parameters: Mapping[str, Any]) -> None:
    """Again, without what tritonserver's clients may send along; where it is damaged, what is served stays."""
    if parameters:
        raise InputError("a bundle is loaded as it is", hint=f"without {', '.join(parameters)}")
    try:
        models.load_again(name)
    except (BundleError, AccuracyError) as error:
        raise InputError(error.message, hint=error.hint) from error


def refuse_parameters(tensor: str, parameters: Mapping[str, Any]) -> None:
    """Of an input or output: those that would change the answer, and that this server does not know."""
    for name in _REFUSED:
        if name in parameters:
            raise InputError(f"'{tensor}' has the parameter {name}, which this server does not know")


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> Tensor:
    """A tensor from its binary form, as `Output.to_bytes` writes it."""
    if datatype == BYTES:
        strings: list[str] = []
        place = 0
        while place < len(data):
            end = place + 4 + int.from_bytes(data[place : place + 4], "little")
            if end > len(data) or len(data) - place < 4:
                raise InputError(f"input '{name}' ends in the middle of a string")
            strings.append(to_text(name, data[place + 4 : end]))
            place = end
        return from_values(name, datatype, shape, strings)
    count = check_shape(name, shape)
    kind = np.dtype(_type(name, datatype)).newbyteorder("<")
    if len(data) != count * kind.itemsize:
        raise InputError(f"input '{name}' has {len(data)} bytes, and {datatype} of {list(shape)} has another number")
    return np.frombuffer(data, kind).reshape(shape)


def from_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """A tensor from its values in a row."""
    if len(values) != check_shape(name, shape):
        raise InputError(f"input '{name}' has {len(values)} values, and its shape is {list(shape)}")
    if datatype == BYTES:
        if not set(map(type, values)) <= {str}:
            raise InputError(f"input '{name}' is BYTES, and not all of its values are strings")
        return np.array(values, object).reshape(shape)
    kind = np.dtype(_type(name, datatype))
    if not set(map(type, values)) <= _VALUES[kind.kind]:
        raise InputError(f"input '{name}' is {datatype}, and not all of its values are")
    try:
        return np.array(values, kind).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise InputError(f"input '{name}' is no {datatype}: {error}") from error


def to_text(name: str, data: bytes | memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error


def check_shape(name: str, shape: Sequence[int]) -> int:
    """How many values it has."""
    count, is_known = 1, len(shape) <= _MOST_AXES
    for size in shape[:_MOST_AXES]:
        is_known = is_known and 0 <= size <= _MOST_VALUES
        count *= size
    if not is_known or count > _MOST_VALUES:
        raise InputError(f"input '{name}' has the shape {list(shape)}")
    return count


def items_of(served: Served, tensors: Mapping[str, Tensor]) -> object:
    """What the task parses: texts, or objects with its fields."""
    known = _fields(served)
    for name, tensor in tensors.items():
        if name not in known:
            raise InputError(f"the model has no input '{name}'", hint=f"it takes {', '.join(known)} or input_ids")
        if tensor.dtype != object:
            raise InputError(f"input '{name}' must be BYTES")
        if tensor.ndim not in (1, 2) or (tensor.ndim == 2 and tensor.shape[1] != 1):
            raise InputError(f"input '{name}' has the shape {list(tensor.shape)}; a list of strings is [n] or [n, 1]")
    for name in served.task.fields:
        if name not in tensors:
            raise InputError(f"input '{name}' is missing")
    columns = {name: tensor.reshape(-1).tolist() for name, tensor in tensors.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise InputError("the inputs have different numbers of items")
    if list(columns) == ["text"]:
        return columns["text"]
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [{name: _list_or_text(value) for name, value in row.items()} for row in rows]


def rows_of(served: Served, tensors: Mapping[str, Tensor]) -> Encoded:
    """Token ids as they are, without what the mask calls padding."""
    signature = served.signature
    names = [spec.name for spec in signature.inputs]
    for name, tensor in tensors.items():
        if name not in names and name not in (ATTENTION_MASK, _TYPE_IDS):
            raise InputError(f"the model has no input '{name}'", hint=f"it takes {', '.join(names)}")
        if tensor.dtype.kind not in "iu" or tensor.ndim != 2 or tensor.shape != tensors[_IDS].shape:
            raise InputError(f"input '{name}' must be integers of the same shape as input_ids, [n, tokens]")
    ids = tensors[_IDS]
    if not ids.size:
        raise InputError("input_ids is empty")
    if len(ids) > served.settings.items:
        raise TooLargeError(f"{len(ids)} items are more than {served.settings.items}")
    if ids.min() < 0 or ids.max() >= served.tokenizer.size:
        raise InputError(f"a token id is not between 0 and {served.tokenizer.size - 1}")
    mask = tensors[ATTENTION_MASK] != 0 if ATTENTION_MASK in tensors else np.ones(ids.shape, bool)
    lengths = mask.sum(axis=1).astype(np.int32)
    if not lengths.all() or not np.array_equal(mask, real_positions(lengths, ids.shape[1], signature.pads_left)):
        raise InputError("attention_mask must be ones, then zeros, with at least one 1 in each row")
    if lengths.max() > signature.max_length:
        raise InputError(f"a row has {lengths.max()} tokens, and the model takes {signature.max_length}")
    types = tensors.get(_TYPE_IDS) if _TYPE_IDS in names else None
    if types is not None and (types.min() < 0 or types.max() > served.token_types):
        raise InputError(f"a token type is not between 0 and {served.token_types}")
    columns = {}
    for spec in signature.inputs:
        if spec.name != ATTENTION_MASK:
            tensor = tensors.get(spec.name, np.zeros(ids.shape, np.int32))
            columns[spec.name] = tensor[mask].astype(np.int32)
    rows = len(ids)
    return Encoded(Batch(columns, lengths), np.arange(rows), rows, (), ())


def _type(name: str, datatype: str) -> Any:
    if datatype not in _TYPES:
        raise InputError(f"input '{name}' is {datatype}", hint=f"known: BYTES, {', '.join(_TYPES)}")
    return _TYPES[datatype]


def _fields(served: Served) -> tuple[str, ...]:
    fields = served.task.fields
    return (*fields, "text_pair") if fields == ("text",) and served.task.takes_pairs else fields


def _list_or_text(value: str) -> object:
    """A field that is a list (choices, documents, labels) comes as JSON."""
    if value.startswith("["):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            pass
    return value


def _wanted(served: Served, asked: Sequence[str], is_tokens: bool) -> Sequence[str]:
    numeric = [spec.name for spec in served.signature.outputs] if is_tokens or _is_plain(served) else []
    known = numeric + ([] if is_tokens else [ANSWER])
    for name in asked:
        if name not in known:
            raise InputError(f"the model has no output '{name}' here", hint=f"it gives {', '.join(known)}")
    return tuple(dict.fromkeys(asked)) or known


def _is_plain(served: Served) -> bool:
    """Whether a text is one row with one entry in each output."""
    return served.task.axes == (BATCH,) and served.task.fields == ("text",)


def _output(served: Served, name: str, outputs: Outputs, encoded: Encoded) -> Output:
    if name == ANSWER:
        answers = served.task.decode(outputs, encoded, served.usual_options)
        return Output(name, [msgspec.json.encode(answer, enc_hook=plain) for answer in answers])
    spec = next(spec for spec in served.signature.outputs if spec.name == name)
    return Output(name, _rectangle(outputs[name], spec, encoded.batch, served.signature.pads_left))


def _rectangle(output: Tensor, spec: TensorSpec, batch: Batch, pads_left: bool) -> Tensor:
    """An output per token as (rows, tokens, …), zeros where there is no token; any other as it is."""
    if not spec.is_per_token:
        return np.ascontiguousarray(output)
    return repad(output, batch.lengths, int(batch.lengths.max()), pads_left)


def _shape(spec: TensorSpec) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in spec.shape]
