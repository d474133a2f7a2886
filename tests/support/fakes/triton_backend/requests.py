"""HTTP and gRPC requests for both servers, and where their responses differ on purpose."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TEXTS = ["one answer", "ein Wort mit Ü"]
INFER = "/v2/models/classifier/infer"
TOKENS = "/v2/models/tokens/infer"
LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpRequest:
    """A request; `tail` holds binary tensors after the JSON."""

    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    tail: bytes = b""

    def send(self, port: int) -> HttpResponse:
        """Send the request on a new connection."""
        head = self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()
        headers = dict(self.headers)
        if self.tail and head is not None:
            headers.setdefault(LENGTH, str(len(head)))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(self.method, self.path, head + self.tail if head is not None else None, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return HttpResponse(response.status, {name.lower(): value for name, value in response.getheaders()}, content)


@dataclass(frozen=True)
class HttpResponse:
    """A response, with binary tensors after the JSON."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """Return the JSON part of the body."""
        return json.loads(self.content[: int(self.headers.get(LENGTH.lower(), len(self.content)))])

    @property
    def tail(self) -> bytes:
        """Return the binary part of the body."""
        return self.content[int(self.headers.get(LENGTH.lower(), len(self.content))) :]


def text(data: Any = TEXTS, **fields: Any) -> dict[str, Any]:
    """Return the text tensor with some fields replaced."""
    return {"name": "text", "datatype": "BYTES", "shape": [2], "data": data, **fields}


def binary(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    """Return a tensor whose data follows the JSON."""
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def strings(texts: list[str]) -> bytes:
    """Return texts as a binary BYTES tensor."""
    return b"".join(len(entry.encode()).to_bytes(4, "little") + entry.encode() for entry in texts)


BLOB = strings(TEXTS)
IDS = [[2, 5, 6, 3], [2, 7, 3, 0]]
MASK = [[1, 1, 1, 1], [1, 1, 1, 0]]
ID_TENSORS = [
    {"name": "input_ids", "datatype": "INT64", "shape": [2, 4], "data": IDS},
    {"name": "attention_mask", "datatype": "INT64", "shape": [2, 4], "data": MASK},
]
ID_BLOBS = [np.array(values, "<i8").tobytes() for values in (IDS, MASK)]
LOGITS = {"name": "logits"}


def ids(**fields: Any) -> list[dict[str, Any]]:
    """Return the token tensors with some fields of the ids replaced."""
    return [{**ID_TENSORS[0], **fields}, ID_TENSORS[1]]


GOOD = {
    "live": HttpRequest("/v2/health/live", method="GET"),
    "ready": HttpRequest("/v2/health/ready", method="GET"),
    "a model is ready": HttpRequest("/v2/models/classifier/ready", method="GET"),
    "a version is ready": HttpRequest("/v2/models/classifier/versions/1/ready", method="GET"),
    "the server": HttpRequest("/v2", method="GET"),
    "a model": HttpRequest("/v2/models/classifier", method="GET"),
    "a version": HttpRequest("/v2/models/classifier/versions/1", method="GET"),
    "the index": HttpRequest("/v2/repository/index", {}),
    "the index, without a body": HttpRequest("/v2/repository/index", b""),
    "those that are ready": HttpRequest("/v2/repository/index", {"ready": True}),
    "texts": HttpRequest(INFER, {"inputs": [text()]}),
    "a name": HttpRequest(INFER, {"inputs": [text()], "id": "7"}),
    "a version of the model": HttpRequest("/v2/models/classifier/versions/1/infer", {"inputs": [text()]}),
    "texts in nested lists": HttpRequest(INFER, {"inputs": [text([[entry] for entry in TEXTS])]}),
    "one output": HttpRequest(INFER, {"inputs": [text()], "outputs": [LOGITS]}),
    "an output twice": HttpRequest(INFER, {"inputs": [text()], "outputs": [LOGITS, LOGITS]}),
    "outputs in another order": HttpRequest(INFER, {"inputs": [text()], "outputs": [{"name": "answer"}, LOGITS]}),
    "an output in binary": HttpRequest(
        INFER, {"inputs": [text()], "outputs": [{**LOGITS, "parameters": {"binary_data": True}}]}
    ),
    "one in binary, one not": HttpRequest(
        INFER, {"inputs": [text()], "outputs": [{**LOGITS, "parameters": {"binary_data": True}}, {"name": "answer"}]}
    ),
    "all in binary": HttpRequest(INFER, {"inputs": [text()], "parameters": {"binary_data_output": True}}),
    "all but one": HttpRequest(
        INFER,
        {
            "inputs": [text()],
            "parameters": {"binary_data_output": True},
            "outputs": [{**LOGITS, "parameters": {"binary_data": False}}],
        },
    ),
    "texts in binary": HttpRequest(INFER, {"inputs": [binary("text", "BYTES", [2], len(BLOB))]}, tail=BLOB),
    "unknown parameters": HttpRequest(INFER, {"inputs": [text()], "parameters": {"mine": "x", "yours": 5}}),
    "a priority and a time": HttpRequest(INFER, {"inputs": [text()], "parameters": {"priority": 1, "timeout": 10**7}}),
    "token ids": HttpRequest(TOKENS, {"inputs": ID_TENSORS}),
    "token ids in a row": HttpRequest(TOKENS, {"inputs": ids(data=[value for row in IDS for value in row])}),
    "token ids in binary": HttpRequest(
        TOKENS,
        {
            "inputs": [
                binary("input_ids", "INT64", [2, 4], len(ID_BLOBS[0])),
                binary("attention_mask", "INT64", [2, 4], len(ID_BLOBS[1])),
            ],
            "parameters": {"binary_data_output": True},
        },
        tail=b"".join(ID_BLOBS),
    ),
    "compressed": HttpRequest(
        INFER, gzip.compress(json.dumps({"inputs": [text()]}).encode()), {"Content-Encoding": "gzip"}
    ),
}

BAD = {
    "a model that is not there": HttpRequest("/v2/models/absent/infer", {"inputs": [text()]}),
    "metadata of none": HttpRequest("/v2/models/absent", method="GET"),
    "whether none is ready": HttpRequest("/v2/models/absent/ready", method="GET"),
    "a version that is not there": HttpRequest("/v2/models/classifier/versions/2/infer", {"inputs": [text()]}),
    "a path that is not there": HttpRequest("/v2/nothing", method="GET"),
    "a method that is not there": HttpRequest(INFER, method="GET"),
    "no body": HttpRequest(INFER, b""),
    "no JSON": HttpRequest(INFER, b"{"),
    "a list": HttpRequest(INFER, []),
    "no inputs": HttpRequest(INFER, {}),
    "an empty list of inputs": HttpRequest(INFER, {"inputs": []}),
    "an input that is not known": HttpRequest(INFER, {"inputs": [text(name="words")]}),
    "an input too many": HttpRequest(INFER, {"inputs": [text(), text(name="words")]}),
    "an input without a name": HttpRequest(INFER, {"inputs": [{"datatype": "BYTES", "shape": [1], "data": ["a"]}]}),
    "an input without a shape": HttpRequest(INFER, {"inputs": [{"name": "text", "datatype": "BYTES", "data": ["a"]}]}),
    "an input without a datatype": HttpRequest(INFER, {"inputs": [{"name": "text", "shape": [1], "data": ["a"]}]}),
    "an input without data": HttpRequest(INFER, {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]}),
    "an output that is not known": HttpRequest(INFER, {"inputs": [text()], "outputs": [{"name": "scores"}]}),
    "a wrong datatype": HttpRequest(INFER, {"inputs": [text([1, 2], datatype="INT32")]}),
    "a datatype that is not known": HttpRequest(INFER, {"inputs": [text(datatype="STRING")]}),
    "more values than the shape has": HttpRequest(INFER, {"inputs": [text(shape=[1])]}),
    "fewer values than the shape has": HttpRequest(INFER, {"inputs": [text(shape=[3])]}),
    "a negative size": HttpRequest(INFER, {"inputs": [text(shape=[-1])]}),
    "a shape with too many axes": HttpRequest(INFER, {"inputs": [text(shape=[1, 2, 1])]}),
    "numbers for strings": HttpRequest(INFER, {"inputs": [text([1, 2])]}),
    "nothing for a string": HttpRequest(INFER, {"inputs": [text(["a", None])]}),
    "strings for numbers": HttpRequest(TOKENS, {"inputs": ids(data=["a"] * 8)}),
    "fractions for numbers": HttpRequest(TOKENS, {"inputs": ids(data=[1.5] * 8)}),
    "an input that is missing": HttpRequest(TOKENS, {"inputs": [ID_TENSORS[1]]}),
    "shapes that do not fit": HttpRequest(TOKENS, {"inputs": ids(shape=[1, 4])}),
    "fewer bytes than it says": HttpRequest(
        INFER, {"inputs": [binary("text", "BYTES", [2], len(BLOB) + 9)]}, tail=BLOB
    ),
    "more bytes than it says": HttpRequest(
        INFER, {"inputs": [binary("text", "BYTES", [2], len(BLOB))]}, tail=BLOB + b"more"
    ),
    "bytes of another number": HttpRequest(
        TOKENS,
        {"inputs": [binary("input_ids", "INT64", [2, 4], 8), binary("attention_mask", "INT64", [2, 4], 64)]},
        tail=ID_BLOBS[0][:8] + ID_BLOBS[1],
    ),
    "a string that is cut": HttpRequest(INFER, {"inputs": [binary("text", "BYTES", [1], 6)]}, tail=b"\x09\0\0\0ab"),
    "a header that is longer than all": HttpRequest(INFER, {"inputs": [text()]}, {LENGTH: "100000"}),
    "a header that is not numeric": HttpRequest(INFER, {"inputs": [text()]}, {LENGTH: "many"}),
    "shared memory that is not there": HttpRequest(
        INFER,
        {"inputs": [{**binary("text", "BYTES", [2], 8), "parameters": {"shared_memory_region": "x",
                                                                       "shared_memory_byte_size": 8}}]},
    ),
    "what is said to be compressed": HttpRequest(INFER, {"inputs": [text()]}, {"Content-Encoding": "gzip"}),
}  # fmt: skip

# Status codes that differ: tritonserver's, hasten's, and the reason.
UNREADABLE = (500, 400, "a malformed request is a client error, wherever it is detected")
DIFFERENT = {
    **dict.fromkeys(
        (
            "no JSON",
            "a list",
            "no inputs",
            "an input without a name",
            "an input without a shape",
            "an input without a datatype",
            "a negative size",
            "numbers for strings",
            "nothing for a string",
            "strings for numbers",
            "fractions for numbers",
            "shapes that do not fit",
        ),
        UNREADABLE,
    ),
    "whether none is ready": (400, 404, "an unknown model is not found, on every route"),
    "shared memory that is not there": (404, 400, "shared memory is not supported"),
}


def infer(inputs: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return the fields of a ModelInfer request."""
    return {"model_name": "classifier", "inputs": inputs, **fields}


