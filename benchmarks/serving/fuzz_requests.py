"""Generate HTTP requests that are almost valid, reproducibly from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

TEXT = "It is one of the better answers."
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, 1e308, -0.0, "", " ", "\x00", "a" * 3000,
    "[" * 2000, "é𝒳\u200b", "../../etc/passwd", "%s%n{}", [], {}, [[]], [None], {"": ""}, [[[[[[[[[[[[1]]]]]]]]]]]],
    "BYTES", "INT64", "FP16", "input_ids", "text", "answer", "NaN",
)  # fmt: skip
FIELD_NAMES = (
    "inputs",
    "input",
    "text",
    "model",
    "parameters",
    "name",
    "shape",
    "datatype",
    "data",
    "binary_data_size",
    "id",
)


class RequestGenerator:
    """Valid requests to every route and random mutations of them; the same sequence for the same seed."""

    def __init__(self, seed: str, models: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._models = models

    def next(self) -> tuple[str, bytes]:
        """Return the route of the valid request, and the bytes to send."""
        choose = self._random
        route, method, path, headers, body = self._valid(choose.choice(self._models))
        if isinstance(body, dict) and choose.random() < 0.6:
            body = self._mutate(body)
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        if isinstance(body, bytes) and choose.random() < 0.6:
            data, headers = self._mutate_binary(data, headers)
        if choose.random() < 0.1:
            data = self._corrupt(data)
        if choose.random() < 0.1:
            method = choose.choice(
                ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "POST", "CONNECT", "M"]
            )
        if choose.random() < 0.1:
            path = self._mutate_path(path)
        if choose.random() < 0.1:
            headers = {**headers, **self._odd_header()}
        lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(data)}", "host: fuzz"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + data
        return route, self._corrupt(request) if choose.random() < 0.03 else request

    def _valid(self, model: str) -> tuple[str, str, str, dict[str, str], Any]:
        choose = self._random
        texts = [TEXT] * choose.choice([1, 1, 1, 2, 7])
        json_headers = {"content-type": "application/json"}
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        tokens = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]}
        mask = {**tokens, "name": choose.choice(["attention_mask", "token_type_ids"]), "data": [1, 1, 1]}
        infer = {"inputs": [tensor], "id": "1", "parameters": {"priority": 1, "timeout": 10**7}}
        ids = {"inputs": [tokens, mask], "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}
        prefix = f"/v2/models/{model}"
        posts: list[tuple[str, str, Any]] = [
            ("POST", "/predict", {"inputs": choose.choice([TEXT, texts]), "parameters": {"top_k": 2}, "model": model}),
            ("POST", f"/models/{model}", {"inputs": [{"text": TEXT, "text_pair": TEXT}]}),
            ("POST", "/v1/embeddings", {"input": texts, "model": model, "encoding_format": "base64", "dimensions": 8}),
            ("POST", "/embed", {"inputs": texts, "truncate": True, "normalize": False, "model": model}),
            ("POST", "/rerank", {"query": TEXT, "texts": texts, "return_text": True, "model": model}),
            ("POST", f"{prefix}/infer", infer),
            ("POST", f"{prefix}/infer", ids),
            ("POST", f"{prefix}/versions/1/infer", {**infer, "outputs": [{"name": "answer"}]}),
            ("POST", f"{prefix}/infer", b""),
            ("POST", f"{prefix}/infer", b""),
            ("POST", "/v2/repository/index", {"ready": True}),
            ("POST", "/v2/repository/models/absent/load", {}),
            ("POST", "/v2/repository/models/absent/unload", {}),
        ]
        gets = [
            "/v2",
            prefix,
            f"{prefix}/ready",
            f"{prefix}/versions/1",
            f"{prefix}/versions/1/ready",
            "/v2/health/live",
        ]
        gets += ["/v2/health/ready", "/health", "/metrics", "/openapi.json", "/docs", "/v1/models", "/info"]
        method, path, body = choose.choice([*posts, *posts, *(("GET", path, None) for path in gets)])
        route = f"{method} {path.replace(model, '{model}')}"
        if body == b"":
            return f"{route} (binary)", method, path, *self._binary()
        return route, method, path, json_headers, body

    def _binary(self) -> tuple[dict[str, str], bytes]:
        if self._random.random() < 0.5:
            blob = len(TEXT).to_bytes(4, "little") + TEXT.encode()
            tensor = {"name": "text", "datatype": "BYTES", "shape": [1]}
        else:
            blob = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 4))
            tensor = {"name": "input_ids", "datatype": "INT64", "shape": [2, 2]}
        head: Any = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": len(blob)}}],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(self._mutate(head) if self._random.random() < 0.4 else head).encode()
        return {"inference-header-content-length": str(len(text))}, text + blob

    def _mutate(self, body: Any) -> Any:
        """Return a copy with one to three of its values replaced, removed, renamed or repeated."""
        copy = json.loads(json.dumps(body))
        for _ in range(self._random.choice([1, 1, 2, 3])):
            slots: list[tuple[Any, Any]] = []
            _collect_slots(copy, slots)
            if not slots:
                return self._odd()
            holder, key = self._random.choice(slots)
            action = self._random.random()
            if action < 0.6:
                holder[key] = self._odd()
            elif action < 0.75:
                del holder[key]
            elif action < 0.85 and isinstance(holder, dict):
                holder[self._random.choice(FIELD_NAMES)] = holder.pop(key)
            elif isinstance(holder, list):
                holder.extend([holder[key]] * self._random.choice([1, 5, 1100]))
            else:
                holder[key] = [holder[key]] * 2
        return copy

    def _odd(self) -> Any:
        return deepcopy(self._random.choice(ODD_VALUES))

    def _mutate_binary(self, data: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        choose = self._random
        action = choose.randrange(4)
        if action == 0:
            return self._corrupt(data), headers
        if action == 1:
            return data[: choose.randrange(len(data) + 1)], headers
        if action == 2:
            return data + choose.randbytes(choose.choice([1, 8, 5000])), headers
        lengths = (
            "0",
            "-1",
            "1",
            "+5",
            "1e3",
            "9" * 5000,
            "",
            " 3",
            "0x10",
            str(len(data)),
            str(choose.randrange(300)),
        )
        return data, {"inference-header-content-length": choose.choice(lengths)}

    def _corrupt(self, data: bytes) -> bytes:
        """Replace, remove or insert some bytes."""
        raw = bytearray(data)
        for _ in range(self._random.choice([1, 1, 3, 20])):
            position = self._random.randrange(len(raw) + 1)
            action = self._random.randrange(3)
            raw[position : position + (action != 0)] = self._random.randbytes(action != 1)
        return bytes(raw)

    def _mutate_path(self, path: str) -> str:
        choose = self._random
        part = choose.choice(
            ["%00", "%FF", "..", "//", "?", "#", "a" * 500, "%", "*", "infer", "versions/2", "%2F", "{model}"]
        )
        action = choose.randrange(4)
        if action == 0:
            return f"{path}/{part}"
        if action == 1:
            return f"http://fuzz{path}?{part}"
        if action == 2:
            return path.replace("/", f"/{part}/", 1)
        return path[: choose.randrange(1, len(path) + 1)]

    def _odd_header(self) -> dict[str, str]:
        values = {
            "x-request-id": ["é", "a" * 300, "\tb", "1"], "authorization": ["Bearer", "Basic \xff", ""],
            "traceparent": ["00-1-2-3", "\x80"], "connection": ["close", "upgrade", "keep-alive, te"],
            "expect": ["100-continue", "200-ok"], "transfer-encoding": ["chunked", "gzip", "identity"],
            "upgrade": ["h2c"], "content-encoding": ["gzip"], "content-length": ["5", "-1"], "a" * 300: ["b"],
        }  # fmt: skip
        name = self._random.choice(list(values))
        return {name: self._random.choice(values[name])}


def _collect_slots(value: Any, slots: list[tuple[Any, Any]]) -> None:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        slots.append((value, key))
        _collect_slots(inner, slots)
