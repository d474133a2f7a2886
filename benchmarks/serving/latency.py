"""Measure server overhead per request: one client, one request of 16 tokens at a time, on a keep-alive connection.

    python benchmarks/serving/latency.py --model DIR [--bundle DIR] [--peers ENV] [--triton ENV]

DIR of a text classifier as Hugging Face saves it; ENV are virtual environments of the peers, created if missing. Every
server alternates with the same work in process, in its own environment and on the same graph where possible; the
difference is the overhead. Peers run one instance on all cores without batching, which answers a lone request soonest.
Servers are stopped (SIGSTOP) between their turns, since some use the CPU while they have no requests. Nothing else may
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from contenders import (
    Contender,
    RunningServer,
    ServedModel,
    build_unless_given,
    export_stock_graph,
    hasten_server,
    variant_names,
)
from environments import PEERS, peers_python, provenance_with_versions, triton_python
from http_requests import KeepAliveConnection, json_format
from peer_servers import ALL_PEERS, lone_request_options

from hasten.bundle import open_bundle
from hasten.core.system.hardware import usable_cores

HERE = Path(__file__).parent
TOKENS = 16
# Each word is one token in most vocabularies.
WORDS = "the film is a good one and we would like to see it again with all of you"
# Untimed requests: after the start of a server, after it was stopped and continued, and per connection.
WARM_UP, AFTER_RESUME, UNTIMED = 100, 20, 5
# Overhead in ms.
TARGETS_MS = {"hasten, HTTP binary": 0.35, "hasten, JSON": 0.45, "hasten, gRPC": 1.6}
# The work in process, started by a byte on a socket.
RAW_SOCKET = "a bare socket around it"
HASTEN, STOCK, PIPELINE = "in process", "in process, tokenizers and ONNX Runtime", "in process, transformers"
# tritonserver's Python backend has an environment of its own, with NumPy 1.
STOCK_IN_TRITON = f"{STOCK} in tritonserver's environment"


@dataclass(frozen=True, slots=True)
class Turn:
    """Median latency in ms of an interface, and of the same work in process in the same turn."""

    base: str
    own_ms: float
    base_ms: float


class Interface(Protocol):
    """A way to request predictions; `base` names the one that does the same work in process."""

    name: str
    base: str

    def time(self, requests: int) -> list[float]:
        """Return the seconds of each request."""
        ...


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a text classifier")
    parser.add_argument("--bundle", type=Path, help="bundle of the model (default: build one)")
    parser.add_argument("--peers", type=Path, default=Path("peers-env"), help="virtual environment of the peers")
    parser.add_argument("--triton", type=Path, default=Path("triton-env"), help="virtual environment of tritonserver")
    parser.add_argument("--runs", type=int, default=2, help="runs with fresh processes")
    parser.add_argument("--turns", type=int, default=10, help="turns of each contender per run")
    parser.add_argument("--requests", type=int, default=150, help="requests per turn")
    parser.add_argument("--only", help="run only peers whose name contains this")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_latency.json")
    args = parser.parse_args()
    pythons = {"hasten": sys.executable, "peers": peers_python(args.peers), "triton": triton_python(args.triton)}
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        folder = Path(work)
        bundle = build_unless_given(args.model, args.bundle, folder)
        stock_graph = export_stock_graph(pythons["peers"], args.model, folder)
        model = ServedModel(args.model, stock_graph, bundle, pythons["peers"], pythons["triton"])
        turns: dict[str, list[Turn]] = {}
        for _ in range(args.runs):
            for group in concurrent_groups(model, args.only or ""):
                for name, new_turns in take_turns(model, group, args.turns, args.requests):
                    turns.setdefault(name, []).extend(new_turns)
        results = provenance_with_versions(pythons) | {
            "bundle": variant_names(bundle),
            "text": text_of_length(bundle, TOKENS),
            "tokens": TOKENS,
            "graph": model.best_graph()[1],
            "runs": args.runs,
            "turns": args.turns,
            "requests": args.requests,
            "peer_options": asdict(lone_request_options()),
            "contenders": {name: summary(name, own_turns) for name, own_turns in turns.items()},
        }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(results)


def concurrent_groups(model: ServedModel, only: str) -> Iterator[list[Contender]]:
    """Yield the servers that run side by side: all that are idle without requests, then each of the others."""
    threads = str(usable_cores())
    graph, variant = model.best_graph()
    ours = hasten_server(model.bundle, model.labels, "--variant", variant, "--instances", "1", "--threads", threads)
    options = lone_request_options()
    peers = [peer.server(model, graph, "the same graph", options) for peer in ALL_PEERS if only in peer.name]
    yield [ours, *(peer for peer in peers if not peer.is_busy_when_idle)]
    for peer in peers:
        if peer.is_busy_when_idle:
            yield [ours, peer]


def take_turns(
    model: ServedModel, contenders: Sequence[Contender], turns: int, requests: int
) -> Iterator[tuple[str, list[Turn]]]:
    """Time all interfaces of the servers and the work in process in alternating turns."""
    with ExitStack() as stack:
        interfaces: list[Interface] = []
        servers: dict[str, RunningServer] = {}
        for contender in contenders:
            server = stack.enter_context(RunningServer(contender))
            own_interfaces = list(_interfaces(model, server))
            servers |= {interface.name: server for interface in own_interfaces}
            interfaces += own_interfaces
            server.pause()
        for base in sorted({interface.base for interface in interfaces}):
            process = stack.enter_context(in_process(model, base))
            interfaces += [process, *([_RawSocket(RAW_SOCKET, base, process.port)] if process.port is not None else [])]
        for interface in interfaces:
            _time(interface, servers.get(interface.name), WARM_UP)
        medians: list[dict[str, float]] = []
        for turn in range(turns):
            # A different interface goes first in each turn.
            order = [interfaces[index] for index in np.roll(np.arange(len(interfaces)), turn)]
            medians.append({each.name: _time(each, servers.get(each.name), requests) for each in order})
        for interface in interfaces:
            name, base = interface.name, interface.base
            yield name, [Turn(base, each[name], each[base]) for each in medians]


def _time(interface: Interface, server: RunningServer | None, requests: int) -> float:
    """Return the median latency in ms; the server, if there is one, is stopped before and after."""
    if server is None:
        return float(np.median(interface.time(requests))) * 1e3
    server.resume()
    try:
        interface.time(AFTER_RESUME)
        return float(np.median(interface.time(requests))) * 1e3
    finally:
        server.pause()


def _interfaces(model: ServedModel, server: RunningServer) -> Iterator[Interface]:
    text, contender = text_of_length(model.bundle, TOKENS), server.contender
    if contender.name == "hasten":
        yield Http("hasten, HTTP binary", HASTEN, server.port, contender.format.request(text))
        yield Http("hasten, JSON", HASTEN, server.port, json_format().request(text))
        yield _Grpc("hasten, gRPC", HASTEN, server.grpc_port, model.bundle.resolve().name, "logits", [1], text)
        return
    is_triton = contender.name.startswith("tritonserver")
    base = STOCK_IN_TRITON if is_triton else PIPELINE if "transformers" in contender.name else STOCK
    yield Http(contender.name, base, server.port, contender.format.request(text))
    if is_triton:
        yield _Grpc(f"{contender.name}, gRPC", base, server.grpc_port, "classifier", "scores", [1, 1], text)


def time_requests(port: int, requests: Sequence[bytes]) -> list[float]:
    """Return the seconds of each request, on a new connection: some servers close idle ones after seconds."""
    connection, clock, seconds = KeepAliveConnection(port), time.perf_counter, []
    for request in requests:
        begin = clock()
        connection.send(request)
        seconds.append(clock() - begin)
    connection.close()
    return seconds


@dataclass(slots=True)
class Http:
    """One request, repeated over HTTP."""

    name: str
    base: str
    port: int
    request: bytes

    def time(self, requests: int) -> list[float]:
        """Return the seconds of each request."""
        return time_requests(self.port, [self.request] * (UNTIMED + requests))[UNTIMED:]


class _Grpc:
    """A gRPC channel that sends serialized requests and does not parse responses."""

    def __init__(self, name: str, base: str, port: int, model: str, output: str, shape: list[int], text: str) -> None:
        import grpc

        from hasten.server.grpc.protobuf import SERVICE, message

        self.name, self.base = name, base
        data = text.encode()
        self._request = message("ModelInferRequest")(
            model_name=model,
            inputs=[{"name": "text", "datatype": "BYTES", "shape": shape}],
            outputs=[{"name": output}],
            raw_input_contents=[len(data).to_bytes(4, "little") + data],
        ).SerializeToString()
        self._call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary(f"/{SERVICE}/ModelInfer")

    def time(self, requests: int) -> list[float]:
        call, request, clock = self._call, self._request, time.perf_counter
        seconds = []
        for _ in range(requests):
            begin = clock()
            call(request)
            seconds.append(clock() - begin)
        return seconds


@dataclass(slots=True)
class _RawSocket:
    name: str
    base: str
    port: int

    def time(self, requests: int) -> list[float]:
        clock, seconds = time.perf_counter, []
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(UNTIMED + requests):
                begin = clock()
                connection.sendall(b"?")
                connection.recv(1)
                seconds.append(clock() - begin)
        return seconds[UNTIMED:]


@dataclass(slots=True)
class _InProcess:
    name: str
    process: subprocess.Popen[str]
    # The port of its raw socket, if it has one.
    port: int | None
    base: str = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.name

    def time(self, requests: int) -> list[float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{requests}\n")
        self.process.stdin.flush()
        return list(json.loads(self.process.stdout.readline()))


@contextmanager
def in_process(model: ServedModel, name: str) -> Iterator[_InProcess]:
    """Start the process that does the work without a server."""
    text = text_of_length(model.bundle, TOKENS)
    graph, variant = model.best_graph()
    threads = str(usable_cores())
    if name == HASTEN:
        command = [sys.executable, str(HERE / "in_process.py"), str(model.bundle), variant, threads, text]
    else:
        kind = "pipeline" if name == PIPELINE else "classifier"
        python = model.triton if name == STOCK_IN_TRITON else model.peers
        command = [python, str(PEERS / "in_process.py"), kind, str(model.model), str(graph), text, threads]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first_line = process.stdout.readline().split()
    if first_line[:1] != ["ready"]:
        raise SystemExit(f"{name} did not start")
    yield _InProcess(name, process, int(first_line[1]) if first_line[1:] else None)
    process.communicate()


def text_of_length(bundle: Path, tokens: int) -> str:
    """Return a text of exactly this many tokens, special tokens included."""
    tokenizer = open_bundle(bundle).tokenizer()
    words = WORDS.split()
    for count in range(1, tokens + 1):
        text = " ".join((words * tokens)[:count])
        if int(tokenizer.encode([text]).batch.lengths[0]) == tokens:
            return text
    raise SystemExit(f"cannot make a text of exactly {tokens} tokens with this tokenizer")


def summary(name: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the latency of an interface and its overhead with quartiles over turns."""
    medians = [turn.own_ms for turn in turns]
    low, middle, high = np.percentile([turn.own_ms - turn.base_ms for turn in turns], [25, 50, 75])
    return {
        "base": turns[0].base,
        "p50_ms": float(np.median(medians)),
        "added_ms": {"value": float(middle), "low": float(low), "high": float(high)},
        "target_ms": TARGETS_MS.get(name),
        "turn_medians_ms": medians,
    }


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results beside the targets."""
    print(f"{'':<44}{'p50':>9}  overhead (quartiles over turns)")
    for name, row in sorted(results["contenders"].items(), key=lambda pair: (pair[1]["base"], pair[1]["p50_ms"])):
        added, target = row["added_ms"], row["target_ms"]
        shown = "" if name == row["base"] else f"+{added['value']:.3f} ms ({added['low']:.3f}–{added['high']:.3f})"
        is_met = target is not None and added["value"] <= target
        verdict = "" if target is None else f"  target ≤ {target} ms: {'met' if is_met else 'NOT met'}"
        print(f"{name:<44}{row['p50_ms']:6.3f} ms  {shown}{verdict}")


if __name__ == "__main__":
    main()
