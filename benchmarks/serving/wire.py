"""Requests as bytes, and the thinnest client that can send them: the same for all."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Of a reply's head and body.
Label = Callable[[bytes, bytes], str]
_LENGTH, _HEADER = b"content-length: ", b"inference-header-content-length: "


@dataclass(frozen=True, slots=True)
class Question:
    """How a contender is asked, and where the label stands in its answer."""

    request: Callable[[str], bytes]
    label: Label


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def by_json(path: str = "/predict") -> Question:
    """{"inputs": text} → [{"label": …, "score": …}]"""

    def request(text: str) -> bytes:
        return post(path, json.dumps({"inputs": text}).encode(), "content-type: application/json")

    return Question(request, lambda _, body: json.loads(body)[0]["label"])


def by_tensor(model: str, output: str, shape: list[int], labels: Sequence[str], text_input: str = "text") -> Question:
    """The v2 protocol with binary tensors: a text → its scores."""

    def request(text: str) -> bytes:
        data = text.encode()
        blob = len(data).to_bytes(4, "little") + data
        size = {"binary_data_size": len(blob)}
        tensor = {"name": text_input, "shape": shape, "datatype": "BYTES", "parameters": size}
        wanted = {"name": output, "parameters": {"binary_data": True}}
        head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        return post(
            f"/v2/models/{model}/infer",
            head + blob,
            "content-type: application/octet-stream",
            f"inference-header-content-length: {len(head)}",
        )

    def label(head: bytes, body: bytes) -> str:
        return labels[int(np.frombuffer(body[_number(head, _HEADER) :], "<f4").argmax())]

    return Question(request, label)


class Wire:
    """One keep-alive connection that asks and waits."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> tuple[bytes, bytes]:
        """The reply's head, in lower case, and its body."""
        self._socket.sendall(request)
        data = self._socket.recv(65536)
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head = data[:end].lower()
        size = end + 4 + _number(head, _LENGTH)
        while len(data) < size:
            data += self._more()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"{data[:300]!r}")
        return head, data[end + 4 :]

    def close(self) -> None:
        self._socket.close()

    def _more(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise SystemExit("the server hung up")
        return data


def _number(head: bytes, name: bytes) -> int:
    # With the end of the line before it: one name is the end of the other.
    place = head.index(b"\r\n" + name) + 2 + len(name)
    end = head.find(b"\r\n", place)
    return int(head[place : end if end >= 0 else len(head)])
