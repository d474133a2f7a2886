"""The Open Inference Protocol v2, as tritonserver and KServe speak it: JSON, and tensors in binary after it.

A model takes texts (`BYTES`, one tensor for each of the task's fields) or token ids (`input_ids`, `attention_mask`, …)
and gives tensors by the graph's names and, decoded, `answer`: JSON, one string an item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from hasten.core.errors import HastenError, InputError
from hasten.core.tensors import ATTENTION_MASK, BATCH, Batch, Outputs, TensorSpec, real_positions
from hasten.server.engine import Measured
from hasten.server.exchange import Exchange, Response, plain, read_json
from hasten.server.served import Served
from hasten.tasks import Encoded

HEADER_LENGTH = "inference-header-content-length"
ANSWER = "answer"
_TYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}


class InputTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: dict[str, Any] = {}  # noqa: RUF012 – msgspec copies it


class WantedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}  # noqa: RUF012


class InferRequest(msgspec.Struct):
    inputs: list[InputTensor]
    id: str = ""
    outputs: list[WantedOutput] = []  # noqa: RUF012
    parameters: dict[str, Any] = {}  # noqa: RUF012


def infer(served: Served, exchange: Exchange) -> None:
    request, tail = _read(exchange)
    tensors = _tensors(request.inputs, tail)
    wanted = _wanted(request, served, "input_ids" in tensors)

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        return _respond(served, request, wanted, outputs, encoded)

    def done(answer: Response | HastenError, measured: Measured | None) -> None:
        exchange.fail(answer) if isinstance(answer, HastenError) else exchange.reply(answer)

    parameters = request.parameters
    timeout = parameters.get("timeout")
    options: dict[str, Any] = {
        "priority": int(parameters.get("priority", 0)),
        "timeout_s": timeout / 1e6 if isinstance(timeout, int) and timeout > 0 else None,
    }
    if "input_ids" in tensors:
        exchange.on_close = served.submit(lambda: rows_of(served, tensors), decode, done, **options)
    else:
        exchange.on_close = served.ask(lambda: items_of(served, tensors), decode, done, **options)


def _read(exchange: Exchange) -> tuple[InferRequest, memoryview]:
    length = exchange.headers.get(HEADER_LENGTH)
    body = memoryview(exchange.body)
    if length is None:
        return read_json(body, InferRequest), body[:0]
    if not length.isdigit() or int(length) > len(body):
        raise InputError(f"{HEADER_LENGTH} is '{length}', and the body has {len(body)} bytes")
    return read_json(body[: int(length)], InferRequest), body[int(length) :]


def _tensors(inputs: Sequence[InputTensor], tail: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in inputs:
        if tensor.name in tensors:
            raise InputError(f"input '{tensor.name}' is there twice")
        if any(size < 0 for size in tensor.shape) or prod(tensor.shape) > 2**28:
            raise InputError(f"input '{tensor.name}' has the shape {tensor.shape}")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            tensors[tensor.name] = _from_json(tensor)
            continue
        if not isinstance(size, int) or not 0 <= size <= len(tail):
            raise InputError(f"input '{tensor.name}' has {size} bytes, and {len(tail)} are left of the body")
        tensors[tensor.name] = from_bytes(tensor.name, tensor.datatype, tensor.shape, tail[:size])
        tail = tail[size:]
    if len(tail):
        raise InputError(f"{len(tail)} bytes of the body belong to no input")
    return tensors


def _from_json(tensor: InputTensor) -> np.ndarray[Any, Any]:
    values: list[Any] = []
    _flatten(tensor.data, values, depth=0)
    if len(values) != prod(tensor.shape):
        raise InputError(f"input '{tensor.name}' has {len(values)} values, and its shape is {tensor.shape}")
    if tensor.datatype == "BYTES":
        if not all(isinstance(value, str) for value in values):
            raise InputError(f"input '{tensor.name}' is BYTES, and not all of its values are strings")
        return np.array(values, object).reshape(tensor.shape)
    try:
        return np.array(values, _type(tensor.name, tensor.datatype)).reshape(tensor.shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"input '{tensor.name}' is no {tensor.datatype}: {error}") from error


def _flatten(data: Any, values: list[Any], depth: int) -> None:
    if isinstance(data, list):
        if depth > 8:
            raise InputError("an input's data is nested too deeply")
        for entry in data:
            _flatten(entry, values, depth + 1)
    elif data is not None:
        values.append(data)


def _type(name: str, datatype: str) -> Any:
    if datatype not in _TYPES:
        raise InputError(f"input '{name}' is {datatype}", hint=f"known: BYTES, {', '.join(_TYPES)}")
    return _TYPES[datatype]


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: memoryview) -> np.ndarray[Any, Any]:
    """Little-endian numbers, or strings each with its length in four bytes before it."""
    if datatype == "BYTES":
        strings: list[Any] = []
        place = 0
        while place < len(data):
            end = place + 4 + int.from_bytes(data[place : place + 4], "little")
            if end > len(data) or len(data) - place < 4:
                raise InputError(f"input '{name}' ends in the middle of a string")
            strings.append(_text(name, data[place + 4 : end]))
            place = end
        if len(strings) != prod(shape):
            raise InputError(f"input '{name}' has {len(strings)} strings, and its shape is {list(shape)}")
        return np.array(strings, object).reshape(shape)
    kind = np.dtype(_type(name, datatype)).newbyteorder("<")
    if len(data) != prod(shape) * kind.itemsize:
        raise InputError(f"input '{name}' has {len(data)} bytes, and {datatype} of {list(shape)} has another number")
    return np.frombuffer(data, kind).reshape(shape)


def _text(name: str, data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error


def items_of(served: Served, tensors: Mapping[str, np.ndarray[Any, Any]]) -> object:
    """What the task parses: texts, or objects with its fields."""
    fields = served.task.fields
    known = (*fields, "text_pair") if fields == ("text",) else fields
    for name, tensor in tensors.items():
        if name not in known:
            raise InputError(f"the model has no input '{name}'", hint=f"it takes {', '.join(known)} or input_ids")
        if tensor.dtype != object:
            raise InputError(f"input '{name}' must be BYTES")
        if tensor.ndim not in (1, 2) or (tensor.ndim == 2 and tensor.shape[1] != 1):
            raise InputError(f"input '{name}' has the shape {list(tensor.shape)}; a list of strings is [n] or [n, 1]")
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


def _list_or_text(value: str) -> object:
    """A field that is a list (choices, documents, labels) comes as JSON."""
    if value.startswith("["):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            pass
    return value


def rows_of(served: Served, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Encoded:
    """Token ids as they are, without what the mask calls padding."""
    signature = served.signature
    names = [spec.name for spec in signature.inputs]
    for name, tensor in tensors.items():
        if name not in names and name not in (ATTENTION_MASK, "token_type_ids"):
            raise InputError(f"the model has no input '{name}'", hint=f"it takes {', '.join(names)}")
        if tensor.dtype.kind not in "iu" or tensor.ndim != 2 or tensor.shape != tensors["input_ids"].shape:
            raise InputError(f"input '{name}' must be integers of the same shape as input_ids, [n, tokens]")
    ids = tensors["input_ids"]
    if not ids.size:
        raise InputError("input_ids is empty")
    if ids.min() < 0 or ids.max() >= served.tokenizer.size:
        raise InputError(f"a token id is not between 0 and {served.tokenizer.size - 1}")
    mask = tensors[ATTENTION_MASK] != 0 if ATTENTION_MASK in tensors else np.ones(ids.shape, bool)
    lengths = mask.sum(axis=1).astype(np.int32)
    if not lengths.all() or not np.array_equal(mask, real_positions(lengths, ids.shape[1], signature.pads_left)):
        raise InputError("attention_mask must be ones, then zeros, with at least one 1 in each row")
    if lengths.max() > signature.max_length:
        raise InputError(f"a row has {lengths.max()} tokens, and the model takes {signature.max_length}")
    columns = {}
    for spec in signature.inputs:
        if spec.name != ATTENTION_MASK:
            tensor = tensors.get(spec.name, np.zeros(ids.shape, np.int32))
            columns[spec.name] = tensor[mask].astype(np.int32)
    rows = len(ids)
    return Encoded(Batch(columns, lengths), np.arange(rows), rows, (), ())


def _wanted(request: InferRequest, served: Served, is_tokens: bool) -> list[tuple[str, bool]]:
    """The outputs to give, each with whether in binary."""
    numeric = [spec.name for spec in served.signature.outputs] if is_tokens or _is_plain(served) else []
    known = numeric + ([] if is_tokens else [ANSWER])
    default = bool(request.parameters.get("binary_data_output", False))
    if not request.outputs:
        return [(name, default) for name in known]
    for output in request.outputs:
        if output.name not in known:
            raise InputError(f"the model has no output '{output.name}' here", hint=f"it gives {', '.join(known)}")
    return [(output.name, bool(output.parameters.get("binary_data", default))) for output in request.outputs]


def _is_plain(served: Served) -> bool:
    """Whether a text is one row with one entry in each output."""
    return served.task.axes == (BATCH,) and served.task.fields == ("text",)


def _respond(
    served: Served, request: InferRequest, wanted: Sequence[tuple[str, bool]], outputs: Outputs, encoded: Encoded
) -> Response:
    entries: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, is_binary in wanted:
        if name == ANSWER:
            options = served.task.options(served.spec, {})
            answers = served.task.decode(outputs, encoded, options)
            texts = [msgspec.json.encode(answer, enc_hook=plain) for answer in answers]
            entry: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": [len(texts)]}
            blob = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
            values: Callable[[], object] = lambda texts=texts: [text.decode() for text in texts]  # type: ignore[misc]  # noqa: E731
        else:
            tensor = rectangle(outputs[name], spec_of(served, name), encoded.batch, served.signature.pads_left)
            entry = {"name": name, "datatype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
            blob = tensor.tobytes() if is_binary else b""
            values = tensor.ravel().tolist
        if is_binary:
            entry["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            entry["data"] = values()
        entries.append(entry)
    head = {"model_name": served.name, "model_version": "1", "outputs": entries}
    if request.id:
        head["id"] = request.id
    text = msgspec.json.encode(head)
    if not blobs:
        return Response(200, text)
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(200, b"".join([text, *blobs]), "application/octet-stream", headers)


def spec_of(served: Served, name: str) -> TensorSpec:
    return next(spec for spec in served.signature.outputs if spec.name == name)


def rectangle(output: Any, spec: TensorSpec, batch: Batch, pads_left: bool) -> Any:
    """An output per token as (rows, tokens, …), zeros where there is no token; any other as it is."""
    if not spec.is_per_token:
        return np.ascontiguousarray(output)
    width = int(batch.lengths.max())
    whole = np.zeros((len(batch), width, *output.shape[1:]), output.dtype)
    whole[real_positions(batch.lengths, width, pads_left)] = output
    return whole
