"""Compare hasten's HTTP server under load with the same application in ASGI servers, and with other servers.

    python benchmarks/serving/http_load.py --tiny BUNDLE --model DIR --peers VENV/bin/python

The model has one small layer (`endurance.build_tiny`), so that the server is what is measured. The peers' interpreter
needs hasten's dependencies and `uvicorn[standard] granian robyn fastapi litserve`. Closed-loop clients run in a process
of their own; turns alternate. Fairness is the number of answers of the slowest client over that of the median client.
Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from contenders import Contender, RunningServer
from endurance import WORD, hasten_contender, predict_request
from environments import PEERS, provenance_with_versions

from hasten.bundle import open_bundle

HERE = Path(__file__).parent
_LOAD = "load"
_WORDS, _WARM_UP_S = 8, 1.0


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=Path, required=True, help="bundle of the one-layer model")
    parser.add_argument("--model", type=Path, required=True, help="the same model as Hugging Face saves it")
    parser.add_argument("--peers", default=sys.executable, help="Python interpreter with the peers")
    parser.add_argument("--free-threaded", help="free-threaded interpreter with hasten's dependencies")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders to run")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_http_load.json")
    args = parser.parse_args()
    chosen = contenders(args.tiny, args.model, args.peers, args.free_threaded)
    chosen = [each for each in chosen if args.only is None or each.name in args.only]
    turns: dict[str, dict[int, list[dict[str, float]]]] = {each.name: {} for each in chosen}
    with ExitStack() as opened:
        servers = [opened.enter_context(RunningServer(each)) for each in chosen]
        for server in servers:
            load(server, max(args.clients), _WARM_UP_S)
            server.pause()
        for turn in range(args.turns):
            for clients in args.clients:
                for server in servers if turn % 2 == 0 else reversed(servers):
                    server.resume()
                    result = load(server, clients, args.seconds)
                    server.pause()
                    turns[server.contender.name].setdefault(clients, []).append(result)
    rows = [
        {"server": name, "clients": clients, **medians(results), "turns": results}
        for name, by_clients in turns.items()
        for clients, results in by_clients.items()
    ]
    provenance = provenance_with_versions({"hasten": sys.executable, "peers": args.peers})
    results = provenance | {"seconds": args.seconds, "words": _WORDS, "rows": rows}
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    for row in sorted(rows, key=lambda row: row["clients"]):
        print(
            f"{row['clients']:>4} clients  {row['server']:<20}{row['per_second']:>7.0f} requests/s"
            f"  p50 {row['p50_ms']:7.3f}  p99 {row['p99_ms']:8.3f} ms  fairness {row['fairness']:.2f}"
            f"  errors {row['errors']:.0f}"
        )


def contenders(bundle: Path, model: Path, python: str, free_threaded: str | None) -> list[Contender]:
    """Return hasten, its application in ASGI servers, and servers that run the bundle's graph without batching."""
    one = hasten_contender(bundle, "--instances", "1", "--threads", "1")
    processes = hasten_contender(bundle, "--workers", "2", "--instances", "1", "--threads", "1")
    threads = [
        replace(one, name="hasten, free-threaded", command=(python, *one.command[1:]))
        for python in ([free_threaded] if free_threaded else [])
    ]
    entry = next(entry for entry in open_bundle(bundle).manifest.variants if entry.backend == "onnxruntime")
    graph = str(open_bundle(bundle).artifact(entry).path())
    unused: Any = None
    source = str(HERE.parents[1] / "src")
    ours = ("env", f"PYTHONPATH={source}", f"HASTEN_BUNDLES={bundle}", "HASTEN_INSTANCES=1", "HASTEN_THREADS=1", python)
    bare = ("env", f"PYTHONPATH={PEERS}", f"MODEL={model}", f"GRAPH={graph}", python)
    uvicorn = ("-m", "uvicorn", "--port", "{port}", "--no-access-log", "--log-level", "warning")
    granian = ("-m", "granian", "--interface", "asgi", "--port", "{port}", "--no-log")
    factory, app, ready = "hasten.server.asgi:from_environment", "asgi_onnxruntime:app", "/v2/health/ready"

    def script(file: str, *, is_busy_when_idle: bool = False) -> Contender:
        command = (python, str(PEERS / file), str(model), graph, "{port}", "--threads=1")
        return Contender(file.partition("_")[0], command, unused, is_busy_when_idle=is_busy_when_idle)

    return [
        one,
        replace(processes, name="hasten, 2 workers"),
        *threads,
        Contender("hasten in uvicorn", (*ours, *uvicorn, "--factory", factory), unused, ready),
        Contender("hasten in granian", (*ours, *granian, "--factory", factory), unused, ready),
        Contender("uvicorn", (*bare, *uvicorn, app), unused),
        Contender("granian", (*bare, *granian, app), unused),
        script("robyn_onnxruntime.py"),
        script("fastapi_onnxruntime.py"),
        script("litserve_onnxruntime.py", is_busy_when_idle=True),
    ]


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the turns."""
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def load(server: RunningServer, clients: int, seconds: float) -> dict[str, float]:
    """Run closed-loop clients in another process, and return what they measured."""
    command = [sys.executable, __file__, _LOAD, str(server.port), str(clients), str(seconds)]
    result: dict[str, float] = json.loads(subprocess.check_output(command, text=True))
    return result


class Client(asyncio.Protocol):
    """A client that sends its next request when it has the answer to the last."""

    def __init__(self, request: bytes, deadline: float) -> None:
        self._request, self._deadline = request, deadline
        self._received = b""
        self._sent = 0.0
        self.seconds: list[float] = []
        self.errors = 0
        self.is_done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def start(self) -> None:
        """Send the next request, or end."""
        self._sent = time.perf_counter()
        if self._sent < self._deadline:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().partition(b"content-length:")[2].split(None, 1)[0]):
            return
        if head.startswith(b"HTTP/1.1 200"):
            self.seconds.append(time.perf_counter() - self._sent)
        else:
            self.errors += 1
        self._received = b""
        self.start()

    def connection_lost(self, error: Exception | None) -> None:
        self.errors += time.perf_counter() < self._deadline
        self.is_done.set_result(None)


async def run_clients(port: int, count: int, seconds: float) -> dict[str, float]:
    """Run clients that have all connected before the first request is sent."""
    request, deadline = predict_request(WORD * _WORDS), time.perf_counter() + seconds
    loop = asyncio.get_running_loop()
    clients = [Client(request, deadline) for _ in range(count)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
    begin = time.perf_counter()
    for client in clients:
        client.start()
    await asyncio.wait([client.is_done for client in clients], timeout=seconds + 30)
    times = [each for client in clients for each in client.seconds]
    answers = [len(client.seconds) for client in clients]
    return {
        "per_second": len(times) / (deadline - begin),
        "p50_ms": float(np.percentile(times, 50)) * 1e3,
        "p99_ms": float(np.percentile(times, 99)) * 1e3,
        "max_ms": max(times) * 1e3,
        "fairness": min(answers) / statistics.median(answers),
        "errors": sum(client.errors for client in clients),
        "client_cpu": time.process_time() / seconds,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [_LOAD]:
        print(json.dumps(uvloop.run(run_clients(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))))
        os._exit(0)
    main()
