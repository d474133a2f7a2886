"""What a server adds to the time of the work itself: one client, one request of 16 tokens at a time, kept alive.

    python benchmarks/serving/latency.py --model DIR [--bundle DIR] [--peers ENV] [--triton ENV]

DIR of a text classifier as Hugging Face saves it; ENV are virtual environments for the peers, made where they are not
there. All take short turns with the work in process, each over the same graph where it can, so that what is left
between the two is the server. Servers whose turn it is not are stopped (SIGSTOP) until it is: some use the processor
while nobody asks them. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from contenders import Contender, Running, Setting, all_peers, built, hasten, plain_graph, variants
from environments import PEERS, about, peers_python, triton_python
from wire import Wire, by_json

from hasten.bundle import open_bundle
from hasten.core.hardware import usable_cores

HERE = Path(__file__).parent
TOKENS = 16
# Each is one token in most vocabularies.
WORDS = "the film is a good one and we would like to see it again with all of you"
# Requests that are not timed: of a server that was started, that was stopped and goes on, and of a connection.
WARM, AWAKENING, UNTIMED = 100, 20, 5
# What was asked for, in ms.
ASKED = {"hasten, HTTP binary": 0.35, "hasten, JSON": 0.45, "hasten, gRPC": 1.6}
# The work in process, asked for by a byte through a socket.
SOCKET = "a bare socket around it"
OURS, PLAIN, PIPELINE = "in process", "in process, tokenizers and ONNX Runtime", "in process, transformers"


@dataclass(frozen=True, slots=True)
class Turn:
    """Medians, in ms: of a lane's requests, and of the same work in process within the same turn."""

    base: str
    own_ms: float
    base_ms: float


class Lane(Protocol):
    name: str
    # The lane that does the same work in process; itself where that is this one.
    base: str

    def time(self, requests: int) -> list[float]: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a text classifier")
    parser.add_argument("--bundle", type=Path, help="of that model (default: it is built)")
    parser.add_argument("--peers", type=Path, default=Path("peers-env"), help="their virtual environment")
    parser.add_argument("--triton", type=Path, default=Path("triton-env"), help="tritonserver's")
    parser.add_argument("--runs", type=int, default=2, help="with fresh processes")
    parser.add_argument("--turns", type=int, default=10, help="of each contender in a run")
    parser.add_argument("--requests", type=int, default=150, help="a turn")
    parser.add_argument("--only", help="contenders whose name holds this, beside the work in process")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_latency.json")
    args = parser.parse_args()
    pythons = {"hasten": sys.executable, "peers": peers_python(args.peers), "triton": triton_python(args.triton)}
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        folder = Path(work)
        bundle = built(args.model, args.bundle, folder)
        plain = plain_graph(pythons["peers"], args.model, folder)
        setting = Setting(args.model, plain, bundle, pythons["peers"], pythons["triton"])
        turns: dict[str, list[Turn]] = {}
        for _ in range(args.runs):
            for group in groups(setting, args.only or ""):
                for lane, taken in take_turns(setting, group, args.turns, args.requests):
                    turns.setdefault(lane, []).extend(taken)
        results = about(pythons) | {
            "bundle": variants(bundle),
            "text": text_of(bundle, TOKENS),
            "tokens": TOKENS,
            "graph": setting.best_graph()[1],
            "runs": args.runs,
            "turns": args.turns,
            "requests": args.requests,
            "lanes": {name: summary(name, taken) for name, taken in turns.items()},
        }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(results)


def groups(setting: Setting, only: str) -> Iterator[list[Contender]]:
    """Who is there at the same time: all that are quiet while others are asked, and each other by itself."""
    threads = str(usable_cores())
    graph, variant = setting.best_graph()
    ours = hasten(
        setting.bundle, setting.labels, "--variant", variant, "--instances", "1", "--threads", threads, name="hasten"
    )
    peers = [one for one in all_peers(setting, graph, "the same graph") if only in one.name]
    yield [ours, *(one for one in peers if not one.is_restless)]
    for one in peers:
        if one.is_restless:
            yield [ours, one]


def take_turns(
    setting: Setting,
    contenders: Sequence[Contender],
    turns: int,
    requests: int,
    lanes_of: Callable[[Setting, Running], Iterable[Lane]] | None = None,
) -> Iterator[tuple[str, list[Turn]]]:
    with ExitStack() as stack:
        lanes: list[Lane] = []
        servers: dict[str, Running] = {}
        for contender in contenders:
            server = stack.enter_context(Running(contender))
            made = list((lanes_of or _lanes)(setting, server))
            servers |= {lane.name: server for lane in made}
            lanes += made
            server.pause()
        bases = {lane.base for lane in lanes}
        for base in sorted(bases):
            alone = stack.enter_context(in_process(setting, base))
            lanes += [alone, *([_Socket(SOCKET, base, alone.port)] if alone.port is not None else [])]
        for lane in lanes:
            _time(lane, servers.get(lane.name), WARM)
        medians: list[dict[str, float]] = []
        for turn in range(turns):
            # Another one goes first each time.
            order = [lanes[place] for place in np.roll(np.arange(len(lanes)), turn)]
            medians.append({lane.name: _time(lane, servers.get(lane.name), requests) for lane in order})
        for lane in lanes:
            yield lane.name, [Turn(lane.base, each[lane.name], each[lane.base]) for each in medians]


