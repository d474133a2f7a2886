"""The models of a server with several processes: engine processes load them, and API workers open and swap them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hasten.bundle import open_bundle
from hasten.core.errors import HastenError, UnavailableError
from hasten.server.processes.control import ChannelClosedError
from hasten.server.processes.messages import (
    Done,
    LoadModel,
    ModelLoaded,
    ModelVersion,
    PrepareModel,
    RetireModel,
    SwapModel,
    UnloadModel,
)
from hasten.server.processes.shared_counters import MAX_MODELS
from hasten.server.processes.supervised import SupervisedChild
from hasten.server.processes.worker_count import require_encoder

logger = logging.getLogger("hasten")

# Attempts to load a bundle if processes end meanwhile, which it may be the reason for.
_ATTEMPTS = 3
# Time for a worker to answer beyond the time in which it drains.
_REPLY_S = 5.0


class FleetModel:
    """One generation of a model in all processes."""

    def __init__(self, fleet: Fleet, version: ModelVersion, variant: str) -> None:
        self._fleet = fleet
        self.version = version
        self.variant = variant

    @property
    def name(self) -> str:
        return self.version.name

    def close(self, drain_s: float) -> bool:
        """Drain the model in all workers, then unload it. Blocks; for any thread but the loop's."""
        self._fleet.run(self._fleet.retire(self, drain_s))
        return True


class Fleet:
    """Loads and unloads models in all processes. Used on the event loop, except where a method says otherwise."""

    def __init__(self, engines: Sequence[SupervisedChild], workers: Sequence[SupervisedChild]) -> None:
        self._loop = asyncio.get_running_loop()
        self._engines = engines
        self._workers = workers
        # Models change, and processes take up the present ones, one after the other.
        self._change = asyncio.Lock()
        self._generations = itertools.count(1)
        # The models that are served, by name, and all that engines hold: replaced ones are still drained.
        self._served: dict[str, ModelVersion] = {}
        self._held: list[ModelVersion] = []
        self._columns: dict[str, int] = {}

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop and wait for it. For any thread but the loop's."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def open(self, path: Path, name: str, old: FleetModel | None) -> FleetModel:
        """Load a bundle in all processes and serve it instead of the old one, which is still to be closed.

        If any step fails, the old one stays. Blocks; for any thread but the loop's.
        """
        # A link may point elsewhere when a process that was started again opens the bundle.
        bundle = open_bundle(path.resolve())
        require_encoder(bundle)
        version = ModelVersion(name, next(self._generations), str(bundle.path), bundle.manifest.digest)
        model: FleetModel = self.run(self._open(version))
        return model

    async def _open(self, version: ModelVersion) -> FleetModel:
        """Open a model, again if a process ends meanwhile: the bundle is tried once per change of its files."""
        for attempt in range(1, _ATTEMPTS + 1):
            for engine in self._engines:
                await engine.up.wait()
            try:
                async with self._change:
                    return await self._open_once(version)
            except UnavailableError as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s is loaded again: %s", version.name, error)
        raise AssertionError

    async def _open_once(self, version: ModelVersion) -> FleetModel:
        self._held.append(version)
        try:
            await _all(engine.call(LoadModel(version), Done) for engine in self._engines)
            # Others open it once they have started.
            workers = [worker for worker in self._workers if worker.is_up]
            variants = await _all(self._prepare(worker, version) for worker in workers)
        except BaseException:
            await self._remove(version, drain_s=0.0)
            raise
        self._served[version.name] = version
        await _all(_unless_ended(worker.call(SwapModel(version), Done)) for worker in workers)
        return FleetModel(self, version, next(iter(variants), ""))

    async def retire(self, model: FleetModel, drain_s: float) -> None:
        """Drain a model that was replaced or unloaded, then unload it in the engines."""
        async with self._change:
            if self._served.get(model.name) == model.version:
                del self._served[model.name]
        # Without the lock: processes may start again while a model drains.
        await self._remove(model.version, drain_s)

    async def take_up_engine(self, engine: SupervisedChild) -> None:
        """Load all models that are in use in an engine process that has started."""
        async with self._change:
            for version in list(self._held):
                await engine.call(LoadModel(version), Done)
            engine.is_up = True

    async def take_up_worker(self, worker: SupervisedChild) -> None:
        """Open all models that are served in a worker that has started."""
        while True:
            for engine in self._engines:
                await engine.up.wait()
            async with self._change:
                # An engine that has ended again needs the lock to load its models, which the worker would wait for.
                if all(engine.is_up for engine in self._engines):
                    for version in self._served.values():
                        await self._prepare(worker, version)
                        await worker.call(SwapModel(version), Done)
                    worker.is_up = True
                    return

    async def _prepare(self, worker: SupervisedChild, version: ModelVersion) -> str:
        """Open a model in a worker and return its variant."""
        column = self._columns.setdefault(version.name, min(len(self._columns), MAX_MODELS - 1))
        return (await worker.call(PrepareModel(version, column), ModelLoaded)).variant

    async def _remove(self, version: ModelVersion, drain_s: float) -> None:
        for processes, request in (
            (self._workers, RetireModel(version, drain_s)),
            (self._engines, UnloadModel(version)),
        ):
            calls = (process.call(request, Done, drain_s + _REPLY_S) for process in processes if process.is_running)
            for failure in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(failure, HastenError) and not isinstance(failure, ChannelClosedError):
                    logger.error("%s was not removed completely: %s", version.name, failure)
        self._held.remove(version)


async def _all(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all calls, even if some fail, and raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _unless_ended(call: Coroutine[Any, Any, Any]) -> None:
    with suppress(ChannelClosedError):
        await call
