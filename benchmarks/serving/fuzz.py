"""A hundred thousand requests that are almost right: none may get a 5xx, hang, kill the server or make it grow.

    python benchmarks/serving/fuzz.py --bundle BUNDLE [--bundle BUNDLE …] --requests 100000 --seed 0

Valid requests of every route, of which structure, values, headers, tensors and bytes are changed at random, over
connections that are kept. What a request was is known from the seed, the client and its number; the first that is
answered as none may be is printed whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from hasten.core.hardware import this_machine

HERE = Path(__file__).parent
HANG_S = 10.0
CLIENTS = 8
# Of the server in the second half. In the first it comes to hold what the largest requests at once need, and keeps it.
MOST_GROWTH_BYTES = 64 * 2**20
# What a client may ask for itself: too much at once, a deadline that is over, a model that was taken away.
ALLOWED = (503, 504)
TEXT = "It is one of the better answers."
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, 1e308, -0.0, "", " ", "\x00", "a" * 3000,
    "[" * 2000, "é𝒳\u200b", "../../etc/passwd", "%s%n{}", [], {}, [[]], [None], {"": ""}, [[[[[[[[[[[[1]]]]]]]]]]]],
    "BYTES", "INT64", "FP16", "input_ids", "text", "answer", "NaN",
)  # fmt: skip
NAMES = (
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


class WrongError(Exception):
    """What no request may bring about."""


class Requests:
    """Valid ones, and what becomes of them; the same for the same seed."""

    def __init__(self, seed: str, models: Sequence[str]) -> None:
        self._random = random.Random(seed)
        self._models = models

    def next(self) -> tuple[str, bytes]:
        """The route that it began as, and the bytes to send."""
        choose = self._random
        route, method, path, headers, body = self._valid(choose.choice(self._models))
        if isinstance(body, dict) and choose.random() < 0.6:
            body = self._changed(body)
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        if isinstance(body, bytes) and choose.random() < 0.6:
            data, headers = self._changed_binary(data, headers)
        if choose.random() < 0.1:
            data = self._damaged(data)
        if choose.random() < 0.1:
            method = choose.choice(
                ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "POST", "CONNECT", "M"]
            )
        if choose.random() < 0.1:
            path = self._other_path(path)
        if choose.random() < 0.1:
            headers = {**headers, **self._odd_header()}
        lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(data)}", "host: fuzz"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        whole = "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + data
        return route, self._damaged(whole) if choose.random() < 0.03 else whole

    def _valid(self, model: str) -> tuple[str, str, str, dict[str, str], Any]:
        choose = self._random
        texts = [TEXT] * choose.choice([1, 1, 1, 2, 7])
        form = {"content-type": "application/json"}
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        tokens = {"name": "input_ids", "datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]}
        mask = {**tokens, "name": choose.choice(["attention_mask", "token_type_ids"]), "data": [1, 1, 1]}
        infer = {"inputs": [tensor], "id": "1", "parameters": {"priority": 1, "timeout": 10**7}}
        ids = {"inputs": [tokens, mask], "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}
        at = f"/v2/models/{model}"
        known: list[tuple[str, str, Any]] = [
            ("POST", "/predict", {"inputs": choose.choice([TEXT, texts]), "parameters": {"top_k": 2}, "model": model}),
            ("POST", f"/models/{model}", {"inputs": [{"text": TEXT, "text_pair": TEXT}]}),
            ("POST", "/v1/embeddings", {"input": texts, "model": model, "encoding_format": "base64", "dimensions": 8}),
            ("POST", "/embed", {"inputs": texts, "truncate": True, "normalize": False, "model": model}),
            ("POST", "/rerank", {"query": TEXT, "texts": texts, "return_text": True, "model": model}),
            ("POST", f"{at}/infer", infer),
            ("POST", f"{at}/infer", ids),
            ("POST", f"{at}/versions/1/infer", {**infer, "outputs": [{"name": "answer"}]}),
            ("POST", f"{at}/infer", b""),
            ("POST", f"{at}/infer", b""),
            ("POST", "/v2/repository/index", {"ready": True}),
            ("POST", "/v2/repository/models/nobody/load", {}),
            ("POST", "/v2/repository/models/nobody/unload", {}),
        ]
        reading = ["/v2", at, f"{at}/ready", f"{at}/versions/1", f"{at}/versions/1/ready", "/v2/health/live"]
        reading += ["/v2/health/ready", "/health", "/metrics", "/openapi.json", "/docs", "/v1/models", "/info"]
        method, path, body = choose.choice([*known, *known, *(("GET", path, None) for path in reading)])
        route = f"{method} {path.replace(model, '{model}')}"
        if body == b"":
            return f"{route} (binary)", method, path, *self._binary()
        return route, method, path, form, body

    def _binary(self) -> tuple[dict[str, str], bytes]:
        if self._random.random() < 0.5:
            blob = len(TEXT).to_bytes(4, "little") + TEXT.encode()
            about = {"name": "text", "datatype": "BYTES", "shape": [1]}
        else:
            blob = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 4))
            about = {"name": "input_ids", "datatype": "INT64", "shape": [2, 2]}
        head: Any = {
            "inputs": [{**about, "parameters": {"binary_data_size": len(blob)}}],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(self._changed(head) if self._random.random() < 0.4 else head).encode()
        return {"inference-header-content-length": str(len(text))}, text + blob

    def _changed(self, body: Any) -> Any:
        """A copy with one to three of its places changed, taken out, or put in twice."""
        copy = json.loads(json.dumps(body))
        for _ in range(self._random.choice([1, 1, 2, 3])):
            places: list[tuple[Any, Any]] = []
            _walk(copy, places)
            if not places:
                return self._odd()
            holder, key = self._random.choice(places)
            act = self._random.random()
            if act < 0.6:
                holder[key] = self._odd()
            elif act < 0.75:
                del holder[key]
            elif act < 0.85 and isinstance(holder, dict):
                holder[self._random.choice(NAMES)] = holder.pop(key)
            elif isinstance(holder, list):
                holder.extend([holder[key]] * self._random.choice([1, 5, 1100]))
            else:
                holder[key] = [holder[key]] * 2
        return copy

    def _odd(self) -> Any:
        return deepcopy(self._random.choice(ODD))

    def _changed_binary(self, data: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        choose = self._random
        act = choose.randrange(4)
        if act == 0:
            return self._damaged(data), headers
        if act == 1:
            return data[: choose.randrange(len(data) + 1)], headers
        if act == 2:
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

    def _damaged(self, data: bytes) -> bytes:
        """Some bytes changed, taken out or put in."""
        raw = bytearray(data)
        for _ in range(self._random.choice([1, 1, 3, 20])):
            place = self._random.randrange(len(raw) + 1)
            act = self._random.randrange(3)
            raw[place : place + (act != 0)] = self._random.randbytes(act != 1)
        return bytes(raw)

    def _other_path(self, path: str) -> str:
        choose = self._random
        word = choose.choice(
            ["%00", "%FF", "..", "//", "?", "#", "a" * 500, "%", "*", "infer", "versions/2", "%2F", "{model}"]
        )
        act = choose.randrange(4)
        if act == 0:
            return f"{path}/{word}"
        if act == 1:
            return f"http://fuzz{path}?{word}"
        if act == 2:
            return path.replace("/", f"/{word}/", 1)
        return path[: choose.randrange(1, len(path) + 1)]

    def _odd_header(self) -> dict[str, str]:
        odd = {
            "x-request-id": ["é", "a" * 300, "\tb", "1"], "authorization": ["Bearer", "Basic \xff", ""],
            "traceparent": ["00-1-2-3", "\x80"], "connection": ["close", "upgrade", "keep-alive, te"],
            "expect": ["100-continue", "200-ok"], "transfer-encoding": ["chunked", "gzip", "identity"],
            "upgrade": ["h2c"], "content-encoding": ["gzip"], "content-length": ["5", "-1"], "a" * 300: ["b"],
        }  # fmt: skip
        name = self._random.choice(list(odd))
        return {name: self._random.choice(odd[name])}


def _walk(value: Any, places: list[tuple[Any, Any]]) -> None:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        places.append((value, key))
        _walk(inner, places)


class Client:
    """Asks one after the other, on a connection for as long as that is kept."""

    def __init__(self, port: int, requests: Requests, counts: Counter[tuple[str, int]]) -> None:
        self._port = port
        self._requests = requests
        self._counts = counts
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, number: int) -> None:
        route, sent = self._requests.next()
        try:
            status = await asyncio.wait_for(self._status(sent), HANG_S)
        except TimeoutError:
            raise WrongError(f"request {number} ({route}) got no answer in {HANG_S:g} s: {sent!r:.4000}") from None
        except OSError as error:
            raise WrongError(f"request {number} ({route}) broke the connection: {error}: {sent!r:.4000}") from None
        self._counts[route, status] += 1
        if status >= 500 and status not in ALLOWED:
            raise WrongError(f"request {number} ({route}) got {status}: {sent!r:.4000}")

    async def _status(self, sent: bytes) -> int:
        """Zero where the server closed without a word: bytes that were no request to their end."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        reader, writer = self._streams
        writer.write(sent)
        if not _is_whole(sent):
            # Damaged where its length is told: without an end it would be waited for.
            writer.write_eof()
        await writer.drain()
        status = 100
        head = b""
        while status == 100:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise WrongError(f"half an answer: {error.partial!r} to {sent!r:.4000}") from None
                self.close()
                return 0
            status = int(head[9:12])
        length = re.search(rb"content-length: (\d+)", head)
        if not sent.lstrip(b"\r\n").startswith(b"HEAD "):
            await reader.readexactly(int(length[1]) if length else 0)
        if b"connection: close" in head or not _is_whole(sent):
            self.close()
        return status

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _is_whole(sent: bytes) -> bool:
    """Whether it ends where its own headers say, as far as a glance tells."""
    head, end, body = sent.partition(b"\r\n\r\n")
    lengths = re.findall(rb"\r\ncontent-length: (\d+)(?=\r\n|$)", head)
    is_plain = b"transfer-encoding" not in head.lower() and b"upgrade" not in head.lower() and sent.isascii()
    return (
        is_plain
        and bool(end)
        and len(lengths) == 1
        and int(lengths[0]) == len(body)
        and not sent.startswith(b"CONNECT")
    )


