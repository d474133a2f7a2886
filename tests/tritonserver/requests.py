"""What both are asked, by HTTP and by gRPC, and where they are meant to answer differently."""

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
class Asked:
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    # Tensors in binary, after the JSON.
    tail: bytes = b""

    def send(self, port: int) -> Answered:
        head = self.body if isinstance(self.body, bytes | None) else json.dumps(self.body).encode()
        headers = dict(self.headers)
        if self.tail and head is not None:
            headers.setdefault(LENGTH, str(len(head)))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(self.method, self.path, head + self.tail if head is not None else None, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return Answered(response.status, {name.lower(): value for name, value in response.getheaders()}, content)


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content[: int(self.headers.get(LENGTH.lower(), len(self.content)))])

    @property
    def tail(self) -> bytes:
        return self.content[int(self.headers.get(LENGTH.lower(), len(self.content))) :]


def text(data: Any = TEXTS, **about: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [2], "data": data, **about}


def binary(name: str, datatype: str, shape: list[int], size: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


def strings(texts: list[str]) -> bytes:
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


def ids(**about: Any) -> list[dict[str, Any]]:
    return [{**ID_TENSORS[0], **about}, ID_TENSORS[1]]


GOOD = {
    "live": Asked("/v2/health/live", method="GET"),
    "ready": Asked("/v2/health/ready", method="GET"),
    "a model is ready": Asked("/v2/models/classifier/ready", method="GET"),
    "a version is ready": Asked("/v2/models/classifier/versions/1/ready", method="GET"),
    "the server": Asked("/v2", method="GET"),
    "a model": Asked("/v2/models/classifier", method="GET"),
    "a version": Asked("/v2/models/classifier/versions/1", method="GET"),
    "the index": Asked("/v2/repository/index", {}),
    "the index, without a body": Asked("/v2/repository/index", b""),
    "those that are ready": Asked("/v2/repository/index", {"ready": True}),
    "texts": Asked(INFER, {"inputs": [text()]}),
    "a name": Asked(INFER, {"inputs": [text()], "id": "7"}),
    "a version of the model": Asked("/v2/models/classifier/versions/1/infer", {"inputs": [text()]}),
    "texts in nested lists": Asked(INFER, {"inputs": [text([[entry] for entry in TEXTS])]}),
    "one output": Asked(INFER, {"inputs": [text()], "outputs": [LOGITS]}),
    "an output twice": Asked(INFER, {"inputs": [text()], "outputs": [LOGITS, LOGITS]}),
    "outputs in another order": Asked(INFER, {"inputs": [text()], "outputs": [{"name": "answer"}, LOGITS]}),
    "an output in binary": Asked(
        INFER, {"inputs": [text()], "outputs": [{**LOGITS, "parameters": {"binary_data": True}}]}
    ),
    "one in binary, one not": Asked(
        INFER, {"inputs": [text()], "outputs": [{**LOGITS, "parameters": {"binary_data": True}}, {"name": "answer"}]}
    ),
    "all in binary": Asked(INFER, {"inputs": [text()], "parameters": {"binary_data_output": True}}),
    "all but one": Asked(
        INFER,
        {
            "inputs": [text()],
            "parameters": {"binary_data_output": True},
            "outputs": [{**LOGITS, "parameters": {"binary_data": False}}],
        },
    ),
    "texts in binary": Asked(INFER, {"inputs": [binary("text", "BYTES", [2], len(BLOB))]}, tail=BLOB),
    "parameters that are nobody's": Asked(INFER, {"inputs": [text()], "parameters": {"mine": "x", "yours": 5}}),
    "a priority and a time": Asked(INFER, {"inputs": [text()], "parameters": {"priority": 1, "timeout": 10**7}}),
    "token ids": Asked(TOKENS, {"inputs": ID_TENSORS}),
    "token ids in a row": Asked(TOKENS, {"inputs": ids(data=[value for row in IDS for value in row])}),
    "token ids in binary": Asked(
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
    "compressed": Asked(INFER, gzip.compress(json.dumps({"inputs": [text()]}).encode()), {"Content-Encoding": "gzip"}),
}

BAD = {
    "a model that is not there": Asked("/v2/models/nobody/infer", {"inputs": [text()]}),
    "metadata of none": Asked("/v2/models/nobody", method="GET"),
    "whether none is ready": Asked("/v2/models/nobody/ready", method="GET"),
    "a version that is not there": Asked("/v2/models/classifier/versions/2/infer", {"inputs": [text()]}),
    "a path that is not there": Asked("/v2/nothing", method="GET"),
    "a method that is not there": Asked(INFER, method="GET"),
    "no body": Asked(INFER, b""),
    "no JSON": Asked(INFER, b"{"),
    "a list": Asked(INFER, []),
    "no inputs": Asked(INFER, {}),
    "an empty list of inputs": Asked(INFER, {"inputs": []}),
    "an input that is not known": Asked(INFER, {"inputs": [text(name="words")]}),
    "an input too many": Asked(INFER, {"inputs": [text(), text(name="words")]}),
    "an input without a name": Asked(INFER, {"inputs": [{"datatype": "BYTES", "shape": [1], "data": ["a"]}]}),
    "an input without a shape": Asked(INFER, {"inputs": [{"name": "text", "datatype": "BYTES", "data": ["a"]}]}),
    "an input without a datatype": Asked(INFER, {"inputs": [{"name": "text", "shape": [1], "data": ["a"]}]}),
    "an input without data": Asked(INFER, {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}]}),
    "an output that is not known": Asked(INFER, {"inputs": [text()], "outputs": [{"name": "scores"}]}),
    "a wrong datatype": Asked(INFER, {"inputs": [text([1, 2], datatype="INT32")]}),
    "a datatype that is not known": Asked(INFER, {"inputs": [text(datatype="STRING")]}),
    "more values than the shape has": Asked(INFER, {"inputs": [text(shape=[1])]}),
    "fewer values than the shape has": Asked(INFER, {"inputs": [text(shape=[3])]}),
    "a negative size": Asked(INFER, {"inputs": [text(shape=[-1])]}),
    "a shape with too many axes": Asked(INFER, {"inputs": [text(shape=[1, 2, 1])]}),
    "numbers for strings": Asked(INFER, {"inputs": [text([1, 2])]}),
    "nothing for a string": Asked(INFER, {"inputs": [text(["a", None])]}),
    "strings for numbers": Asked(TOKENS, {"inputs": ids(data=["a"] * 8)}),
    "fractions for numbers": Asked(TOKENS, {"inputs": ids(data=[1.5] * 8)}),
    "an input that is missing": Asked(TOKENS, {"inputs": [ID_TENSORS[1]]}),
    "shapes that do not fit": Asked(TOKENS, {"inputs": ids(shape=[1, 4])}),
    "fewer bytes than it says": Asked(INFER, {"inputs": [binary("text", "BYTES", [2], len(BLOB) + 9)]}, tail=BLOB),
    "more bytes than it says": Asked(INFER, {"inputs": [binary("text", "BYTES", [2], len(BLOB))]}, tail=BLOB + b"more"),
    "bytes of another number": Asked(
        TOKENS,
        {"inputs": [binary("input_ids", "INT64", [2, 4], 8), binary("attention_mask", "INT64", [2, 4], 64)]},
        tail=ID_BLOBS[0][:8] + ID_BLOBS[1],
    ),
    "a string that is cut": Asked(INFER, {"inputs": [binary("text", "BYTES", [1], 6)]}, tail=b"\x09\0\0\0ab"),
    "a header that is longer than all": Asked(INFER, {"inputs": [text()]}, {LENGTH: "100000"}),
    "a header that is no number": Asked(INFER, {"inputs": [text()]}, {LENGTH: "many"}),
    "shared memory that is not there": Asked(
        INFER,
        {"inputs": [{**binary("text", "BYTES", [2], 8), "parameters": {"shared_memory_region": "x",
                                                                       "shared_memory_byte_size": 8}}]},
    ),
    "what is said to be compressed": Asked(INFER, {"inputs": [text()]}, {"Content-Encoding": "gzip"}),
}  # fmt: skip

