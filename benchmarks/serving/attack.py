"""Measure what good clients notice while others attack the server: a million requests in windows with and without.

    python benchmarks/serving/attack.py [--tiny BUNDLE] [--requests N] [--intensity X] [--only slow_head …]
    python benchmarks/serving/attack.py --requests 100000 --intensity 10 -o benchmarks/results/serving_attack_heavy.json

Good clients send requests at random times at one rate throughout (an open loop) and compare every answer with that of
the model in process. In every second window the attackers of `attackers.py` run beside them. With `--cores split` the
server has the first core, and clients and attackers share the second: what attackers compute themselves takes no time
from the server. Attackers run only while nothing else does. All traffic goes to 127.0.0.1. Nothing else may run on the
machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from attackers import KINDS, Kind, Target, run_attackers
from contenders import RunningServer
from endurance import WORD, build_tiny, hasten_contender, predict_request
from environments import provenance_with_versions

import hasten
from hasten.metrics.statistics import median_ratio
from hasten.stress.load import arrivals

HERE = Path(__file__).parent
# The cores of the server, and those of clients and attackers.
CORES: dict[str, tuple[set[int], set[int]]] = {"split": ({0}, {1}), "shared": ({0, 1}, {0, 1})}
CONNECTIONS = 32
# Lower than the defaults (30 s, 4096), so that a window sees each of them several times.
OPTIONS = "--read-timeout 5s --max-connections 512"
MAX_CONNECTIONS = 512
TEXTS = [WORD * length for length in (1, 3, 8, 15, 30)]
PROBE_INTERVAL_S, PROBE_LIMIT_S = 0.1, 0.1
# Time for the server to close what the attackers have left, longer than its read timeout.
SETTLE_S = 8.0
# Timers of an event loop wake up to a millisecond late, which is not counted as latency; any further delay is.
TIMER_S = 0.001
SCORE_TOLERANCE = 1e-4


@dataclass
class Window:
    """The answers to good clients in one window."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def percentile_ms(self, level: float) -> float:
        """Return a percentile of the latency."""
        return float(np.percentile(self.seconds, level)) * 1e3


class GoodClients:
    """Connections that send known requests and compare the answers with the expected ones."""

    def __init__(self, port: int, expected: Sequence[Any]) -> None:
        self._port = port
        self._requests = [predict_request(text) for text in TEXTS]
        self._expected = expected
        # Bodies that were compared already; numbers differ in the last digits with the batch.
        self._right: list[set[bytes]] = [set() for _ in TEXTS]
        self._idle: list[_Client] = []
        self._waiting: deque[tuple[int, float]] = deque()
        self._open = 0
        self._left = 0
        self._is_over = asyncio.Event()
        self.window = Window()

    async def connect(self) -> None:
        """Open all connections."""
        while self._open < CONNECTIONS:
            self._open += 1
            _, client = await asyncio.get_running_loop().create_connection(
                lambda: _Client(self), "127.0.0.1", self._port
            )
            self._idle.append(client)

    async def run(self, count: int, rate: float, seed: int) -> Window:
        """Send this many requests at this rate, in random order, and return the answers."""
        await self.connect()
        due = arrivals(rate, count / rate * 1.1 + 5, seed)[:count]
        texts = np.random.default_rng(seed).integers(len(TEXTS), size=len(due)).tolist()
        self.window, self._left = Window(), len(due)
        self._is_over.clear()
        begin = time.perf_counter() + TIMER_S
        for text, offset in zip(texts, due.tolist(), strict=True):
            while (ahead := begin + offset - time.perf_counter()) > 0:
                await asyncio.sleep(ahead)
            now = time.perf_counter()
            self._waiting.append((text, min(now, begin + offset + TIMER_S)))
            self.send_next()
        await asyncio.wait_for(self._is_over.wait(), 60)
        return self.window

    def send_next(self) -> None:
        """Send waiting requests on idle connections."""
        while self._waiting and self._idle:
            text, due = self._waiting.popleft()
            self._idle.pop().send(self._requests[text], text, due)

    def answered(self, client: _Client, text: int, due: float, status: str, body: bytes) -> None:
        """Record an answer and compare it."""
        window = self.window
        window.seconds.append(time.perf_counter() - due)
        window.statuses[status] += 1
        if status == "200" and body not in self._right[text]:
            if self._is_right(text, body):
                self._right[text].add(body)
            else:
                window.wrong.append(f"{TEXTS[text]!r:.40}: {body!r:.200}")
        self._idle.append(client)
        self.send_next()
        self._count_down()

    def lost(self, client: _Client, text: int | None, due: float) -> None:
        """Record a connection that broke; it is opened again before the next window."""
        self._open -= 1
        if client in self._idle:
            self._idle.remove(client)
        self.window.statuses["connection lost"] += 1
        if text is not None:
            self._count_down()

    def _count_down(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._is_over.set()

    def _is_right(self, text: int, body: bytes) -> bool:
        answer, expected = json.loads(body)[0], self._expected[text]
        return answer["label"] == expected["label"] and abs(answer["score"] - expected["score"]) < SCORE_TOLERANCE


class _Client(asyncio.Protocol):
    """One connection, with at most one request in flight."""

    def __init__(self, clients: GoodClients) -> None:
        self._clients = clients
        self._data = b""
        self._text: int | None = None
        self._due = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, request: bytes, text: int, due: float) -> None:
        """Send a request."""
        self._text, self._due = text, due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        begin = head.lower().index(b"\r\ncontent-length: ") + 18
        if len(body) < int(head[begin:].split(b"\r\n", 1)[0]) or self._text is None:
            return
        text, self._text, self._data = self._text, None, b""
        self._clients.answered(self, text, self._due, head[9:12].decode(), body)

    def connection_lost(self, error: Exception | None) -> None:
        self._clients.lost(self, self._text, self._due)