class Served:
    """`hasten serve` as a process of its own; what it writes to stderr is kept."""

    def __init__(self, bundles: Sequence[Path], errors: Path) -> None:
        words = [*map(str, bundles), "--port", "0", "--no-grpc", "--max-queue", "64"]
        self._errors = errors
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hasten", "serve", *words], stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self.process.stdout is not None
        ready = re.search(r":(\d+)$", self.process.stdout.readline())
        if ready is None:
            raise WrongError(f"the server did not start: {errors.read_text()}")
        self.port = int(ready[1])

    def memory_bytes(self) -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(found[1]) * 1024 if found else 0

    def check(self) -> None:
        if self.process.poll() is not None:
            raise WrongError(f"the server is dead ({self.process.returncode}): {self._errors.read_text()[-3000:]}")
        if "Traceback" in (text := self._errors.read_text(errors="replace")):
            raise WrongError(f"the server wrote a traceback:\n{text[-3000:]}")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)


async def fuzz(served: Served, models: Sequence[str], total: int, seed: int) -> dict[str, Any]:
    counts: Counter[tuple[str, int]] = Counter()
    clients = [Client(served.port, Requests(f"{seed}/{place}", models), counts) for place in range(CLIENTS)]
    done, warm_bytes, begin = 0, 0, time.monotonic()

    async def work(client: Client, place: int) -> None:
        nonlocal done, warm_bytes
        for number in range(place, total, CLIENTS):
            await client.ask(number)
            done += 1
            if done == total // 2:
                warm_bytes = served.memory_bytes()
            if done % 1000 == 0:
                served.check()
            if done % 10_000 == 0:
                print(f"{done} in {time.monotonic() - begin:.0f} s, {served.memory_bytes() >> 20} MB", file=sys.stderr)

    async with asyncio.TaskGroup() as group:
        for place, client in enumerate(clients):
            group.create_task(work(client, place))
    seconds = time.monotonic() - begin
    for client in clients:
        client.close()
    grown = served.memory_bytes() - warm_bytes
    if grown > MOST_GROWTH_BYTES:
        raise WrongError(f"the server has grown by {grown} bytes")
    routes: dict[str, dict[str, int]] = {}
    for (route, status), count in sorted(counts.items()):
        routes.setdefault(route, {})[str(status) if status else "closed"] = count
    by_status: Counter[str] = Counter()
    for own in routes.values():
        by_status.update(own)
    return {
        "requests": total, "seconds": round(seconds, 1), "statuses": dict(sorted(by_status.items())), "routes": routes,
        "memory_bytes": {"halfway": warm_bytes, "grown": grown},
    }  # fmt: skip


def study(bundles: Sequence[Path], errors: Path, total: int, seed: int) -> dict[str, Any]:
    models = [bundle.resolve().name for bundle in bundles]
    served = Served(bundles, errors)
    try:
        found = asyncio.run(fuzz(served, models, total, seed))
        served.check()
        return {"models": models, **found, "exit_code": served.stop()}
    except* WrongError as group:
        # The first alone: all others were stopped by it.
        raise SystemExit(str(group.exceptions[0])) from None
    finally:
        served.process.kill()
        served.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, action="append", required=True, help="to be served; may be repeated")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "fuzz.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-fuzz-") as folder:
        found = study(args.bundle, Path(folder) / "errors", args.requests, args.seed)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit.stdout.strip(), "seed": args.seed,
        **found, "machine": this_machine(),
    }  # fmt: skip
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(f"{args.requests} requests in {found['seconds']} s: {found['statuses']}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