# Where the codes differ: theirs, ours, and why.
UNREADABLE = (500, 400, "what a client writes wrongly is its own fault, wherever it is noticed")
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
    "whether none is ready": (400, 404, "a model that is not there is not found, whatever is asked of it"),
    "shared memory that is not there": (404, 400, "no memory is shared here, whatever its name"),
}


def called(inputs: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    return {"model_name": "classifier", "inputs": inputs, **about}


# By gRPC: the name of a method, and what it is asked.
TEXT = {"name": "text", "datatype": "BYTES", "shape": [2]}
RAW = {"raw_input_contents": [BLOB]}
CALLED: dict[str, tuple[str, dict[str, Any]]] = {
    "live": ("ServerLive", {}),
    "ready": ("ServerReady", {}),
    "a model is ready": ("ModelReady", {"name": "classifier"}),
    "a version is ready": ("ModelReady", {"name": "classifier", "version": "1"}),
    "none is ready": ("ModelReady", {"name": "nobody"}),
    "a model": ("ModelMetadata", {"name": "classifier"}),
    "the index": ("RepositoryIndex", {}),
    "texts": ("ModelInfer", called([TEXT], **RAW)),
    "texts with a name": ("ModelInfer", called([TEXT], id="7", model_version="1", **RAW)),
    "texts that are typed": ("ModelInfer", called([{**TEXT, "contents": {"bytes_contents": [b"a", b"b"]}}])),
    "one output": ("ModelInfer", called([TEXT], outputs=[LOGITS], **RAW)),
    "metadata of none": ("ModelMetadata", {"name": "nobody"}),
    "a model that is not there": ("ModelInfer", called([TEXT], model_name="nobody", **RAW)),
    "a version that is not there": ("ModelInfer", called([TEXT], model_version="2", **RAW)),
    "no inputs": ("ModelInfer", called([])),
    "no contents": ("ModelInfer", called([TEXT])),
    "contents too many": ("ModelInfer", called([TEXT], raw_input_contents=[BLOB, BLOB])),
    "contents in both ways": ("ModelInfer", called([{**TEXT, "contents": {"bytes_contents": [b"a", b"b"]}}], **RAW)),
    "contents of another type": ("ModelInfer", called([{**TEXT, "contents": {"int_contents": [1, 2]}}])),
    "an input that is not known": ("ModelInfer", called([{**TEXT, "name": "words"}], **RAW)),
    "an output that is not known": ("ModelInfer", called([TEXT], outputs=[{"name": "scores"}], **RAW)),
    "a wrong datatype": ("ModelInfer", called([{**TEXT, "datatype": "INT32"}], **RAW)),
    "a datatype that is not known": ("ModelInfer", called([{**TEXT, "datatype": "STRING"}], **RAW)),
    "fewer strings than the shape has": ("ModelInfer", called([{**TEXT, "shape": [3]}], **RAW)),
    "a negative size": ("ModelInfer", called([{**TEXT, "shape": [-1]}], **RAW)),
    "a string that is cut": ("ModelInfer", called([{**TEXT, "shape": [1]}], raw_input_contents=[b"\x09\0\0\0ab"])),
}
CALLED_DIFFERENT = {"contents too many": ("OK", "INVALID_ARGUMENT", "what is sent for nothing was sent by mistake")}
