"""Record the timeline of a request inside the server: when each step begins after the client has sent it.

    python benchmarks/serving/timeline.py --model DIR [--bundle DIR] [-o FILE]

DIR of a text classifier as Hugging Face saves it. One client repeats a request on one connection, with binary tensors
of the Open Inference Protocol; both sides read the same clock. Recording takes some microseconds, so the total is
slightly above that of `latency.py`. Nothing else may run on the machine meanwhile.
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
WARM_UP, REQUESTS, TURNS = 100, 300, 5
_SERVE, FIRST_STEP = "serve-traced", "bytes have come"
# Steps with their times in nanoseconds.
Trace = list[tuple[str, int]]


def main() -> None:
    """Run the study and write its result file."""
    from contenders import RunningServer, ServedModel, build_unless_given, hasten_server, variant_names
    from environments import provenance_with_versions
    from http_requests import KeepAliveConnection
    from latency import TOKENS, text_of_length

    from hasten.core.system.hardware import usable_cores

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a text classifier")
    parser.add_argument("--bundle", type=Path, help="bundle of the model (default: build one)")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_timeline.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        bundle = build_unless_given(args.model, args.bundle, Path(work))
        model = ServedModel(args.model, Path(), bundle, sys.executable, sys.executable)
        variant, trace_file = model.best_graph()[1], Path(work, "trace.json")
        server_without_trace = hasten_server(
            bundle, model.labels, "--variant", variant, "--instances", "1", "--threads", str(usable_cores())
        )
        command = (
            *(sys.executable, str(Path(__file__).resolve()), _SERVE, str(trace_file)),
            *server_without_trace.command[3:],
        )
        requests: list[tuple[int, int]] = []
        with RunningServer(replace(server_without_trace, command=command)) as server:
            request = server_without_trace.format.request(text_of_length(bundle, TOKENS))
            for _ in range(TURNS):
                connection = KeepAliveConnection(server.port)
                times = [_time(partial(connection.send, request)) for _ in range(WARM_UP + REQUESTS)]
                requests += times[WARM_UP:]
                connection.close()
        trace: Trace = [(name, at) for name, at in json.loads(trace_file.read_text())]
        steps = summary(sorted(trace, key=lambda step: step[1]), requests)
    results = provenance_with_versions({"hasten": sys.executable}) | {
        "bundle": variant_names(bundle), "variant": variant, "requests": len(requests), "steps": steps,
    }  # fmt: skip
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    for step in steps:
        print(f"{step['us']:8.0f} µs  {step['step']}")


def _time(send: Callable[[], Any]) -> tuple[int, int]:
    begin = time.perf_counter_ns()
    send()
    return begin, time.perf_counter_ns()


def summary(trace: Trace, requests: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the median time of each step after the request was sent; steps of the previous request are labelled."""
    moments = [at for _, at in trace]
    by_step: dict[str, list[float]] = {}
    for begin, end in requests:
        is_previous = True
        for name, at in trace[bisect(moments, begin) : bisect(moments, end)]:
            is_previous = is_previous and name != FIRST_STEP
            step = f"{name} (of the request before)" if is_previous else name
            by_step.setdefault(step, []).append((at - begin) / 1e3)
        by_step.setdefault("the client has its answer", []).append((end - begin) / 1e3)
    # Steps that fewer than half of the requests have are left out.
    steps = {name: float(np.median(times)) for name, times in by_step.items() if len(times) > len(requests) / 2}
    return [{"step": name, "us": at} for name, at in sorted(steps.items(), key=lambda step: step[1])]


def serve_traced(trace_file: str, arguments: list[str]) -> None:
    """Run the server with every step recorded; write the trace when it ends."""
    from hasten.backends.onnxruntime import session
    from hasten.cli import main as run
    from hasten.server import app
    from hasten.server.http import connection, socket_writer
    from hasten.server.protocols import oip, oip_http
    from hasten.server.scheduling import encoder_engine, worker_pool

    trace: Trace = []
    clock = time.perf_counter_ns

    def record(owner: Any, name: str, before: str, after: str = "") -> None:
        original = getattr(owner, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            trace.append((before, clock()))
            result = original(*args, **kwargs)
            if after:
                trace.append((after, clock()))
            return result

        setattr(owner, name, recorded)

    record(connection.Connection, "data_received", FIRST_STEP)
    record(connection.Connection, "request_received", "it is a request")
    record(app.App, "__call__", "the application has it")
    record(oip_http, "_read", "its JSON is read")
    record(oip, "infer", "its tensors are read")
    record(worker_pool.WorkerPool, "add", "handed to a worker")
    record(encoder_engine.Engine, "_prepare", "the worker has it", "encoded")
    record(session.CpuSession, "run", "the model runs", "the model has run")
    record(encoder_engine.Engine, "_finish", "outputs are handed out")
    record(connection.Connection, "_on_response", "the answer is written")
    record(socket_writer.SocketWriter, "send", "the answer is sent", "the answer was sent")
    record(worker_pool.WorkerPool, "rest", "the worker rests")
    atexit.register(lambda: Path(trace_file).write_text(json.dumps(trace)))
    sys.argv[1:] = arguments
    run()


if __name__ == "__main__":
    if sys.argv[1:2] == [_SERVE]:
        serve_traced(sys.argv[2], sys.argv[3:])
    else:
        main()
