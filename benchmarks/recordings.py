"""GPU: how far the times of one and the same variant lie apart, loaded several times and recorded several times each.

    python benchmarks/recordings.py [--variant fused-fp16@cuda] [-o FILE]

Every graph is of the same kernels on the same batch. All are there at once, and take turns: what differs among those of
one session is where a recording's own memory lies, and what differs between sessions where the weights do. Of each by
the device's clock, and by the host's, synchronised; and of the first one by other ways for the host to wait.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu import HERE, ROUNDS, RUNS, STUDIES, clocked, opened, prepare, random_batch, recorded, rest, timed, write
from hasten.backends import Artifact, Session
from hasten.core.tensors import Shape
from hasten.core.variant import Variant
from origin import origin

MODEL = "MiniLM-L6"
SHAPES = (Shape(1, 16), Shape(1, 128))
SESSIONS, RECORDINGS = 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", type=Variant.parse, default=Variant.parse("fused-fp16@cuda"))
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "recordings.json")
    args = parser.parse_args()
    made: list[Artifact] = []

    def opening(artifact: Artifact) -> Session:
        made.append(artifact)
        return opened(artifact)

    rows = []
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="hasten-") as work:
        _, first, _ = prepare(STUDIES[MODEL], [args.variant], Path(work), opening)
        sessions: list[Any] = [*first.values(), *(opened(made[0]) for _ in range(SESSIONS - 1))]
        for session in sessions:
            stack.enter_context(session)
            session.prunes = False
        for shape in SHAPES:
            batch = random_batch([shape.sequence] * shape.batch)
            streams = [session.lane.replay.stream for session in sessions]
            graphs = {
                (place, turn): (recorded(session, batch), streams[place])
                for place, session in enumerate(sessions)
                for turn in range(RECORDINGS)
            }
            device = alternating({key: partial(clocked, *graph) for key, graph in graphs.items()})
            host = alternating({key: partial(timed, ask) for key, (ask, _) in graphs.items()})
            waits = alternating(ways_to_wait(*graphs[0, 0]))
            rows.append(
                {
                    "shape": str(shape),
                    "device_ms": [[device[place, turn] for turn in range(RECORDINGS)] for place in range(SESSIONS)],
                    "alone_ms": [[host[place, turn] for turn in range(RECORDINGS)] for place in range(SESSIONS)],
                    "waiting_ms": waits,
                }
            )
            print(shape, *(f"{name}: {np.round(rows[-1][name], 4)}" for name in ("device_ms", "alone_ms")), sep="\n")
            print(waits, flush=True)
    write({**origin(), "model": MODEL, "variant": args.variant.name, "rows": rows}, args.output)


def alternating(lanes: Mapping[Any, Callable[[], list[float]]]) -> dict[Any, float]:
    """Medians of rounds in turn."""
    taken: dict[Any, list[float]] = {name: [] for name in lanes}
    for _ in range(ROUNDS):
        rest()
        for name, ask in lanes.items():
            taken[name] += ask()
    return {name: float(np.median(values)) for name, values in taken.items()}


def ways_to_wait(ask: Callable[[], Any], stream: Any) -> dict[str, Callable[[], list[float]]]:
    is_done = torch.cuda.Event()

    def timed_with(wait: Callable[[], Any], on: Any) -> Callable[[], list[float]]:
        def times() -> list[float]:
            taken = []
            with torch.cuda.stream(on):
                for _ in range(RUNS):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    ask()
                    wait()
                    taken.append((time.perf_counter() - begin) * 1e3)
            return taken

        return times

    def for_event() -> None:
        is_done.record()
        is_done.synchronize()

    def asking_event() -> None:
        is_done.record()
        while not is_done.query():
            pass

    usual = torch.cuda.default_stream()
    return {
        "device": timed_with(torch.cuda.synchronize, usual),
        "device, on its own stream": timed_with(torch.cuda.synchronize, stream),
        "its own stream": timed_with(stream.synchronize, stream),
        "an event": timed_with(for_event, stream),
        "an event, asked over and over": timed_with(asking_event, stream),
        "only launched": timed_with(lambda: None, stream),
    }


if __name__ == "__main__":
    main()
