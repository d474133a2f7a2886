"""What stands between a socket and the application: our own HTTP against uvicorn, the same application behind both.

    python benchmarks/serving/front.py --bundle minilm --uvicorn VENV/bin/python

One client, one request at a time, turns alternating: a request that is answered at once, where the front is all there
is, and one that goes through the model. Nothing else may run meanwhile.
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

from hasten.core.hardware import this_machine

RESULT = Path(__file__).parent.parent / "results" / "serving_front.json"
TEXT = "the film is a delight from its first scene to the last"
HOST = "127.0.0.1"
TURNS, REQUESTS = 20, 200
START_S = 60.0
PATHS = {"about the server": ("GET", "/v2", b""), "a text": ("POST", "/predict", json.dumps({"inputs": TEXT}).encode())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--uvicorn", default=sys.executable, help="a Python that has uvicorn and hasten[serve]")
    args = parser.parse_args()
    ours, theirs = free_ports(2)
    environment = {**os.environ, "HASTEN_BUNDLES": str(args.bundle), "HASTEN_INSTANCES": "1"}
    commands = [
        [sys.executable, "-m", "hasten", "serve", "--port", str(ours), "--no-grpc"],
        [args.uvicorn, "-m", "uvicorn", "--factory", "hasten.server.asgi:from_environment", "--port", str(theirs),
         "--no-access-log", "--log-level", "warning", "--loop", "uvloop", "--http", "httptools"],
    ]  # fmt: skip
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) for command in commands]
    try:
        for port in (ours, theirs):
            wait_for(port)
        times = {
            what: measure({"hasten": asking(ours, *path), "uvicorn": asking(theirs, *path)})
            for what, path in PATHS.items()
        }
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    write(times)
    return 0


def measure(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The median of each turn, in milliseconds."""
    for ask in contenders.values():
        for _ in range(REQUESTS):
            ask()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS):
        for name, ask in contenders.items():
            taken = []
            for _ in range(REQUESTS):
                begin = time.perf_counter()
                ask()
                taken.append(time.perf_counter() - begin)
            found[name].append(float(np.median(taken)) * 1e3)
    return found


def asking(port: int, method: str, path: str, body: bytes) -> Callable[[], object]:
    head = f"{method} {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    connection = socket.create_connection((HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask() -> bytes:
        connection.sendall(head + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        top, _, rest = received.partition(b"\r\n\r\n")
        if b" 200 " not in top[:20]:
            raise SystemExit(top.decode())
        length = int(top.lower().partition(b"content-length:")[2].split()[0])
        while len(rest) < length:
            rest += connection.recv(65536)
        return rest

    return ask


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(port: int) -> None:
    """Ours listens before its models are loaded."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready"):
            return
        time.sleep(0.1)
    raise SystemExit(f"nobody is ready on port {port} after {START_S:.0f} s")


def write(times: dict[str, dict[str, list[float]]]) -> None:
    ratios = {what: np.array(of["uvicorn"]) / np.array(of["hasten"]) for what, of in times.items()}
    for what, of in times.items():
        for name, turns in of.items():
            print(f"{what:<18} {name:<8} p50 {np.median(turns):.3f} ms ({min(turns):.3f}–{max(turns):.3f})")
        low, middle, high = np.percentile(ratios[what], [25, 50, 75])
        print(f"{what:<18} uvicorn takes {middle:.2f}× (quartiles {low:.2f}–{high:.2f})")
    document = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(),
        "turns": TURNS,
        "requests_a_turn": REQUESTS,
        "p50_ms": times,
        "uvicorn_over_hasten": {what: float(np.median(values)) for what, values in ratios.items()},
    }
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