def probe(results: Connection, port: int, grpc_port: int, model: str, cores: set[int]) -> None:
    """Ask for readiness over HTTP and for an inference over gRPC ten times a second; the main of a process."""
    import grpc
    from http_requests import KeepAliveConnection

    from hasten.server.grpc.protobuf import message

    os.sched_setaffinity(0, cores)
    data = TEXTS[2].encode()
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1]}
    contents = [len(data).to_bytes(4, "little") + data]
    # Numbers, which a tolerance applies to: the text of an answer has another length with another last digit.
    request = message("ModelInferRequest")(
        model_name=model, inputs=[tensor], outputs=[{"name": "logits"}], raw_input_contents=contents
    )
    ready = b"GET /v2/health/ready HTTP/1.1\r\nhost: a\r\n\r\n"
    expected: list[bytes] = []
    # When each probe began, and how long the answers took; infinity for a failed one.
    probes: list[tuple[float, float, float]] = []
    http = KeepAliveConnection(port)

    def ask_http() -> bool:
        nonlocal http
        try:
            http.send(ready)
        except (OSError, SystemExit):
            http.close()
            http = KeepAliveConnection(port)
            raise
        return True

    def ask_grpc() -> bool:
        answer = message("ModelInferResponse").FromString(infer(request.SerializeToString(), timeout=10))
        raw = list(answer.raw_output_contents)
        expected[:] = expected or raw
        return all(_is_close(first, second) for first, second in zip(raw, expected, strict=True))

    def seconds(ask: Callable[[], bool]) -> float:
        begin = time.perf_counter()
        try:
            is_right = ask()
        except (OSError, SystemExit, grpc.RpcError) as error:
            print(f"a probe failed: {error}", file=sys.stderr)
            is_right = False
        return time.perf_counter() - begin if is_right else float("inf")

    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while not results.poll(PROBE_INTERVAL_S):
            probes.append((time.perf_counter(), seconds(ask_http), seconds(ask_grpc)))
    http.close()
    results.send(probes)


def _is_close(first: bytes, second: bytes) -> bool:
    """Return whether two outputs, bytes of floats, agree."""
    return len(first) == len(second) and bool(
        np.allclose(np.frombuffer(first, "<f4"), np.frombuffer(second, "<f4"), atol=SCORE_TOLERANCE)
    )


