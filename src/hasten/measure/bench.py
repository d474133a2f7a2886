"""Contenders take turns, round after round, each in its own process, so that noise hits all alike."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np

from hasten.backends import Artifact
from hasten.core.errors import StageError
from hasten.core.hardware import available_memory_bytes, busy_cpu_seconds
from hasten.core.progress import Progress, step
from hasten.core.report import Bench, Footprint, Timing
from hasten.core.statistics import median_ratio
from hasten.core.tensors import Batch, Shape, tiled
from hasten.measure.lane import Opened, Opening, Rows, Times, Turn

# A percentile is printed only where the samples carry it.
P99_SAMPLES = 100
# A turn is at least this long, so that a switch between processes is a small part of it …
_TURN_S = 0.2
_MOST_PER_TURN = 100
# … and each contender first lets its predecessor's threads stop spinning, and wakes up its own caches.
_SETTLE_S = 0.01
_WARM_RUNS = 2
_ENOUGH_ROUNDS = 200
_LEAST_ROUNDS = 2
# Where only the fastest matter, who is this much slower than the fastest after a few short rounds takes no more turns.
_HOPELESS = 1.5
_ROUNDS_TO_TELL = 3
_SHORT = 0.25
# What a process takes beside its weights, for libraries and activations, and how often it holds those: as they are
# read, and as its kernels want them.
_PROCESS_BYTES = 3 * 2**27
_COPIES = 2
# Above this others disturb the measurement; a machine's own daemons use less.
BUSY_SHARE = 0.1

_LANE = (sys.executable, "-m", "hasten.measure.lane")

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
) -> Bench:
    """Time contenders at every shape; the first contender is the baseline, the first shape gets half the time.

    With `finalists`, only the baseline and that many of the fastest go on to the other shapes, and at the first shape
    whoever is hopelessly slow stops early. `rows` are real token rows, tiled to each shape. The budget counts the
    timing, not the start of the processes; a shape that does not fit into it still gets its least number of rounds.
    `commands` start other lane programs for some contenders. Where memory does not hold the processes of all at once,
    they run in heats, the baseline in each, and the finalists meet once more at the first shape.
    """
    race = partial(_race, rows=rows, threads=threads, commands=commands or {}, progress=progress)
    heats = _heats(contenders)
    if len(heats) == 1:
        return race(contenders, shapes, budget_s=budget_s, finalists=finalists)
    if finalists is None:
        return _together([race(heat, shapes, budget_s=budget_s / len(heats)) for heat in heats], shapes)
    ran = [race(heat, shapes[:1], budget_s=budget_s / 2 / len(heats), finalists=finalists) for heat in heats]
    speeds = {timing.variant: timing.speedup.value for heat in ran for timing in heat.timings}
    others = sorted(contenders[1:], key=lambda artifact: -speeds[artifact.variant.name])
    final = _heats([contenders[0], *others[:finalists]])[0]
    return _together([race(final, shapes, budget_s=budget_s / 2), *ran], shapes)


def _heats(contenders: Sequence[Artifact]) -> list[list[Artifact]]:
    """As many at a time as memory holds, and one beside the baseline in any case."""
    baseline, *others = contenders
    left = available_memory_bytes()
    if left is None or sum(map(_memory_bytes, contenders)) <= left or not others:
        return [list(contenders)]
    heats: list[list[Artifact]] = []
    for artifact in others:
        if not heats or sum(map(_memory_bytes, [*heats[-1], artifact])) > left:
            heats.append([baseline])
        heats[-1].append(artifact)
    return heats


def _memory_bytes(artifact: Artifact) -> int:
    return _PROCESS_BYTES + _COPIES * artifact.size_bytes


def _together(heats: Sequence[Bench], shapes: Sequence[Shape]) -> Bench:
    """One of several; what was measured twice counts as in the first."""
    timings = {(timing.variant, timing.shape): timing for heat in reversed(heats) for timing in heat.timings}
    footprints = {footprint.variant: footprint for heat in reversed(heats) for footprint in heat.footprints}
    names = dict.fromkeys(timing.variant for heat in heats for timing in heat.timings)
    return Bench(
        heats[0].baseline,
        tuple(timings[name, shape] for shape in shapes for name in names if (name, shape) in timings),
        tuple(footprints[name] for name in names),
        max((heat.others_share for heat in heats if heat.others_share is not None), default=None),
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
) -> Bench:
    with ExitStack() as stack:
        with step(progress, "start benchmark processes", total=len(contenders)):
            lanes = []
            for artifact in contenders:
                command = commands.get(artifact.variant.name, _LANE)
                lanes.append(stack.enter_context(Lane(artifact, threads, command)))
                progress.advance(note=artifact.variant.name)
        racing = lanes
        timings: list[Timing] = []
        footprints: tuple[Footprint, ...] = ()
        watch = _Watch(lanes)
        with step(progress, "benchmark", total=budget_s):
            for place, shape in enumerate(shapes):
                share = 1.0 if len(shapes) == 1 else 0.5 if place == 0 else 0.5 / (len(shapes) - 1)
                batch = tiled(rows, np.full(shape.batch, shape.sequence), contenders[0].signature.mask_id)
                is_heat = place == 0 and finalists is not None
                timings += _time_shape(racing, shape, batch, budget_s * share, progress, is_heat=is_heat)
                if place == 0:
                    # Taken here, where all have run the same shapes: memory grows with the largest batch seen.
                    footprints = tuple(lane.footprint() for lane in lanes)
                    racing = lanes if finalists is None else _finalists(lanes, timings, finalists)
        others_share = watch.others_share()
    return Bench(contenders[0].variant.name, tuple(timings), footprints, others_share)


class _Watch:
    """How busy others keep the machine: a core taken from one contender makes every ratio wrong, round after round."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._begin = (busy_cpu_seconds(), self._ours(), time.perf_counter())

    def others_share(self) -> float | None:
        busy, (before, ours, begin) = busy_cpu_seconds(), self._begin
        if busy is None or before is None:
            return None
        others = (busy - before) - (self._ours() - ours)
        return max(0.0, others / ((time.perf_counter() - begin) * (os.cpu_count() or 1)))

    def _ours(self) -> float:
        return time.process_time() + sum(lane.cpu_s for lane in self._lanes)


