"""Where the time of one request goes inside the server: when each step of its way begins, from the client's sending on.

    python benchmarks/serving/timeline.py --model DIR [--bundle DIR] [-o FILE]

DIR of a text classifier as Hugging Face saves it. One client asks again and again on one connection, by the v2
protocol in binary; the same clock is read on both sides. The marks cost some microseconds themselves, so the whole is
a little more than `latency.py` tells. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import atexit
import json
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

HERE = Path(__file__).parent
WARM, REQUESTS, TURNS = 100, 300, 5
_MARKING, FIRST = "marking", "bytes have come"
Marks = list[tuple[str, int]]


def main() -> None:
    from contenders import Running, Setting, built, hasten, variants
    from environments import about
    from latency import TOKENS, text_of
    from wire import Wire

    from hasten.core.hardware import usable_cores

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a text classifier")
    parser.add_argument("--bundle", type=Path, help="of that model (default: it is built)")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_timeline.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        bundle = built(args.model, args.bundle, Path(work))
        setting = Setting(args.model, Path(), bundle, sys.executable, sys.executable)
        variant, kept = setting.best_graph()[1], Path(work, "marks.json")
        plain = hasten(
            bundle, setting.labels, "--variant", variant, "--instances", "1", "--threads", str(usable_cores())
        )
        words = (sys.executable, str(Path(__file__).resolve()), _MARKING, str(kept), *plain.command[3:])
        asked: list[tuple[int, int]] = []
        with Running(replace(plain, command=words)) as server:
            request = plain.question.request(text_of(bundle, TOKENS))
            for _ in range(TURNS):
                wire = Wire(server.port)
                times = [_timed(partial(wire.ask, request)) for _ in range(WARM + REQUESTS)]
                asked += times[WARM:]
                wire.close()
        marks: Marks = [(name, at) for name, at in json.loads(kept.read_text())]
        steps = summary(sorted(marks, key=lambda mark: mark[1]), asked)
    results = about({"hasten": sys.executable}) | {
        "bundle": variants(bundle), "variant": variant, "requests": len(asked), "steps": steps,
    }  # fmt: skip
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    for step in steps:
        print(f"{step['us']:8.0f} µs  {step['step']}")


def _timed(ask: Callable[[], Any]) -> tuple[int, int]:
    begin = time.perf_counter_ns()
    ask()
    return begin, time.perf_counter_ns()


def summary(marks: Marks, asked: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Of each step the median moment, after its client has sent; what is still done for the one before is told so."""
    moments = [at for _, at in marks]
    found: dict[str, list[float]] = {}
    for begin, end in asked:
        is_before = True
        for name, at in marks[bisect(moments, begin) : bisect(moments, end)]:
            is_before = is_before and name != FIRST
            found.setdefault(f"{name} (of the request before)" if is_before else name, []).append((at - begin) / 1e3)
        found.setdefault("the client has its answer", []).append((end - begin) / 1e3)
    # A step that most requests do not have is no step.
    steps = {name: float(np.median(taken)) for name, taken in found.items() if len(taken) > len(asked) / 2}
    return [{"step": name, "us": at} for name, at in sorted(steps.items(), key=lambda step: step[1])]


def marking(kept: str, words: list[str]) -> None:
    """The server itself, with a mark at every step, kept when it ends."""
    from hasten.backends.onnxruntime import session
    from hasten.cli import main as run
    from hasten.server import app, connection, crew, engine, outlet, v2

    marks: Marks = []
    clock = time.perf_counter_ns

    def mark(owner: Any, name: str, before: str, after: str = "") -> None:
        plain = getattr(owner, name)

        def marked(*given: Any, **named: Any) -> Any:
            marks.append((before, clock()))
            found = plain(*given, **named)
            if after:
                marks.append((after, clock()))
            return found

        setattr(owner, name, marked)

    mark(connection.Connection, "data_received", FIRST)
    mark(connection.Connection, "on_message_complete", "it is a request")
    mark(app.App, "__call__", "the application has it")
    mark(v2, "_read", "its JSON is read")
    mark(v2, "start", "its tensors are read")
    mark(crew.Crew, "add", "handed to a worker")
    mark(engine.Engine, "_prepare", "the worker has it", "encoded")
    mark(session.CpuSession, "run", "the model runs", "the model has run")
    mark(engine.Engine, "_finish", "outputs are handed out")
    mark(connection.Connection, "_answered", "the answer is written")
    mark(outlet.Outlet, "send", "the answer is sent", "the answer was sent")
    mark(crew.Crew, "rest", "the worker rests")
    atexit.register(lambda: Path(kept).write_text(json.dumps(marks)))
    sys.argv[1:] = words
    run()


if __name__ == "__main__":
    if sys.argv[1:2] == [_MARKING]:
        marking(sys.argv[2], sys.argv[3:])
    else:
        main()
