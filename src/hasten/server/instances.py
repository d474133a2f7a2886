"""How many sessions of a model run beside each other here: measured once, and kept in the cache.

One session with all cores answers a lone request soonest; several with a few cores each often answer more a second,
since not all of a model's work divides among threads.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hasten.backends import Artifact, RunOptions, uniform_batch
from hasten.core.cache import cache_directory
from hasten.core.hardware import library_versions, this_machine, usable_cores
from hasten.core.tensors import Shape
from hasten.predictor import open_session

logger = logging.getLogger("hasten")

# More sessions cost latency and memory: they are worth it for so much more throughput.
_WORTH = 1.15
_MEASURE_S = 0.25


def choose_instances(artifact: Artifact, digest: str, shape: Shape) -> int:
    """As many as answer most, unless fewer answer nearly as much."""
    cores = usable_cores()
    if cores == 1:
        return 1
    file = cache_directory() / "instances" / f"{_key(artifact, digest, shape)}.json"
    known = _recall(file)
    if known is None:
        known = {count: _rate(artifact, count, cores // count, shape) for count in _counts(cores)}
        _keep(file, known)
    chosen = 1
    for count in sorted(known):
        if known[count] > _WORTH * known[chosen]:
            chosen = count
    return chosen


def _counts(cores: int) -> Sequence[int]:
    """1, 2, 4 … as far as each has a core."""
    return [2**power for power in range(cores.bit_length()) if 2**power <= cores]


def _rate(artifact: Artifact, instances: int, threads: int, shape: Shape) -> float:
    """Rows a second of so many sessions at once."""
    sessions = [open_session(artifact, RunOptions(threads)) for _ in range(instances)]
    batch = uniform_batch(shape, artifact.signature)
    runs = [0] * instances

    def run(place: int, until: float) -> None:
        while time.monotonic() < until:
            sessions[place].run(batch)
            runs[place] += 1

    for session in sessions:
        session.run(batch)
    begin = time.monotonic()
    workers = [threading.Thread(target=run, args=(place, begin + _MEASURE_S)) for place in range(instances)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - begin
    for session in sessions:
        session.close()
    return sum(runs) * shape.batch / seconds


def _key(artifact: Artifact, digest: str, shape: Shape) -> str:
    """Another bundle, machine or library may want another number."""
    about = [digest, str(artifact.variant), str(shape), usable_cores(), this_machine().cpu, library_versions()]
    return hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:32]


def _recall(file: Path) -> dict[int, float] | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, float])
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(file: Path, rates: dict[int, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(rates))
    except OSError as error:
        # A container may have nowhere to write: it measures again next time.
        logger.info("how many sessions are best is not kept: %s", error)
