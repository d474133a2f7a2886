"""Choose how many sessions of a model to run in parallel; on CPUs, measure it and cache the result.

One session with all cores has the lowest latency for a lone request; several with a few cores each often have a higher
throughput, since not all of a model's work divides among threads. On a GPU a second session has its own stream, so one
prepares and copies while the other computes; measuring that would delay every first start by seconds. It is limited to
sessions with buckets: ONNX Runtime's capture CUDA graphs in a mode in which nothing else may use the GPU, so they
disturb each other.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hasten.backends import Artifact, RunOptions, Session, SupportsBuckets, uniform_batch
from hasten.core.errors import HastenError
from hasten.core.system.cache import cache_directory
from hasten.core.system.hardware import library_versions, this_machine, usable_cores
from hasten.core.tensors import Batch, Shape
from hasten.predictor import open_session

logger = logging.getLogger("hasten")

# More sessions cost latency and memory: they must raise the throughput by this factor.
_MIN_GAIN = 1.15
_MEASURE_S = 0.25
MAX_INSTANCES = 8
MAX_ON_DEVICE = 2
# Each session may hold its own copy of the weights; together they use at most this share of the memory.
_MAX_MEMORY_SHARE = 0.25


def choose_instances(artifact: Artifact, bundle: str, shape: Shape, max_memory: int | None = None) -> int:
    """Return the number of sessions on a CPU with the highest throughput, or fewer if they reach nearly as much."""
    machine, cores = this_machine(), usable_cores()
    counts = _counts(cores, artifact.size_bytes, min(machine.memory_bytes, max_memory or machine.memory_bytes))
    if len(counts) == 1:
        return 1
    # All that the best number depends on.
    inputs = [bundle, str(artifact.variant), str(shape), counts, cores, max_memory]
    inputs += [machine.cpu, library_versions()]
    key = hashlib.sha256(msgspec.json.encode(inputs)).hexdigest()[:32]
    file = cache_directory() / "instances" / f"{key}.json"
    rates = _read_cache(file)
    if rates is None:
        rates = _measure(artifact, counts, cores, shape, max_memory)
        _write_cache(file, rates)
    return _best(rates)


def count_on_gpu(artifact: Artifact, first: Session) -> int:
    """Return the number of sessions on a GPU, of which the first is open."""
    if not isinstance(first, SupportsBuckets):
        return 1
    memory_bytes = min((gpu.memory_bytes for gpu in this_machine().gpus), default=0)
    return _counts(min(usable_cores(), MAX_ON_DEVICE), artifact.size_bytes, memory_bytes)[-1]


def _best(rates: dict[int, float]) -> int:
    chosen, *others = sorted(rates)
    for count in others:
        if rates[count] > _MIN_GAIN * rates[chosen]:
            chosen = count
    return chosen


def _counts(cores: int, model_bytes: int, memory_bytes: int) -> Sequence[int]:
    """Return 1, 2, 4 … up to the number of cores and of copies that fit into the memory."""
    room = max(1, int(_MAX_MEMORY_SHARE * memory_bytes) // max(1, model_bytes))
    limit = min(cores, room, MAX_INSTANCES)
    return [2**power for power in range(limit.bit_length())]


def _measure(
    artifact: Artifact, counts: Sequence[int], cores: int, shape: Shape, max_memory: int | None
) -> dict[int, float]:
    """Return rows per second by number of sessions, until more are slower, fail or are not allowed."""
    batch = uniform_batch(shape, artifact.signature)
    rates: dict[int, float] = {}
    for count in counts:
        try:
            with ExitStack() as opened:
                options = RunOptions(cores // count, max_memory)
                sessions = [opened.enter_context(open_session(artifact, options)) for _ in range(count)]
                rates[count] = _rate(sessions, batch)
        except HastenError as error:
            if not rates:
                raise
            logger.warning("%d sessions of %s cannot run in parallel: %s", count, artifact.variant, error)
            break
        if rates[count] < max(rates.values()):
            break
    return rates


def _rate(sessions: Sequence[Session], batch: Batch) -> float:
    """Return the rows per second of all sessions together."""

    def run(session: Session) -> int:
        runs = 0
        while time.monotonic() < begin + _MEASURE_S:
            session.run(batch)
            runs += 1
        return runs

    with ThreadPoolExecutor(len(sessions)) as pool:
        for session in sessions:
            session.run(batch)
        begin = time.monotonic()
        runs = sum(pool.map(run, sessions))
        return runs * len(batch) / (time.monotonic() - begin)


def _read_cache(file: Path) -> dict[int, float] | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, float]) or None
    except (OSError, msgspec.MsgspecError):
        return None


def _write_cache(file: Path, rates: dict[int, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(rates))
    except OSError as error:
        # A container may have no writable cache: it measures again at the next start.
        logger.info("the measured number of sessions is not cached: %s", error)
