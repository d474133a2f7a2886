"""GPU: how far the times of one and the same graph lie apart, recorded several times and made ready several times each.

    python benchmarks/instances.py [--variant fused-fp16@cuda] [-o FILE]

Every graph is of the same kernels on the same batch. All are there at once, and take turns: what differs among the
instances of one recording is where the driver has put them, and what differs between recordings where their memory lies
too. Of each by the device's clock, and by the host's, synchronised; and of the first one by other ways for the host to
wait, beside the device's clock where nothing is queued ahead.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu import HERE, ROUNDS, RUNS, STUDIES, captured, clocked, prepare, random_batch, rest, timed, write
from hasten.core.tensors import Shape
from hasten.core.variant import Variant
from hasten.kernels.instances import Instance
from origin import needs_gpu, origin, run

MODELS = ("MiniLM-L6", "RoBERTa-base")
SHAPES = (Shape(1, 16), Shape(1, 32), Shape(1, 128))
RECORDINGS, INSTANCES = 3, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="fused-fp16@cuda")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "instances.json")
    args = parser.parse_args()
    variant = Variant.parse(args.variant)
    needs_gpu()
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        with tempfile.TemporaryDirectory(prefix="hasten-") as work:
            _, sessions, _ = prepare(STUDIES[model], [variant], Path(work))
            (session,) = sessions.values()
            with session:
                for shape in SHAPES:
                    rows.append({"model": model, "shape": str(shape), **measured(session, shape)})
                    times = {name: np.round(rows[-1][name], 4) for name in ("device_ms", "alone_ms")}
                    print(model, shape, *times.items(), rows[-1]["waiting_ms"], sep="\n", flush=True)
    write({**origin(), "variant": variant.name, "rows": rows}, args.output)


def measured(session: Any, shape: Shape) -> dict[str, Any]:
    """A row of times for each recording, an instance a column."""
    session.prunes = False
    batch, stream = random_batch([shape.sequence] * shape.batch), session.lane.replay.stream
    graphs = [captured(session, batch) for _ in range(RECORDINGS)]
    asks = [partial(Instance(graph).launch, stream) for graph in graphs for _ in range(INSTANCES)]
    device = alternating({place: partial(clocked, ask, stream) for place, ask in enumerate(asks)})
    host = alternating({place: partial(timed, ask) for place, ask in enumerate(asks)})
    sides = (RECORDINGS, INSTANCES)
    return {
        "device_ms": np.reshape(list(device.values()), sides).tolist(),
        "alone_ms": np.reshape(list(host.values()), sides).tolist(),
        "waiting_ms": alternating(ways_to_wait(asks[0], stream)),
    }


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

    def timed_with(wait: Callable[[], Any]) -> Callable[[], list[float]]:
        def times() -> list[float]:
            taken = []
            for _ in range(RUNS):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                ask()
                wait()
                taken.append((time.perf_counter() - begin) * 1e3)
            return taken

        return times

    def for_event() -> None:
        is_done.record(stream)
        is_done.synchronize()

    def asking_event() -> None:
        is_done.record(stream)
        while not is_done.query():
            pass

    return {
        "device": timed_with(torch.cuda.synchronize),
        "its stream": timed_with(stream.synchronize),
        "an event": timed_with(for_event),
        "an event, asked over and over": timed_with(asking_event),
        "only launched": timed_with(lambda: None),
        "device's clock": partial(clocked, ask, stream, ahead=0),
    }


if __name__ == "__main__":
    run(main)