# gRPC calls: the method and the fields of its request.
TEXT = {"name": "text", "datatype": "BYTES", "shape": [2]}
RAW = {"raw_input_contents": [BLOB]}
CALLED: dict[str, tuple[str, dict[str, Any]]] = {
    "live": ("ServerLive", {}),
    "ready": ("ServerReady", {}),
    "a model is ready": ("ModelReady", {"name": "classifier"}),
    "a version is ready": ("ModelReady", {"name": "classifier", "version": "1"}),
    "none is ready": ("ModelReady", {"name": "absent"}),
    "a model": ("ModelMetadata", {"name": "classifier"}),
    "the index": ("RepositoryIndex", {}),
    "texts": ("ModelInfer", infer([TEXT], **RAW)),
    "texts with a name": ("ModelInfer", infer([TEXT], id="7", model_version="1", **RAW)),
    "texts that are typed": ("ModelInfer", infer([{**TEXT, "contents": {"bytes_contents": [b"a", b"b"]}}])),
    "one output": ("ModelInfer", infer([TEXT], outputs=[LOGITS], **RAW)),
    "metadata of none": ("ModelMetadata", {"name": "absent"}),
    "a model that is not there": ("ModelInfer", infer([TEXT], model_name="absent", **RAW)),
    "a version that is not there": ("ModelInfer", infer([TEXT], model_version="2", **RAW)),
    "no inputs": ("ModelInfer", infer([])),
    "no contents": ("ModelInfer", infer([TEXT])),
    "contents too many": ("ModelInfer", infer([TEXT], raw_input_contents=[BLOB, BLOB])),
    "contents in both forms": ("ModelInfer", infer([{**TEXT, "contents": {"bytes_contents": [b"a", b"b"]}}], **RAW)),
    "contents of another type": ("ModelInfer", infer([{**TEXT, "contents": {"int_contents": [1, 2]}}])),
    "an input that is not known": ("ModelInfer", infer([{**TEXT, "name": "words"}], **RAW)),
    "an output that is not known": ("ModelInfer", infer([TEXT], outputs=[{"name": "scores"}], **RAW)),
    "a wrong datatype": ("ModelInfer", infer([{**TEXT, "datatype": "INT32"}], **RAW)),
    "a datatype that is not known": ("ModelInfer", infer([{**TEXT, "datatype": "STRING"}], **RAW)),
    "fewer strings than the shape has": ("ModelInfer", infer([{**TEXT, "shape": [3]}], **RAW)),
    "a negative size": ("ModelInfer", infer([{**TEXT, "shape": [-1]}], **RAW)),
    "a string that is cut": ("ModelInfer", infer([{**TEXT, "shape": [1]}], raw_input_contents=[b"\x09\0\0\0ab"])),
}
CALLED_DIFFERENT = {"contents too many": ("OK", "INVALID_ARGUMENT", "unused contents are an error of the client")}