def resources(process_id: int) -> dict[str, float]:
    """Return resident memory and its peak, open files, threads and CPU time of a process."""
    folder = Path(f"/proc/{process_id}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return {
        "memory_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "peak_memory_bytes": int(status["VmHWM"].split()[0]) * 1024,
        "files": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "cpu_s": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
    }


async def study(server: RunningServer, expected: Sequence[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run windows without and with attackers in turn, and return what each measured."""
    spawn = multiprocessing.get_context("spawn")
    commands, theirs = spawn.Pipe()
    probing, probes_theirs = spawn.Pipe()
    size, client_cores = args.requests // (2 * args.pairs), CORES[args.cores][1]
    target = Target(server.port, server.grpc_port, args.tiny.resolve().name, MAX_CONNECTIONS)
    # They stop by themselves if a window takes much longer than it should.
    limit_s = 60 + 3 * size / args.rate
    attackers = spawn.Process(
        target=run_attackers, args=(theirs, target, kinds(args), client_cores, limit_s), daemon=True
    )
    prober = spawn.Process(
        target=probe, args=(probes_theirs, server.port, server.grpc_port, target.model, client_cores), daemon=True
    )
    for process in (attackers, prober):
        process.start()
    theirs.close()
    probes_theirs.close()
    clients, windows, pid = GoodClients(server.port, expected), [], server.process.pid

    async def window(count: int, seed: int, *, is_attacked: bool) -> dict[str, Any]:
        before, begin, own_before = resources(pid), time.perf_counter(), time.process_time()
        if is_attacked:
            commands.send("start")
        answers = await clients.run(count, args.rate, seed)
        end, own_s = time.perf_counter(), time.process_time() - own_before
        after = resources(pid)
        attack: dict[str, Any] = {"cpu_s": 0.0, "counts": {}}
        if is_attacked:
            commands.send("stop")
            while not commands.poll():
                await asyncio.sleep(0.05)
            attack = commands.recv()
        return {
            "is_attacked": is_attacked, "begin": begin, "end": end, "seconds": end - begin, "requests": count,
            "p50_ms": answers.percentile_ms(50), "p99_ms": answers.percentile_ms(99),
            "p999_ms": answers.percentile_ms(99.9), "max_ms": answers.percentile_ms(100),
            "statuses": dict(answers.statuses), "wrong": answers.wrong[:5], "wrong_answers": len(answers.wrong),
            "server_cores": (after["cpu_s"] - before["cpu_s"]) / (end - begin),
            "client_cores": own_s / (end - begin), "attackers_cores": attack["cpu_s"] / (end - begin),
            "memory_bytes": after["memory_bytes"], "files": after["files"], "threads": after["threads"],
            "attackers": attack["counts"],
        }  # fmt: skip

    for is_attacked in (False, True):
        await window(min(size, args.warm_up), 10**6, is_attacked=is_attacked)
    await asyncio.sleep(SETTLE_S)
    settled = resources(pid)
    for pair in range(args.pairs):
        # Alone first in every other pair, so that a drift of the machine favours neither.
        for is_attacked in (False, True) if pair % 2 == 0 else (True, False):
            if windows:
                await asyncio.sleep(args.pause)
            # Both windows of a pair have the same arrivals.
            windows.append(await window(size, pair, is_attacked=is_attacked))
            last = windows[-1]
            print(
                f"{'attacked' if is_attacked else 'alone':<9} p50 {last['p50_ms']:.2f} p99 {last['p99_ms']:.2f} ms, "
                f"cores: server {last['server_cores']:.2f} clients {last['client_cores']:.2f} "
                f"attackers {last['attackers_cores']:.2f}, {last['statuses']}",
                file=sys.stderr,
            )
    # Their library keeps gRPC connections open until the process ends.
    commands.close()
    attackers.join(30)
    await asyncio.sleep(SETTLE_S)
    ended = resources(pid)
    probing.send("stop")
    probes = await asyncio.get_running_loop().run_in_executor(None, probing.recv)
    prober.join(30)
    return summarize(windows, probes, settled, ended, args)


def kinds(args: argparse.Namespace) -> dict[str, Kind]:
    """Return the kinds of attacks to run, at their rates."""
    return {name: KINDS[name].scaled(args.intensity) for name in args.only}


def summarize(
    windows: list[dict[str, Any]],
    probes: Sequence[tuple[float, float, float]],
    settled: dict[str, float],
    ended: dict[str, float],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the figures of the study and of its windows."""
    by_phase = {
        name: [w for w in windows if w["is_attacked"] == (name == "attacked")] for name in ("alone", "attacked")
    }
    # Pairs by order of the windows: the n-th alone with the n-th attacked.
    ratios = {
        name: msgspec.to_builtins(
            median_ratio(*(np.array([w[name] for w in by_phase[phase]]) for phase in ("attacked", "alone")))
        )
        for name in ("p50_ms", "p99_ms", "p999_ms")
    }
    statuses: Counter[str] = Counter()
    attackers: dict[str, Counter[str]] = {}
    phases: dict[str, Any] = {}
    for phase, measured in by_phase.items():
        figures = ("p50_ms", "p99_ms", "p999_ms", "server_cores", "client_cores", "attackers_cores")
        phases[phase] = {name: float(np.median([w[name] for w in measured])) for name in figures}
        phases[phase]["max_ms"] = max(w["max_ms"] for w in measured)
        for name, position in (("health", 1), ("grpc", 2)):
            times = [p[position] for p in probes if any(w["begin"] <= p[0] < w["end"] for w in measured)]
            phases[phase][name] = {
                "probes": len(times), "failed": times.count(float("inf")),
                "p50_ms": float(np.median(times)) * 1e3, "max_ms": max(filter(math.isfinite, times)) * 1e3,
                "late": sum(seconds > PROBE_LIMIT_S for seconds in times),
            }  # fmt: skip
        for each in measured:
            statuses.update(each["statuses"])
            for name, counts in each["attackers"].items():
                attackers.setdefault(name, Counter()).update(counts)
    summary = {
        "requests": sum(w["requests"] for w in windows), "statuses": dict(statuses),
        "wrong_answers": sum(w["wrong_answers"] for w in windows), "rate": args.rate,
        "per_second": sum(w["requests"] for w in windows) / sum(w["seconds"] for w in windows), "ratios": ratios,
        "phases": phases, "attackers": {name: dict(sorted(counts.items())) for name, counts in attackers.items()},
        "memory_growth": ended["memory_bytes"] / settled["memory_bytes"] - 1, "settled": settled, "ended": ended,
    }  # fmt: skip
    return {"summary": summary, "windows": windows}


def main() -> None:
    """Run the study, write the result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=Path, help="bundle of a very small classifier (default: build one)")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of windows without and with attackers")
    parser.add_argument("--rate", type=float, default=1750.0, help="requests per second of the good clients")
    parser.add_argument("--warm-up", type=int, default=20_000, help="requests of each kind of window before the first")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two windows")
    parser.add_argument(
        "--cores", choices=list(CORES), default="split", help="whether the server has a core of its own"
    )
    parser.add_argument("--options", default=OPTIONS, help="options of hasten serve")
    parser.add_argument("--intensity", type=float, default=1.0, help="factor of the rates of the attackers")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_attack.json")
    args = parser.parse_args()
    results: dict[str, Any] = provenance_with_versions({"hasten": sys.executable})
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        args.tiny = args.tiny or build_tiny(Path(work))
        with hasten.load(args.tiny, threads=1) as model:
            expected = [model(text)[0] for text in TEXTS]
        # The server inherits the affinity.
        os.sched_setaffinity(0, CORES[args.cores][0])
        with RunningServer(hasten_contender(args.tiny, *args.options.split())) as server:
            os.sched_setaffinity(0, CORES[args.cores][1])
            results |= uvloop.run(study(server, expected, args))
            log = server.log()
        exit_code = server.process.returncode
    results["summary"] |= {"exit_code": exit_code, "tracebacks": log.count("Traceback")}
    results |= {
        "options": args.options,
        "cores": args.cores,
        "attacks": args.only,
        "rates": {name: [kind.at_once, kind.per_second] for name, kind in kinds(args).items()},
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    print(json.dumps(results["summary"], indent=1))


if __name__ == "__main__":
    main()
