"""The v2 protocol from the other side: what a check asks a tritonserver, in binary where it is many numbers."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import numpy.typing as npt

from hasten.core.closing import Closing
from hasten.core.errors import PlanError, StageError, UnavailableError
from hasten.server.inference import Output, from_bytes

Array = npt.NDArray[Any]
LENGTH = "Inference-Header-Content-Length"
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a model since it was loaded: rows that were answered, and batches that they were answered in."""

    rows: int
    executions: int


class _About(msgspec.Struct):
    name: str
    version: str


class Client(Closing):
    """One connection, kept."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme != "http" or not parts.hostname or port == 0 or parts.path.strip("/"):
            raise PlanError(f"'{url}' is no address of a tritonserver", hint="write http://127.0.0.1:8000")
        self._connection = http.client.HTTPConnection(parts.hostname, port or 80, timeout=_TIMEOUT_S)

    def close(self) -> None:
        self._connection.close()

    def version(self) -> str:
        about = self._json("GET", "/v2", kind=_About)
        return f"{about.name} {about.version}"

    def index(self) -> dict[str, tuple[str, str]]:
        """The models, each with its state and the reason for it."""
        found = self._json("POST", "/v2/repository/index", b"{}")
        return {one["name"]: (one.get("state", ""), one.get("reason", "")) for one in found}

    def statistics(self, model: str) -> Statistics:
        (own,) = self._json("GET", f"/v2/models/{model}/stats")["model_stats"]
        return Statistics(own["inference_count"], own["execution_count"])

    def infer(self, model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
        """Strings are arrays of `str` objects, here and there."""
        content, length = binary_body(inputs, outputs)
        headers, answer = self._ask("POST", f"/v2/models/{model}/infer", content, {LENGTH: str(length)})
        end = int(headers.get(LENGTH, len(answer)))
        tail = memoryview(answer)[end:]
        found: dict[str, Array] = {}
        for output in msgspec.json.decode(answer[:end])["outputs"]:
            size = output["parameters"]["binary_data_size"]
            data, tail = tail[:size], tail[size:]
            found[output["name"]] = from_bytes(output["name"], output["datatype"], output["shape"], data)
        return found

    def generate(self, model: str, body: bytes) -> Any:
        """Of a model that writes, all at once."""
        return self._json("POST", f"/v2/models/{model}/generate", body)

    @property
    def _where(self) -> str:
        return f"{self._connection.host}:{self._connection.port}"

    def _json(self, method: str, path: str, body: bytes | None = None, kind: Any = Any) -> Any:
        content = self._ask(method, path, body, {})[1]
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnavailableError(f"{self._where} is no tritonserver: {path} is answered otherwise there") from error

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPMessage, bytes]:
        try:
            self._connection.request(method, path, body, dict(headers))
            response = self._connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UnavailableError(
                f"{self._where} gives no answer: {why}", hint="is tritonserver running there?"
            ) from error
        if response.status != http.client.OK:
            raise StageError(
                f"tritonserver answers {response.status} to {path}: {content[:500].decode(errors='replace')}"
            )
        return response.headers, content


def binary_body(inputs: Mapping[str, Array], outputs: Sequence[str] = ()) -> tuple[bytes, int]:
    """A request whose tensors follow its JSON, and how long that is; outputs are wanted in binary, too."""
    described, tail = [], b""
    for name, array in inputs.items():
        is_text = array.dtype == object
        value = Output(name, [text.encode() for text in array.reshape(-1)] if is_text else np.ascontiguousarray(array))
        data = value.to_bytes()
        about = {"name": name, "shape": list(array.shape), "datatype": value.datatype}
        described.append({**about, "parameters": {"binary_data_size": len(data)}})
        tail += data
    head: dict[str, object] = {"inputs": described}
    if outputs:
        head["outputs"] = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    encoded = msgspec.json.encode(head)
    return encoded + tail, len(encoded)