def _finalists(lanes: list[Lane], timings: list[Timing], count: int) -> list[Lane]:
    speeds = {timing.variant: timing.p50_ms for timing in timings}
    others = sorted(lanes[1:], key=lambda lane: speeds[lane.artifact.variant.name])
    return [lanes[0], *others[:count]]


def _time_shape(
    lanes: list[Lane], shape: Shape, batch: Batch, budget_s: float, progress: Progress, *, is_heat: bool
) -> list[Timing]:
    begin = time.perf_counter()
    for lane in lanes:
        lane.send(shape, batch)
    elapsed = time.perf_counter() - begin
    progress.advance(elapsed, note=str(shape))
    samples: list[list[float]] = [[] for _ in lanes]
    medians: list[list[float]] = [[] for _ in lanes]
    rounds = 0
    racing = list(range(len(lanes)))
    order = np.random.default_rng(0)
    while rounds < _ENOUGH_ROUNDS:
        turn_start = time.perf_counter()
        # In another order each round: whoever follows a contender whose threads still spin pays for it.
        for place in order.permutation(racing):
            is_short = is_heat and rounds < _ROUNDS_TO_TELL
            times = lanes[place].turn(shape, _SHORT if is_short else 1.0)
            samples[place] += times
            medians[place].append(float(np.median(times)))
        rounds += 1
        took = time.perf_counter() - turn_start
        progress.advance(took, note=f"{shape}, round {rounds}")
        if rounds >= _LEAST_ROUNDS and time.perf_counter() - begin + took > budget_s:
            break
        if is_heat and rounds == _ROUNDS_TO_TELL:
            fastest = min(np.median(times) for times in medians)
            racing = [place for place in racing if place == 0 or np.median(medians[place]) < _HOPELESS * fastest]
    baseline = np.asarray(medians[0])
    result = []
    for lane, taken, middle in zip(lanes, samples, medians, strict=True):
        p50, p90, p99 = np.percentile(taken, (50, 90, 99))
        result.append(
            Timing(
                variant=lane.artifact.variant.name,
                shape=shape,
                samples=len(taken),
                p50_ms=float(p50),
                p90_ms=float(p90),
                p99_ms=float(p99) if len(taken) >= P99_SAMPLES else None,
                sentences_per_s=shape.batch * 1e3 / float(p50),
                speedup=median_ratio(baseline[: len(middle)], np.asarray(middle)),
                round_medians_ms=tuple(round(value, 4) for value in middle),
            )
        )
    return result


class Lane:
    """The near end of a contender's process."""

    def __init__(self, artifact: Artifact, threads: int | None, command: Sequence[str]) -> None:
        self.artifact = artifact
        self._command = command
        self._threads = threads
        self._peak = 0
        self._gpu_memory_bytes: int | None = None
        self.cpu_s = 0.0
        self._counts: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        # Its own session: Ctrl-C reaches this process, which then ends the lane.
        self._process = subprocess.Popen(
            list(self._command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        artifact = self.artifact
        opening = Opening(
            artifact.variant,
            artifact.signature,
            str(artifact.directory),
            dict(artifact.graphs),
            self._threads,
        )
        try:
            self._load_ms = self._ask(opening, Opened).load_ms
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def send(self, shape: Shape, batch: Batch) -> None:
        """Hand over a batch, warm up on it, and find how many runs make a turn."""
        rows = Rows({name: column.tolist() for name, column in batch.values.items()}, batch.lengths.tolist())
        once = self._run(Turn(str(shape), warm=0, count=1, rows=rows))[0] / 1e3
        # The first runs of a shape compile for it, and record: taken for the usual time, they would make turns of one
        # cold run.
        while (again := self._run(Turn(str(shape), warm=0, count=1))[0] / 1e3) < once / 2:
            once = again
        once = min(once, again)
        self._counts[str(shape)] = max(1, min(_MOST_PER_TURN, round(_TURN_S / once)))

    def turn(self, shape: Shape, share: float = 1.0) -> list[float]:
        time.sleep(_SETTLE_S)
        count = max(1, round(share * self._counts[str(shape)]))
        # A slow shape needs no second warm run: what it warms lasts a small part of the first.
        return self._run(Turn(str(shape), warm=_WARM_RUNS if count > 1 else 0, count=count))

    def footprint(self) -> Footprint:
        artifact = self.artifact
        return Footprint(artifact.variant.name, self._load_ms, self._peak, artifact.size_bytes, self._gpu_memory_bytes)

    def _run(self, turn: Turn) -> list[float]:
        times = self._ask(turn, Times)
        if times.error is not None:
            raise StageError(f"{self.artifact.variant} failed in the benchmark at {turn.shape}: {times.error}")
        self._peak = times.peak_memory_bytes
        self._gpu_memory_bytes = times.gpu_memory_bytes
        self.cpu_s = times.cpu_s
        return times.ms

    def _ask(self, message: object, kind: type[Message]) -> Message:
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
            raise StageError(f"the benchmark of {self.artifact.variant} stopped (exit {code}): {self._last_words()}")
        return msgspec.json.decode(line, type=kind)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()
