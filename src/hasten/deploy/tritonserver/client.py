"""A client for tritonserver's HTTP API, with tensors in binary format."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from hasten.core.errors import PlanError, StageError, UnavailableError
from hasten.core.system.closing import Closing
from hasten.server.protocols.oip import Output, from_bytes

Array = npt.NDArray[Any]
LENGTH = "Inference-Header-Content-Length"
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """The rows and batches that a model has computed since it was loaded."""

    rows: int
    executions: int


class _ServerInfo(msgspec.Struct):
    name: str
    version: str


class Client(Closing):
    """A client with one keep-alive connection; not thread-safe."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or port == 0 or parts.path.strip("/"):
            raise PlanError(f"'{url}' is not an address of a tritonserver", hint="use http://127.0.0.1:8000")
        self._connection = http.client.HTTPConnection(parts.hostname, port or 80, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def version(self) -> str:
        """Return the name and the version of the server."""
        info = self._json("GET", "/v2", kind=_ServerInfo)
        return f"{info.name} {info.version}"

    def index(self) -> dict[str, tuple[str, str]]:
        """Return the models by name, each with its state and the reason for it."""
        models = self._json("POST", "/v2/repository/index", b"{}")
        return {model["name"]: (model.get("state", ""), model.get("reason", "")) for model in models}

    def statistics(self, model: str) -> Statistics:
        """Return the statistics of a model."""
        (statistics,) = self._json("GET", f"/v2/models/{model}/stats")["model_stats"]
        return Statistics(statistics["inference_count"], statistics["execution_count"])

    def infer(self, model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Run a model and return its outputs; strings are arrays of `str` objects in inputs and outputs."""
        content, length = binary_body(inputs, outputs)
        headers, response = self._request("POST", f"/v2/models/{model}/infer", content, {LENGTH: str(length)})
        end = int(headers.get(LENGTH, len(response)))
        tail = memoryview(response)[end:]
        tensors: dict[str, Array] = {}
        for output in msgspec.json.decode(response[:end])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            data, tail = tail[:size], tail[size:]
            tensors[output["name"]] = from_bytes(output["name"], output["datatype"], output["shape"], data)
        return tensors

    def generate(self, model: str, body: bytes) -> Any:
        """Run a generative model and return its whole answer."""
        return self._json("POST", f"/v2/models/{model}/generate", body)

    @property
    def _address(self) -> str:
        return f"{self._connection.host}:{self._connection.port}"

    def _json(self, method: str, path: str, body: bytes | None = None, kind: Any = Any) -> Any:
        content = self._request(method, path, body, {})[1]
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnavailableError(f"{self._address} is not a tritonserver: unexpected response to {path}") from error

    def _request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPMessage, bytes]:
        try:
            self._connection.request(method, path, body, dict(headers))
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnavailableError(
                f"{self._address} does not answer: {reason}", hint="check that tritonserver is running there"
            ) from error
        if response.status != http.client.OK:
            raise StageError(
                f"tritonserver responded with {response.status} to {path}: {content[:500].decode(errors='replace')}"
            )
        return response.headers, content


def binary_body(inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> tuple[bytes, int]:
    """Return the body of an inference request, with binary inputs and outputs, and the length of its JSON header."""
    descriptions, tail = [], b""
    for name, array in inputs.items():
        is_text = array.dtype == object
        value = Output(name, [text.encode() for text in array.reshape(-1)] if is_text else np.ascontiguousarray(array))
        data = value.to_bytes()
        description = {"name": name, "shape": list(array.shape), "datatype": value.datatype}
        descriptions.append({**description, "parameters": {"binary_data_size": len(data)}})
        tail += data
    header: dict[str, object] = {"inputs": descriptions}
    if outputs:
        header["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    encoded = msgspec.json.encode(header)
    return encoded + tail, len(encoded)
