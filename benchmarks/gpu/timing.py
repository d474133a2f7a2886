"""Time runs on a GPU: by the wall clock, by CUDA events, by kernel, and without pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

ROUNDS, RUNS = 7, 30
# After a pause the clocks have recovered from the power that the previous variant has drawn.
PAUSE_S = 0.2
# A round of slow runs has as many as fit into half a second, but at least five.
_MAX_ROUND_S, _MIN_RUNS, _WARM_UP_RUNS = 0.5, 5, 2
# After a pause the host and the GPU need a while to reach full speed.
_WARM_UP_S = 0.03
# About 0.2 ms.
_SLEEP_CYCLES = 400_000
_SUSTAINED_S = 2.0
Run = Callable[[], Any]


def is_gpu() -> bool:
    """Return whether there is a GPU; without one everything runs once, to test the benchmark."""
    return torch.cuda.is_available()


def time_alternating(
    runs: Mapping[str, Run], rounds: int = ROUNDS, time_round: Callable[[Run], list[float]] | None = None
) -> dict[str, list[list[float]]]:
    """Return the milliseconds of every run by contender and round; contenders alternate, each after a pause."""
    rounds_ms: dict[str, list[list[float]]] = {name: [] for name in runs}
    for index in range(rounds if is_gpu() else 1):
        # A different contender goes first in each round.
        for name in np.roll(list(runs), -index).tolist():
            pause()
            rounds_ms[name].append((time_round or time_runs)(runs[name]))
    return rounds_ms


def time_runs(run: Run) -> list[float]:
    """Warm up, then return the milliseconds of each run of a round."""
    warm_up_runs, max_runs = (_WARM_UP_RUNS, RUNS) if is_gpu() else (0, 1)
    deadline = time.perf_counter() + (_WARM_UP_S if is_gpu() else 0.0)
    while warm_up_runs > 0 or time.perf_counter() < deadline:
        run()
        synchronize()
        warm_up_runs -= 1
    times: list[float] = []
    deadline = time.perf_counter() + _MAX_ROUND_S
    while len(times) < max_runs and (len(times) < _MIN_RUNS or time.perf_counter() < deadline):
        synchronize()
        times += time_once(run)
    return times


def time_once(run: Run) -> list[float]:
    """Return the milliseconds of a single run, as a round of one."""
    begin = time.perf_counter()
    run()
    synchronize()
    return [(time.perf_counter() - begin) * 1e3]


def time_on_device(run: Run, stream: Any) -> list[float]:
    """Return the milliseconds between CUDA events around the work that `run` queues on a stream.

    The device sleeps for some cycles first, so that the host has queued everything before the work starts.
    """
    times = []
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            begin.record()
            run()
            end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def time_sustained(run: Run) -> dict[str, float | None]:
    """Run without pauses; return time, clock and power of the second half, when the clock has settled."""
    is_over = threading.Event()
    times: list[float] = []
    samples: dict[str, list[float]] = {"clock_hertz": [], "power_watts": []}

    def sample() -> None:
        # PyTorch reads both from NVML, for the GPU that it computes on.
        with suppress(ImportError, RuntimeError):
            while not is_over.wait(0.05):
                samples["clock_hertz"].append(torch.cuda.clock_rate() * 1e6)
                samples["power_watts"].append(torch.cuda.power_draw() / 1e3)

    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.perf_counter()
    while time.perf_counter() - begin < _SUSTAINED_S:
        times += time_once(run)
    is_over.set()
    sampler.join()
    settled = {gauge: values[len(values) // 2 :] for gauge, values in samples.items()}
    medians = {gauge: float(np.median(values)) if values else None for gauge, values in settled.items()}
    return {"ms": float(np.median(times[len(times) // 2 :])), **medians}


def kernels(run: Run, runs: int = RUNS) -> list[dict[str, Any]]:
    """Return launches and times per kernel of one run, the largest total first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            run()
        synchronize()
    times_us: dict[str, list[float]] = {}
    for event in profile.events():
        times_us.setdefault(event.name, []).append(event.device_time)
    rows = [
        {
            "kernel": name,
            "launches": round(len(times) / runs),
            "us": float(np.mean(times)),
            "ms": sum(times) / runs / 1e3,
        }
        for name, times in times_us.items()
        if len(times) >= runs and sum(times)
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def summary(rounds_ms: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median and the 99th percentile of all runs, and the lowest and highest median of a round."""
    times = np.concatenate(rounds_ms)
    medians = [float(np.median(times_of_round)) for times_of_round in rounds_ms]
    return {
        "p50": float(np.median(times)),
        "p99": float(np.percentile(times, 99)),
        "low": min(medians),
        "high": max(medians),
    }


def pause() -> None:
    """Let the clocks recover."""
    if is_gpu():
        time.sleep(PAUSE_S)


def synchronize() -> None:
    """Wait for the GPU."""
    if is_gpu():
        torch.cuda.synchronize()


def used_bytes() -> int:
    """Return the memory in use on the whole GPU, after PyTorch has released its cache."""
    if not is_gpu():
        return 0
    synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
