"""The Open Inference Protocol v2, as tritonserver and KServe speak it: JSON, and tensors in binary after it.

A model takes texts (`BYTES`, one tensor for each of the task's fields) or token ids (`input_ids`, `attention_mask`, …)
and gives tensors by the graph's names and, decoded, `answer`: JSON, one string an item.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from hasten.core.errors import HastenError, InputError, PlanError
from hasten.core.tensors import ATTENTION_MASK, BATCH, Batch, Outputs, TensorSpec, real_positions
from hasten.core.version import __version__
from hasten.server.exchange import Exchange, Response, plain, read_json
from hasten.server.routes import Call, Route
from hasten.server.served import Served
from hasten.tasks import Encoded

logger = logging.getLogger("hasten")

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
    parameters: dict[str, Any] = {}


class WantedOutput(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct):
    inputs: list[InputTensor]
    id: str = ""
    outputs: list[WantedOutput] = []
    parameters: dict[str, Any] = {}


def infer(call: Call) -> None:
    served, exchange = call.models.named(call.names["model"]), call.exchange
    request, tail = _read(exchange)
    tensors = _tensors(request.inputs, tail)
    wanted = _wanted(request, served, "input_ids" in tensors)

    def decode(outputs: Outputs, encoded: Encoded) -> Response:
        return _respond(served, request, wanted, outputs, encoded)

    priority, timeout = (request.parameters.get(name, 0) for name in ("priority", "timeout"))
    if not isinstance(priority, int) or not isinstance(timeout, int):
        raise InputError("priority and timeout are whole numbers")
    # In microseconds, as tritonserver has it; zero stands for none.
    urgency: dict[str, Any] = {"priority": priority, "timeout_s": timeout / 1e6 if timeout > 0 else None}
    if "input_ids" in tensors:
        exchange.on_close = served.submit(lambda: rows_of(served, tensors), decode, call.done, **urgency)
    else:
        exchange.on_close = served.ask(lambda: items_of(served, tensors), decode, call.done, **urgency)


def server_metadata(call: Call) -> None:
    extensions = ["binary_tensor_data", "model_repository"]
    call.exchange.reply(Response.json({"name": "hasten", "version": __version__, "extensions": extensions}))


def model_metadata(call: Call) -> None:
    served = call.models.named(call.names["model"])
    fields = [
        *served.task.fields,
        *(["text_pair"] if served.task.fields == ("text",) and served.task.takes_pairs else []),
    ]
    outputs = [
        {"name": spec.name, "datatype": _NAMES[np.dtype(spec.dtype.value)], "shape": _shape(spec)}
        for spec in served.signature.outputs
        if _is_plain(served)
    ]
    call.exchange.reply(
        Response.json(
            {
                "name": served.name,
                "versions": ["1"],
                "platform": f"hasten_{served.variant}",
                "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in fields],
                "outputs": [*outputs, {"name": ANSWER, "datatype": "BYTES", "shape": [-1]}],
            }
        )
    )


def _shape(spec: TensorSpec) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in spec.shape]


def model_ready(call: Call) -> None:
    call.models.named(call.names["model"])
    call.exchange.reply(Response.text(""))


class RepositoryRequest(msgspec.Struct):
    ready: bool = False
    parameters: dict[str, Any] = {}


def repository_index(call: Call) -> None:
    served = {one.name for one in call.models}
    entries = [
        {"name": name, "version": "1", "state": "READY" if name in served else "UNAVAILABLE", "reason": ""}
        for name in call.models.known()
    ]
    request = call.exchange.read_json(RepositoryRequest) if call.exchange.body else RepositoryRequest()
    shown = [entry for entry in entries if entry["state"] == "READY" or not request.ready]
    call.exchange.reply(Response.json(shown))


def repository_load(call: Call) -> None:
    name = call.names["model"]
    path = call.models.known().get(name)
    if path is None:
        raise PlanError(f"'{name}' is none of this server's models", hint=f"known: {', '.join(call.models.known())}")
    _apart(call, lambda: call.models.load(path, name))


def repository_unload(call: Call) -> None:
    name = call.names["model"]
    call.models.named(name)
    _apart(call, lambda: call.models.unload(name))


def _apart(call: Call, work: Callable[[], object]) -> None:
    """What takes seconds happens on a thread of its own, and is answered when it is done."""

    def run() -> None:
        try:
            work()
        except HastenError as error:
            call.exchange.fail(error)
        except Exception:
            logger.exception("%s failed", call.exchange.path)
            call.exchange.reply(Response.json({"error": "it failed; the server's log says why"}, 500))
        else:
            call.exchange.reply(Response.text(""))

    threading.Thread(target=run, daemon=True).start()


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


_MODEL = "/v2/models/{model}"
ROUTES = (
    Route("POST", f"{_MODEL}/infer", infer, "Tensors in, tensors out", InferRequest),
    Route("POST", f"{_MODEL}/versions/{{version}}/infer", infer, "The same: there is one version", InferRequest),
    Route("GET", "/v2", server_metadata, "What this server is"),
    Route("GET", _MODEL, model_metadata, "What a model takes and gives"),
    Route("GET", f"{_MODEL}/versions/{{version}}", model_metadata, "The same: there is one version"),
    Route("GET", f"{_MODEL}/ready", model_ready, "Whether a model is ready", is_open=True),
    Route("GET", f"{_MODEL}/versions/{{version}}/ready", model_ready, "The same: there is one version", is_open=True),
    Route("POST", "/v2/repository/index", repository_index, "The models this server knows", RepositoryRequest),
    Route("POST", "/v2/repository/models/{model}/load", repository_load, "Load a model, or load it again"),
    Route("POST", "/v2/repository/models/{model}/unload", repository_unload, "Take a model away"),
)
