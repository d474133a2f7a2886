"""HTTP requests as bytes, and a minimal keep-alive client; the same for all contenders."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# The head and the body of a response in, the label out.
ReadLabel = Callable[[bytes, bytes], str]
_LENGTH, _HEADER = b"content-length: ", b"inference-header-content-length: "


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """A request format of a contender: encodes a text and reads the label from the response."""

    request: Callable[[str], bytes]
    label: ReadLabel


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a POST request."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def json_format(path: str = "/predict") -> RequestFormat:
    """Return the format {"inputs": text} → [{"label": …, "score": …}]."""

    def request(text: str) -> bytes:
        return post(path, json.dumps({"inputs": text}).encode(), "content-type: application/json")

    return RequestFormat(request, lambda _, body: json.loads(body)[0]["label"])


def binary_format(model: str, output: str, shape: list[int], labels: Sequence[str]) -> RequestFormat:
    """Return the format of the Open Inference Protocol with binary tensors: a text → its scores."""

    def request(text: str) -> bytes:
        data = text.encode()
        blob = len(data).to_bytes(4, "little") + data
        size = {"binary_data_size": len(blob)}
        tensor = {"name": "text", "shape": shape, "datatype": "BYTES", "parameters": size}
        requested = {"name": output, "parameters": {"binary_data": True}}
        head = json.dumps({"inputs": [tensor], "outputs": [requested]}).encode()
        return post(
            f"/v2/models/{model}/infer",
            head + blob,
            "content-type: application/octet-stream",
            f"inference-header-content-length: {len(head)}",
        )

    def label(head: bytes, body: bytes) -> str:
        return labels[int(np.frombuffer(body[_number(head, _HEADER) :], "<f4").argmax())]

    return RequestFormat(request, label)


class KeepAliveConnection:
    """A connection that sends one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> tuple[bytes, bytes]:
        """Send a request and return the head of the response, in lower case, and its body."""
        self._socket.sendall(request)
        data = self._socket.recv(65536)
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += self._receive()
        head = data[:end].lower()
        size = end + 4 + _number(head, _LENGTH)
        while len(data) < size:
            data += self._receive()
        if not head.startswith(b"http/1.1 200"):
            raise SystemExit(f"{data[:300]!r}")
        return head, data[end + 4 :]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise SystemExit("the server closed the connection")
        return data


def _number(head: bytes, name: bytes) -> int:
    # Searched with the preceding line break, since one header name ends with the other.
    begin = head.index(b"\r\n" + name) + 2 + len(name)
    end = head.find(b"\r\n", begin)
    return int(head[begin : end if end >= 0 else len(head)])
