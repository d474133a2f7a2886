"""Fuzz the HTTP server: no request may cause a 5xx, a hang, a crash or a memory leak.

    python benchmarks/serving/fuzz.py --bundle BUNDLE [--bundle BUNDLE …] --requests 100000 --seed 0

Requests are valid ones of every route with random changes to structure, values, headers, tensors and bytes, over
keep-alive connections. Seed, client and number reproduce a request; the first that fails is printed in full.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from fuzz_requests import RequestGenerator

from hasten.core.system.hardware import this_machine

HERE = Path(__file__).parent
TIMEOUT_S = 10.0
CLIENTS = 8
# Memory growth in the second half. In the first half the server allocates buffers for the largest concurrent requests.
MAX_GROWTH_BYTES = 64 * 2**20
# Server errors that a request may cause: a full queue, an expired deadline, an unloaded model.
ALLOWED = (503, 504)


class ServerFaultError(Exception):
    """A fault of the server that no request may cause."""


class Client:
    """Sends one request at a time; reconnects when the server closes the connection."""

    def __init__(self, port: int, requests: RequestGenerator, counts: Counter[tuple[str, int]]) -> None:
        self._port = port
        self._requests = requests
        self._counts = counts
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, number: int) -> None:
        """Send the next request and check the status of the response."""
        route, sent = self._requests.next()
        try:
            status = await asyncio.wait_for(self._status(sent), TIMEOUT_S)
        except TimeoutError:
            raise ServerFaultError(
                f"request {number} ({route}) got no answer in {TIMEOUT_S:g} s: {sent!r:.4000}"
            ) from None
        except OSError as error:
            raise ServerFaultError(
                f"request {number} ({route}) broke the connection: {error}: {sent!r:.4000}"
            ) from None
        self._counts[route, status] += 1
        if status >= 500 and status not in ALLOWED:
            raise ServerFaultError(f"request {number} ({route}) got {status}: {sent!r:.4000}")

    async def _status(self, sent: bytes) -> int:
        """Return the status, or 0 if the server closed the connection without a response to an incomplete request."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        reader, writer = self._streams
        writer.write(sent)
        if not _is_complete(sent):
            # Its length is corrupt: without EOF the server would wait for the rest.
            writer.write_eof()
        await writer.drain()
        status = 100
        head = b""
        while status == 100:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise ServerFaultError(f"incomplete response: {error.partial!r} to {sent!r:.4000}") from None
                self.close()
                return 0
            status = int(head[9:12])
        length = re.search(rb"content-length: (\d+)", head)
        if not sent.lstrip(b"\r\n").startswith(b"HEAD "):
            await reader.readexactly(int(length[1]) if length else 0)
        if b"connection: close" in head or not _is_complete(sent):
            self.close()
        return status

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _is_complete(sent: bytes) -> bool:
    """Return whether the request ends where its headers say, judged without a full parser."""
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


class ServerProcess:
    """`hasten serve` as a process, with its stderr in a file."""

    def __init__(self, bundles: Sequence[Path], errors: Path) -> None:
        arguments = [*map(str, bundles), "--port", "0", "--no-grpc", "--max-queue", "64"]
        self._errors = errors
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hasten", "serve", *arguments], stdout=subprocess.PIPE, stderr=file, text=True
            )
        assert self.process.stdout is not None
        ready = re.search(r":(\d+)$", self.process.stdout.readline())
        if ready is None:
            raise ServerFaultError(f"the server did not start: {errors.read_text()}")
        self.port = int(ready[1])

    def memory_bytes(self) -> int:
        """Return the resident memory."""
        match = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(match[1]) * 1024 if match else 0

    def check(self) -> None:
        """Raise if the process has ended or written a traceback."""
        if self.process.poll() is not None:
            raise ServerFaultError(f"the server exited ({self.process.returncode}): {self._errors.read_text()[-3000:]}")
        if "Traceback" in (text := self._errors.read_text(errors="replace")):
            raise ServerFaultError(f"the server wrote a traceback:\n{text[-3000:]}")

    def stop(self) -> int:
        """Shut it down and return its exit code."""
        self.process.terminate()
        return self.process.wait(60)


async def fuzz(server: ServerProcess, models: Sequence[str], total: int, seed: int) -> dict[str, Any]:
    """Send the requests and return counts by route and status."""
    counts: Counter[tuple[str, int]] = Counter()
    clients = [Client(server.port, RequestGenerator(f"{seed}/{index}", models), counts) for index in range(CLIENTS)]
    done, warm_bytes, begin = 0, 0, time.monotonic()

    async def work(client: Client, first: int) -> None:
        nonlocal done, warm_bytes
        for number in range(first, total, CLIENTS):
            await client.send(number)
            done += 1
            if done == total // 2:
                warm_bytes = server.memory_bytes()
            if done % 1000 == 0:
                server.check()
            if done % 10_000 == 0:
                print(f"{done} in {time.monotonic() - begin:.0f} s, {server.memory_bytes() >> 20} MB", file=sys.stderr)

    async with asyncio.TaskGroup() as group:
        for index, client in enumerate(clients):
            group.create_task(work(client, index))
    seconds = time.monotonic() - begin
    for client in clients:
        client.close()
    growth_bytes = server.memory_bytes() - warm_bytes
    if growth_bytes > MAX_GROWTH_BYTES:
        raise ServerFaultError(f"the server's memory has grown by {growth_bytes} bytes")
    routes: dict[str, dict[str, int]] = {}
    for (route, status), count in sorted(counts.items()):
        routes.setdefault(route, {})[str(status) if status else "closed"] = count
    by_status: Counter[str] = Counter()
    for statuses in routes.values():
        by_status.update(statuses)
    return {
        "requests": total, "seconds": round(seconds, 1), "statuses": dict(sorted(by_status.items())), "routes": routes,
        "memory_bytes": {"halfway": warm_bytes, "grown": growth_bytes},
    }  # fmt: skip


def study(bundles: Sequence[Path], errors: Path, total: int, seed: int) -> dict[str, Any]:
    """Serve the bundles, fuzz the server and return the results."""
    models = [bundle.resolve().name for bundle in bundles]
    server = ServerProcess(bundles, errors)
    try:
        results = asyncio.run(fuzz(server, models, total, seed))
        server.check()
        return {"models": models, **results, "exit_code": server.stop()}
    except* ServerFaultError as group:
        # Only the first: it cancelled the other clients.
        raise SystemExit(str(group.exceptions[0])) from None
    finally:
        server.process.kill()
        server.process.wait()


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, action="append", required=True, help="bundle to serve; may be repeated")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "fuzz.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-fuzz-") as folder:
        measured = study(args.bundle, Path(folder) / "errors", args.requests, args.seed)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=False)
    results = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit.stdout.strip(), "seed": args.seed,
        **measured, "machine": this_machine(),
    }  # fmt: skip
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(f"{args.requests} requests in {measured['seconds']} s: {measured['statuses']}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
