"""Benchmark contenders in alternating rounds, each in its own process, so that noise affects all alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from hasten.backends import Artifact
from hasten.core.errors import StageError
from hasten.core.progress import Progress, step
from hasten.core.report import INTERVAL_ROUNDS, Bench, Footprint, Timing
from hasten.core.system.closing import Closing
from hasten.core.system.hardware import available_memory_bytes, busy_cpu_seconds
from hasten.core.tensors import Batch, Shape, tile_rows
from hasten.measure.bench_worker import OpenRequest, RoundRequest, RoundTimes, RowsRequest, WorkerReady
from hasten.metrics.statistics import median_ratio

# p99 is reported only from this many samples on.
P99_SAMPLES = 100
# A contender runs for at least this long in a round, so that switching processes is a small part of it …
_CONTENDER_S = 0.2
_MAX_RUNS_PER_ROUND = 100
# … and first lets the threads of its predecessor stop spinning, and warms up its own caches.
_SETTLE_S = 0.01
_WARMUP_RUNS = 2
_MAX_ROUNDS = 200
_MIN_ROUNDS = 2
# Runs of a batch before its first round.
_SEND_RUNS = 2
# In a heat, a contender this many times slower than the fastest after a few short rounds is dropped.
_DROP_RATIO = 1.5
_SHORT_ROUNDS = INTERVAL_ROUNDS
_SHORT_SHARE = 0.25
# The part of the budget that is left for timing, however long the processes take to start.
_MIN_TIMING_SHARE = 0.5
# The memory of a process beside its weights, for libraries and activations, and the copies of the weights it holds: as
# they are read, and as its kernels need them.
_PROCESS_BYTES = 3 * 2**27
_WEIGHT_COPIES = 2
# Above this share, other processes disturb the measurement; a machine's own daemons use less.
BUSY_SHARE = 0.1

_WORKER = (sys.executable, "-m", "hasten.measure.bench_worker")

Message = TypeVar("Message")


def bench(
    contenders: Sequence[Artifact],
    shapes: Sequence[Shape],
    rows: Batch,
    *,
    budget_s: float,
    threads: int | None,
    finalists: int | None = None,
    commands: Mapping[str, Sequence[str]] | None = None,
    progress: Progress,
    scales_with_rows: bool = False,
) -> Bench:
    """Time contenders at every shape; the first contender is the baseline, the first shape gets half the time.

    With `finalists`, only the baseline and that many of the fastest contenders go on to the other shapes, and very slow
    ones stop early at the first shape. `rows` are real token rows, tiled to each shape. The budget covers the start of
    the processes, up to half of it. A shape that does not fit into it is timed with fewer rows and extrapolated if
    times scale with the rows (`scales_with_rows`), and otherwise gets the minimum number of rounds. `commands` start
    other worker programs for some contenders. If memory does not hold all processes at once, they run in heats, the
    baseline in each, and the finalists are compared once more at the first shape.
    """
    race = partial(
        _race,
        rows=rows,
        threads=threads,
        commands=commands or {},
        progress=progress,
        scales_with_rows=scales_with_rows,
    )
    heats = _heats(contenders)
    if len(heats) == 1:
        return race(contenders, shapes, budget_s=budget_s, finalists=finalists)
    if finalists is None:
        return _merge([race(heat, shapes, budget_s=budget_s / len(heats)) for heat in heats], shapes)
    results = [race(heat, shapes[:1], budget_s=budget_s / 2 / len(heats), finalists=finalists) for heat in heats]
    speeds = {timing.variant: timing.speedup.value for heat in results for timing in heat.timings}
    others = sorted(contenders[1:], key=lambda artifact: -speeds[artifact.variant.name])
    final = _heats([contenders[0], *others[:finalists]])[0]
    return _merge([race(final, shapes, budget_s=budget_s / 2), *results], shapes)


def _heats(contenders: Sequence[Artifact]) -> list[list[Artifact]]:
    """Group as many contenders as memory holds, and at least one beside the baseline."""
    baseline, *others = contenders
    available = available_memory_bytes()
    if available is None or sum(map(_memory_bytes, contenders)) <= available or not others:
        return [list(contenders)]
    heats: list[list[Artifact]] = []
    for artifact in others:
        if not heats or sum(map(_memory_bytes, [*heats[-1], artifact])) > available:
            heats.append([baseline])
        heats[-1].append(artifact)
    return heats


def _memory_bytes(artifact: Artifact) -> int:
    return _PROCESS_BYTES + _WEIGHT_COPIES * artifact.size_bytes


def _merge(heats: Sequence[Bench], shapes: Sequence[Shape]) -> Bench:
    """Merge the results of heats; of repeated measurements the first counts."""
    timings = {(timing.variant, timing.shape): timing for heat in reversed(heats) for timing in heat.timings}
    footprints = {footprint.variant: footprint for heat in reversed(heats) for footprint in heat.footprints}
    names = dict.fromkeys(timing.variant for heat in heats for timing in heat.timings)
    baseline = heats[0].baseline
    return Bench(
        baseline,
        tuple(
            timings[name, shape].relative_to(timings[baseline, shape].p50_ms)
            for shape in shapes
            for name in names
            if (name, shape) in timings
        ),
        tuple(footprints[name] for name in names),
        max((heat.other_cpu_share for heat in heats if heat.other_cpu_share is not None), default=None),
    )


def _race(
    contenders: Sequence[Artifact],
    shapes: Sequence[Shape],
    *,
    rows: Batch,
    budget_s: float,
    threads: int | None,
    finalists: int | None = None,
    commands: Mapping[str, Sequence[str]],
    progress: Progress,
    scales_with_rows: bool,
) -> Bench:
    def tiled(shape: Shape) -> Batch:
        return tile_rows(rows, np.full(shape.batch, shape.sequence), contenders[0].signature.mask_id)

    begin = time.perf_counter()
    with ExitStack() as stack:
        with step(progress, "start benchmark processes", total=len(contenders)):
            workers = []
            for artifact in contenders:
                command = commands.get(artifact.variant.name, _WORKER)
                workers.append(stack.enter_context(BenchWorker(artifact, threads, command)))
                progress.advance(note=artifact.variant.name)
        active = workers
        timings: list[Timing] = []
        footprints: tuple[Footprint, ...] = ()
        start = _cpu_seconds(workers)
        timing_s = max(_MIN_TIMING_SHARE * budget_s, budget_s - (time.perf_counter() - begin))
        deadline = time.perf_counter() + timing_s
        with step(progress, "benchmark", total=timing_s):
            for index, shape in enumerate(shapes):
                # What one shape takes too long is taken from the others.
                parts = 2 if index == 0 < len(shapes) - 1 else len(shapes) - index
                share_s = max(0.0, deadline - time.perf_counter()) / parts
                is_heat = index == 0 and finalists is not None
                begin = time.perf_counter()
                timed = _affordable(active, shape, tiled, share_s) if scales_with_rows else shape
                share_s -= time.perf_counter() - begin
                timed_here = _time_shape(active, timed, tiled(timed), share_s, progress, is_heat=is_heat)
                timings += timed_here if timed == shape else [timing.extrapolated(shape) for timing in timed_here]
                if index == 0:
                    # Measured here, where all have run the same shapes: memory grows with the largest batch.
                    footprints = tuple(worker.footprint() for worker in workers)
                if is_heat:
                    p50_ms = {timing.variant: timing.p50_ms for timing in timings}
                    others = sorted(workers[1:], key=lambda worker: p50_ms[worker.artifact.variant.name])
                    active = [workers[0], *others[:finalists]]
        return Bench(contenders[0].variant.name, tuple(timings), footprints, _others_share(workers, start))


def _affordable(
    workers: Sequence[BenchWorker], shape: Shape, tiled: Callable[[Shape], Batch], budget_s: float
) -> Shape:
    """Return the shape, with fewer rows if the rounds that an interval takes would not fit into the budget."""
    if shape.batch == 1:
        return shape
    row = Shape(1, shape.sequence)
    # The first run of a shape includes compilation.
    row_s = sum(worker.second_run_s(row, tiled(row)) for worker in workers)
    rows = int(budget_s / (row_s * (_SEND_RUNS + INTERVAL_ROUNDS)))
    return Shape(min(shape.batch, max(1, rows)), shape.sequence)


def _cpu_seconds(workers: Sequence[BenchWorker]) -> tuple[float | None, float, float]:
    """Return the CPU time of all processes and of this benchmark, and the wall time."""
    benchmark_s = time.process_time() + sum(worker.cpu_s for worker in workers)
    return busy_cpu_seconds(), benchmark_s, time.perf_counter()


def _others_share(workers: Sequence[BenchWorker], start: tuple[float | None, float, float]) -> float | None:
    """Return the load of other processes: a core taken from one contender makes every ratio wrong, in every round."""
    (busy_s, benchmark_s, now), (start_busy_s, start_benchmark_s, start_time) = _cpu_seconds(workers), start
    if busy_s is None or start_busy_s is None:
        return None
    others_s = (busy_s - start_busy_s) - (benchmark_s - start_benchmark_s)
    return max(0.0, others_s / ((now - start_time) * (os.cpu_count() or 1)))


def _time_shape(
    workers: list[BenchWorker], shape: Shape, batch: Batch, budget_s: float, progress: Progress, *, is_heat: bool
) -> list[Timing]:
    start = time.perf_counter()
    # Short rounds where long ones would be too few for an interval; warm-up takes about as long as the timed runs.
    contender_s = min(_CONTENDER_S, budget_s / (len(workers) * 2 * (_SEND_RUNS + INTERVAL_ROUNDS)))
    for worker in workers:
        worker.send(shape, batch, contender_s)
    elapsed = time.perf_counter() - start
    progress.advance(elapsed, note=str(shape))
    samples: list[list[float]] = [[] for _ in workers]
    medians: list[list[float]] = [[] for _ in workers]
    rounds = 0
    active = list(range(len(workers)))
    order = np.random.default_rng(0)
    while rounds < _MAX_ROUNDS:
        round_start = time.perf_counter()
        # The order changes each round: a contender that follows one whose threads still spin is slowed down.
        for index in order.permutation(active):
            is_short = is_heat and rounds < _SHORT_ROUNDS
            times = workers[index].run_round(shape, _SHORT_SHARE if is_short else 1.0)
            samples[index] += times
            medians[index].append(float(np.median(times)))
        rounds += 1
        round_s = time.perf_counter() - round_start
        progress.advance(round_s, note=f"{shape}, round {rounds}")
        if rounds >= _MIN_ROUNDS and time.perf_counter() - start + round_s > budget_s:
            break
        if is_heat and rounds == _SHORT_ROUNDS:
            fastest = min(np.median(times) for times in medians)
            active = [index for index in active if index == 0 or np.median(medians[index]) < _DROP_RATIO * fastest]
    baseline = np.asarray(medians[0])
    timings = []
    for worker, times, round_medians in zip(workers, samples, medians, strict=True):
        p50, p90, p99 = np.percentile(times, (50, 90, 99))
        timing = Timing(
            variant=worker.artifact.variant.name,
            shape=shape,
            samples=len(times),
            p50_ms=float(p50),
            p90_ms=float(p90),
            p99_ms=float(p99) if len(times) >= P99_SAMPLES else None,
            rows_per_s=shape.batch * 1e3 / float(p50),
            speedup=median_ratio(baseline[: len(round_medians)], np.asarray(round_medians)),
            round_medians_ms=tuple(round(value, 4) for value in round_medians),
        )
        timings.append(timing.relative_to(float(np.median(baseline))))
    return timings


class BenchWorker(Closing):
    """A contender's worker process, started by the constructor and killed by `close`."""

    def __init__(self, artifact: Artifact, threads: int | None, command: Sequence[str]) -> None:
        self.artifact = artifact
        self.cpu_s = 0.0
        self._peak_memory_bytes = 0
        self._gpu_memory_bytes: int | None = None
        self._runs_per_round: dict[str, int] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 – closed with the worker
        # In its own session: Ctrl-C reaches this process, which then stops the worker.
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        directory, graphs = str(artifact.directory), dict(artifact.graphs)
        request = OpenRequest(artifact.variant, artifact.signature, directory, graphs, threads)
        try:
            self._load_ms = self._request(request, WorkerReady).load_ms
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def second_run_s(self, shape: Shape, batch: Batch) -> float:
        """Send a batch and return the seconds of its second run."""
        self._send(shape, batch)
        return self._run(RoundRequest(str(shape), 0, 1))[0] / 1e3

    def send(self, shape: Shape, batch: Batch, round_s: float = _CONTENDER_S) -> None:
        """Send a batch, warm up on it, and determine how many runs make a round of this time."""
        run_s = self._send(shape, batch)
        # The first runs of a shape include compilation and graph capture: taken as typical, they would make rounds of
        # one cold run.
        while (next_s := self._run(RoundRequest(str(shape), 0, 1))[0] / 1e3) < run_s / 2:
            run_s = next_s
        run_s = min(run_s, next_s)
        self._runs_per_round[str(shape)] = max(1, min(_MAX_RUNS_PER_ROUND, round(round_s / run_s)))

    def _send(self, shape: Shape, batch: Batch) -> float:
        """Send a batch and return the seconds of its first run."""
        rows = RowsRequest({name: column.tolist() for name, column in batch.values.items()}, batch.lengths.tolist())
        return self._run(RoundRequest(str(shape), 0, 1, rows))[0] / 1e3

    def run_round(self, shape: Shape, share: float = 1.0) -> list[float]:
        """Return the times in ms of a round at this shape, or of a share of it."""
        time.sleep(_SETTLE_S)
        runs = max(1, round(share * self._runs_per_round[str(shape)]))
        # A slow shape needs no warm-up: caches are warm after a small part of its first run.
        return self._run(RoundRequest(str(shape), _WARMUP_RUNS if runs > 1 else 0, runs))

    def footprint(self) -> Footprint:
        """Return load time, peak memory and size so far."""
        artifact = self.artifact
        return Footprint(
            artifact.variant.name, self._load_ms, self._peak_memory_bytes, artifact.size_bytes, self._gpu_memory_bytes
        )

    def _run(self, request: RoundRequest) -> list[float]:
        times = self._request(request, RoundTimes)
        if times.error is not None:
            raise StageError(f"{self.artifact.variant} failed in the benchmark at {request.shape}: {times.error}")
        self._peak_memory_bytes = times.peak_memory_bytes
        self._gpu_memory_bytes = times.gpu_memory_bytes
        self.cpu_s = times.cpu_s
        return times.ms

    def _request(self, message: object, reply_type: type[Message]) -> Message:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or ["no error output"]
            raise StageError(f"the benchmark worker of {self.artifact.variant} exited with code {code}: {lines[-1]}")
        return msgspec.json.decode(line, type=reply_type)
