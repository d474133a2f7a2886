"""How many sessions of a model run beside each other here: measured once, and kept in the cache.

One session with all cores answers a lone request soonest; several with a few cores each often answer more a second,
since not all of a model's work divides among threads. On a GPU a second one has a stream of its own: what one prepares
and copies, the other computes meanwhile. That is for sessions that have sizes: ONNX Runtime's record CUDA graphs in a
mode in which nothing else may use the GPU, and disturb each other.
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

from hasten.backends import Artifact, HasSizes, RunOptions, Session, uniform_batch
from hasten.core.cache import cache_directory
from hasten.core.errors import HastenError
from hasten.core.hardware import library_versions, this_machine, usable_cores
from hasten.core.tensors import Batch, Shape
from hasten.core.variant import CPU
from hasten.predictor import open_session

logger = logging.getLogger("hasten")

# More sessions cost latency and memory: they are worth it for so much more throughput.
_WORTH = 1.15
_MEASURE_S = 0.25
MOST_INSTANCES = 8
MOST_ON_DEVICE = 2
# Each session may hold the model's weights once more; together they take no more of the memory than this.
_MEMORY_SHARE = 0.25


def choose_instances(artifact: Artifact, bundle: str, shape: Shape) -> int:
    """As many as answer most, unless fewer answer nearly as much."""
    machine, cores = this_machine(), usable_cores()
    if artifact.variant.device == CPU:
        counts = _counts(cores, artifact.size_bytes, machine.memory_bytes)
    else:
        memory_bytes = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
        counts = _counts(min(cores, MOST_ON_DEVICE), artifact.size_bytes, memory_bytes)
    if len(counts) == 1:
        return 1
    file = cache_directory() / "instances" / f"{_key(artifact, bundle, shape)}.json"
    rates = _recall(file)
    if rates is None:
        rates = _measure(artifact, counts, cores, shape)
        _keep(file, rates)
    return _best(rates)


def _best(rates: dict[int, float]) -> int:
    chosen, *others = sorted(rates)
    for count in others:
        if rates[count] > _WORTH * rates[chosen]:
            chosen = count
    return chosen


def _counts(cores: int, model_bytes: int, memory_bytes: int) -> Sequence[int]:
    """1, 2, 4 … as far as each has a core and all have room."""
    room = max(1, int(_MEMORY_SHARE * memory_bytes) // max(1, model_bytes))
    most = min(cores, room, MOST_INSTANCES)
    return [2**power for power in range(most.bit_length())]


def _measure(artifact: Artifact, counts: Sequence[int], cores: int, shape: Shape) -> dict[int, float]:
    """Until more of them answer less, fail, or are not to be."""
    batch = uniform_batch(shape, artifact.signature)
    rates: dict[int, float] = {}
    for count in counts:
        try:
            with ExitStack() as opened:
                options = RunOptions(cores // count)
                sessions = [opened.enter_context(open_session(artifact, options)) for _ in range(count)]
                rates[count] = _rate(sessions, batch)
                may_be_more = artifact.variant.device == CPU or isinstance(sessions[0], HasSizes)
        except HastenError as error:
            if not rates:
                raise
            logger.warning("%d sessions of %s do not run beside each other: %s", count, artifact.variant, error)
            break
        if rates[count] < max(rates.values()) or not may_be_more:
            break
    return rates


def _rate(sessions: Sequence[Session], batch: Batch) -> float:
    """Rows a second of all of them at once."""

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


def _key(artifact: Artifact, bundle: str, shape: Shape) -> str:
    """Another bundle, machine or library may want another number."""
    machine = this_machine()
    about = [bundle, str(artifact.variant), str(shape), usable_cores(), machine.cpu, machine.gpus, library_versions()]
    return hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:32]


def _recall(file: Path) -> dict[int, float] | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[int, float]) or None
    except (OSError, msgspec.MsgspecError):
        return None


def _keep(file: Path, rates: dict[int, float]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(rates))
    except OSError as error:
        # A container may have nowhere to write: it measures again next time.
        logger.info("how many sessions are best is not kept: %s", error)
