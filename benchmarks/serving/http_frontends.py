"""Compare hasten's HTTP server with uvicorn, with the same application behind both.

    python benchmarks/serving/http_frontends.py --bundle minilm --uvicorn VENV/bin/python

One client sends one request at a time; turns alternate. One request is answered without the model, so that only the
HTTP server is timed; the other runs the model. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from hasten.core.system.hardware import this_machine

RESULT = Path(__file__).parent.parent / "results" / "serving_http_frontends.json"
TEXT = "the film is a delight from its first scene to the last"
HOST = "127.0.0.1"
TURNS, REQUESTS = 20, 200
START_TIMEOUT_S = 60.0
NAMED_REQUESTS = {
    "about the server": ("GET", "/v2", b""),
    "a text": ("POST", "/predict", json.dumps({"inputs": TEXT}).encode()),
}


def main() -> int:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="bundle to serve")
    parser.add_argument("--uvicorn", default=sys.executable, help="Python interpreter with uvicorn and hasten[serve]")
    args = parser.parse_args()
    hasten_port, uvicorn_port = free_ports(2)
    environment = {**os.environ, "HASTEN_BUNDLES": str(args.bundle), "HASTEN_INSTANCES": "1"}
    commands = [
        [sys.executable, "-m", "hasten", "serve", "--port", str(hasten_port), "--no-grpc"],
        [args.uvicorn, "-m", "uvicorn", "--factory", "hasten.server.asgi:from_environment", "--port", str(uvicorn_port),
         "--no-access-log", "--log-level", "warning", "--loop", "uvloop", "--http", "httptools"],
    ]  # fmt: skip
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) for command in commands]
    try:
        for port in (hasten_port, uvicorn_port):
            wait_until_ready(port)
        times = {
            name: measure({"hasten": client(hasten_port, *request), "uvicorn": client(uvicorn_port, *request)})
            for name, request in NAMED_REQUESTS.items()
        }
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    write(times)
    return 0


def measure(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the median latency of each turn in ms, by contender."""
    for send in contenders.values():
        for _ in range(REQUESTS):
            send()
    medians: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, send in contenders.items():
            seconds = []
            for _ in range(REQUESTS):
                begin = time.perf_counter()
                send()
                seconds.append(time.perf_counter() - begin)
            medians[name].append(float(np.median(seconds)) * 1e3)
    return medians


def client(port: int, method: str, path: str, body: bytes) -> Callable[[], object]:
    """Return a function that sends the request on a keep-alive connection and returns the response's body."""
    head = f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send() -> bytes:
        connection.sendall(head + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        response_head, _, rest = received.partition(b"\r\n\r\n")
        if b" 200 " not in response_head[:20]:
            raise SystemExit(response_head.decode())
        length = int(response_head.lower().partition(b"content-length:")[2].split()[0])
        while len(rest) < length:
            rest += connection.recv(65536)
        return rest

    return send


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until_ready(port: int) -> None:
    """Wait until the models are loaded; hasten listens before that."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready"):
            return
        time.sleep(0.1)
    raise SystemExit(f"the server on port {port} is not ready after {START_TIMEOUT_S:.0f} s")


def write(times: dict[str, dict[str, list[float]]]) -> None:
    """Write the result file and print a summary."""
    ratios = {name: np.array(turns["uvicorn"]) / np.array(turns["hasten"]) for name, turns in times.items()}
    for name, by_server in times.items():
        for server, turns in by_server.items():
            print(f"{name:<18} {server:<8} p50 {np.median(turns):.3f} ms ({min(turns):.3f}–{max(turns):.3f})")
        low, middle, high = np.percentile(ratios[name], [25, 50, 75])
        print(f"{name:<18} uvicorn takes {middle:.2f}× (quartiles {low:.2f}–{high:.2f})")
    document = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(),
        "turns": TURNS,
        "requests_a_turn": REQUESTS,
        "p50_ms": times,
        "uvicorn_over_hasten": {name: float(np.median(values)) for name, values in ratios.items()},
    }
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