def _time(lane: Lane, server: Running | None, requests: int) -> float:
    """The median in ms, of a lane whose server, if it has one, is stopped before and after."""
    if server is None:
        return float(np.median(lane.time(requests))) * 1e3
    server.resume()
    try:
        lane.time(AWAKENING)
        return float(np.median(lane.time(requests))) * 1e3
    finally:
        server.pause()


def _lanes(setting: Setting, server: Running) -> Iterator[Lane]:
    text, contender = text_of(setting.bundle, TOKENS), server.contender
    if contender.name == "hasten":
        yield Http("hasten, HTTP binary", OURS, server.port, contender.question.request(text))
        yield Http("hasten, JSON", OURS, server.port, by_json().request(text))
        yield _Grpc("hasten, gRPC", OURS, server.grpc_port, setting.bundle.resolve().name, "logits", [1], text)
        return
    base = PIPELINE if "transformers" in contender.name else PLAIN
    yield Http(contender.name, base, server.port, contender.question.request(text))
    if contender.name.startswith("tritonserver"):
        yield _Grpc(f"{contender.name}, gRPC", base, server.grpc_port, "classifier", "scores", [1, 1], text)


def ask_each(port: int, requests: Sequence[bytes]) -> list[float]:
    """The seconds of each; a connection a turn: some servers close those that are idle for seconds."""
    wire, clock, seconds = Wire(port), time.perf_counter, []
    for request in requests:
        begin = clock()
        wire.ask(request)
        seconds.append(clock() - begin)
    wire.close()
    return seconds


@dataclass(slots=True)
class Http:
    name: str
    base: str
    port: int
    request: bytes

    def time(self, requests: int) -> list[float]:
        return ask_each(self.port, [self.request] * (UNTIMED + requests))[UNTIMED:]


class _Grpc:
    """A channel that sends prepared bytes and reads none of what it gets."""

    def __init__(self, name: str, base: str, port: int, model: str, output: str, shape: list[int], text: str) -> None:
        import grpc

        from hasten.server.messages import SERVICE, message

        self.name, self.base = name, base
        data = text.encode()
        self._request = message("ModelInferRequest")(
            model_name=model,
            inputs=[{"name": "text", "datatype": "BYTES", "shape": shape}],
            outputs=[{"name": output}],
            raw_input_contents=[len(data).to_bytes(4, "little") + data],
        ).SerializeToString()
        self._ask = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary(f"/{SERVICE}/ModelInfer")

    def time(self, requests: int) -> list[float]:
        ask, request, clock = self._ask, self._request, time.perf_counter
        seconds = []
        for _ in range(requests):
            begin = clock()
            ask(request)
            seconds.append(clock() - begin)
        return seconds


@dataclass(slots=True)
class _Socket:
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
    # Where a byte asks for the same work.
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
def in_process(setting: Setting, name: str) -> Iterator[_InProcess]:
    text = text_of(setting.bundle, TOKENS)
    graph, variant = setting.best_graph()
    if name == OURS:
        words = [sys.executable, str(HERE / "in_process.py"), str(setting.bundle), variant, str(usable_cores()), text]
    else:
        kind = "pipeline" if name == PIPELINE else "classifier"
        words = [setting.peers, str(PEERS / "in_process.py"), kind, str(setting.model), str(graph), text]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline().split()
    if said[:1] != ["ready"]:
        raise SystemExit(f"{name} did not start")
    yield _InProcess(name, process, int(said[1]) if said[1:] else None)
    process.communicate()


def text_of(bundle: Path, tokens: int) -> str:
    """So many with the special ones."""
    tokenizer = open_bundle(bundle).tokenizer()
    words = WORDS.split()
    for count in range(1, tokens + 1):
        text = " ".join((words * tokens)[:count])
        if int(tokenizer.encode([text]).batch.lengths[0]) == tokens:
            return text
    raise SystemExit(f"no text of {tokens} tokens is known for this tokenizer")


def summary(name: str, turns: Sequence[Turn]) -> dict[str, Any]:
    own = [turn.own_ms for turn in turns]
    low, middle, high = np.percentile([turn.own_ms - turn.base_ms for turn in turns], [25, 50, 75])
    return {
        "base": turns[0].base,
        "p50_ms": float(np.median(own)),
        "added_ms": {"value": float(middle), "low": float(low), "high": float(high)},
        "asked_ms": ASKED.get(name),
        "turn_medians_ms": own,
    }


def report(results: dict[str, Any]) -> None:
    print(f"{'':<44}{'p50':>9}  added (quartiles over turns)")
    for name, row in sorted(results["lanes"].items(), key=lambda pair: (pair[1]["base"], pair[1]["p50_ms"])):
        added, asked = row["added_ms"], row["asked_ms"]
        shown = "" if name == row["base"] else f"+{added['value']:.3f} ms ({added['low']:.3f}–{added['high']:.3f})"
        verdict = "" if asked is None else f"  asked ≤ {asked} ms: {'met' if added['value'] <= asked else 'NOT met'}"
        print(f"{name:<44}{row['p50_ms']:6.3f} ms  {shown}{verdict}")


if __name__ == "__main__":
    main()
