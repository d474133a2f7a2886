"""The parent of a server with several processes: it starts, watches, reloads and drains them, and serves nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hasten.core.errors import HastenError, PlanError, StageError
from hasten.server.credentials import Credentials
from hasten.server.frontend import Addresses, choose_grpc_port, warn_if_open
from hasten.server.http.acceptor import bracketed, listen, reserve
from hasten.server.models.registry import Registry
from hasten.server.models.reload import ReloadWatcher
from hasten.server.processes.child import ChildProcess
from hasten.server.processes.control import (
    ChangeModel,
    Configure,
    Done,
    Drain,
    MetricsText,
    ReadMetrics,
    ReloadCredentials,
    Reply,
    Request,
    SetHealth,
    encode_settings,
)
from hasten.server.processes.fleet import Fleet, FleetModel
from hasten.server.processes.merged_metrics import MergedMetrics
from hasten.server.processes.shared_counters import SharedCounters
from hasten.server.processes.supervised import SupervisedChild
from hasten.server.settings import Settings
from hasten.server.startup import EXIT_FAULT, FAULT_LINGER_S, bundle_paths, unload_timeout_s, warn_about_variables

logger = logging.getLogger("hasten")

Result = TypeVar("Result")

_WORKER, _ENGINE = "hasten.server.processes.api_worker", "hasten.server.processes.engine_main"
# Time for a process to answer with its metrics; then its latest ones count.
_METRICS_S = 2.0
# Time for a process to report that it has drained, beyond the time in which it drains.
_REPLY_S = 5.0
# Changes of models that may wait at once for replaced and unloaded ones to drain.
_CONTROL_THREADS = 4
# How often processes that start are checked for errors.
_START_CHECK_S = 0.05
# Time for processes to end after the server has drained.
_EXIT_S = 5.0


class Supervisor:
    """A server of API workers and engine processes. Used on the event loop of the parent."""

    def __init__(self, settings: Settings, workers: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._credentials = Credentials(settings)
        self._sockets: list[socket.socket] = []
        self._grpc: socket.socket | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="hasten-"))
        self._counters = SharedCounters(workers)
        self._metrics = MergedMetrics()
        # What the workers report.
        self._health = SetHealth(is_alive=True, is_ready=False)
        self._changed, self._stopping = asyncio.Event(), asyncio.Event()
        self._is_loaded = False
        self._changes = 0
        self._threads = ThreadPoolExecutor(_CONTROL_THREADS, "control")
        self._tasks: set[asyncio.Task[None]] = set()
        max_silence_s = max(settings.stall_timeout, 1.0)
        self._engines = [
            SupervisedChild(
                f"engine process {index}",
                partial(ChildProcess.start, _ENGINE, self._handle),
                partial(self._take_up_engine, index),
                self._changed.set,
                max_silence_s=max_silence_s,
            )
            for index in range(settings.engines)
        ]
        self._workers = [
            SupervisedChild(
                f"API worker {index}",
                partial(self._start_worker, index),
                partial(self._take_up_worker, index),
                self._changed.set,
                max_silence_s=max_silence_s,
            )
            for index in range(workers)
        ]
        self._fleet = Fleet(self._engines, self._workers)
        self._models = Registry[FleetModel](self._fleet.open, unload_timeout_s(settings))

    @property
    def _children(self) -> list[SupervisedChild]:
        return [*self._engines, *self._workers]

    async def run(self, on_ready: Callable[[Addresses], None]) -> None:
        """Serve until SIGTERM or SIGINT, then answer the open requests and return."""
        try:
            await self._run(on_ready)
        finally:
            for task in self._tasks:
                task.cancel()
            for child in self._children:
                child.kill()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _run(self, on_ready: Callable[[Addresses], None]) -> None:
        settings = self._settings
        self._models.expect(bundle_paths(settings))
        changes = ReloadWatcher(self._models, lambda: bundle_paths(settings))
        warn_if_open(settings, has_keys=bool(self._credentials.keys))
        addresses = self._listen()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        self._loop.add_signal_handler(signal.SIGHUP, lambda: self._start_task(self._reload_all(changes)))
        for index, engine in enumerate(self._engines):
            self._start_task(engine.keep_running(partial(self._metrics.end, f"engine {index}")))
        for index, worker in enumerate(self._workers):
            self._start_task(worker.keep_running(partial(self._forget_worker, index)))
        logger.info("listening on %s; loading models", addresses.http)
        self._start_task(self._report_health())
        await self._load()
        if settings.reload_interval is not None:
            self._start_task(self._reload_every(changes, settings.reload_interval))
        await self._until_ready()
        logger.info("ready")
        on_ready(addresses)
        await self._stopping.wait()
        await self._drain()

    # Starting

    def _listen(self) -> Addresses:
        settings = self._settings
        self._sockets = listen(settings.host, settings.port)
        grpc_port = choose_grpc_port(settings, self._sockets[0].getsockname()[1])
        if grpc_port is not None:
            self._grpc = reserve(settings.host, grpc_port)
            grpc_port = self._grpc.getsockname()[1]
        return Addresses.of(self._sockets, grpc_port, has_tls=self._credentials.tls is not None)

    async def _load(self) -> None:
        """Load all models for the first time; raise the error of a process that cannot start."""
        for process in self._children:
            await self._unless_failed(process.configured.wait())
        for name, path in bundle_paths(self._settings).items():
            await self._unless_failed(asyncio.to_thread(self._models.load, path, name))
        self._is_loaded = True
        self._changed.set()

    async def _until_ready(self) -> None:
        async def wait() -> None:
            while not self._health.is_ready:
                await asyncio.sleep(_START_CHECK_S)

        await self._unless_failed(wait())

    async def _unless_failed(self, work: Coroutine[Any, Any, Any]) -> None:
        """Await a step of the start, or raise the error of a process that cannot start."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait((task,), timeout=_START_CHECK_S)
            if error := next((child.error for child in self._children if child.error is not None), None):
                task.cancel()
                raise error
        task.result()

    async def _take_up_engine(self, index: int) -> None:
        """Configure an engine process that has started, and load all models in it."""
        engine = self._engines[index]
        await engine.call(self._configuration(index), Done)
        engine.configured.set()
        await self._fleet.take_up_engine(engine)

    async def _start_worker(self, index: int) -> ChildProcess:
        files = [*(listener.fileno() for listener in self._sockets), self._counters.file]
        return await ChildProcess.start(_WORKER, self._handle, files)

    async def _take_up_worker(self, index: int) -> None:
        """Configure a worker that has started, which then listens, and open all models in it."""
        worker = self._workers[index]
        await worker.call(self._configuration(index), Done)
        worker.configured.set()
        await self._fleet.take_up_worker(worker)
        await worker.call(self._health, Done)

    def _configuration(self, index: int) -> Configure:
        settings = self._settings
        grpc = "" if self._grpc is None else f"{bracketed(settings.host)}:{self._grpc.getsockname()[1]}"
        return Configure(
            encode_settings(settings),
            index,
            len(self._workers),
            len(self._engines),
            str(self._directory),
            tuple(listener.fileno() for listener in self._sockets),
            self._counters.file,
            grpc,
            {name: str(path) for name, path in self._models.paths.items()},
            tuple(self._models.expected),
        )

    def _forget_worker(self, index: int) -> None:
        self._counters.clear(index)
        self._metrics.end(f"worker {index}")

    # Requests of the workers

    async def _handle(self, request: Request) -> Reply:
        match request:
            case ReadMetrics():
                return MetricsText(await self._read_metrics())
            case ChangeModel(action=action, name=name):
                await self._change(partial(self._change_model, action, name))
                return Done()
        raise StageError(f"the parent does not answer {type(request).__name__}")

    async def _read_metrics(self) -> bytes:
        async def read(process: str, child: SupervisedChild) -> None:
            with suppress(HastenError):
                self._metrics.update(process, (await child.call(ReadMetrics(), MetricsText, _METRICS_S)).text)

        engines = (read(f"engine {index}", engine) for index, engine in enumerate(self._engines))
        workers = (read(f"worker {index}", worker) for index, worker in enumerate(self._workers))
        await asyncio.gather(*engines, *workers)
        return await asyncio.to_thread(self._metrics.render)

    def _change_model(self, action: str, name: str) -> None:
        match action:
            case "load":
                self._models.load_known(name)
            case "refresh":
                self._models.refresh(self._models.known_path(name), name)
            case "unload":
                self._models.unload(name)
            case _:
                raise PlanError(f"unknown action '{action}'")

    # Health

    async def _report_health(self) -> None:
        """Have all workers report the same health, and exit if starting processes again does not help."""
        while True:
            fault = next((child.fault for child in self._children if child.fault is not None), None)
            is_serving = self._is_loaded and not self._stopping.is_set()
            can_serve = is_serving and all(child.can_serve for child in self._children)
            health = SetHealth(is_alive=fault is None, is_ready=can_serve)
            if health != self._health:
                self._health = health
                await self._tell_workers(health)
            if fault is not None:
                logger.critical("%s: exiting with code %d", fault, EXIT_FAULT)
                await asyncio.sleep(FAULT_LINGER_S)
                self._exit(EXIT_FAULT)
            self._changed.clear()
            await self._changed.wait()

    async def _tell_workers(self, request: SetHealth | ReloadCredentials) -> None:
        calls = (worker.call(request, Done, _REPLY_S) for worker in self._workers if worker.is_running)
        await asyncio.gather(*calls, return_exceptions=True)

    # Reloading

    async def _reload_all(self, changes: ReloadWatcher) -> None:
        """Reload bundles, API keys and TLS certificates on SIGHUP."""
        if not self._is_loaded or self._stopping.is_set():
            logger.warning("SIGHUP ignored: the server is starting or stopping")
            return
        self._credentials.reload()
        await self._tell_workers(ReloadCredentials())
        if not await self._reload(changes):
            logger.info("reload: no bundle has changed")

    async def _reload(self, changes: ReloadWatcher) -> int:
        if not self._is_loaded or self._stopping.is_set():
            return 0
        return await self._change(changes.reload)

    async def _change(self, work: Callable[[], Result]) -> Result:
        """Change the models on a thread, which may wait until replaced ones are drained."""
        self._changes += 1
        try:
            return await self._loop.run_in_executor(self._threads, work)
        finally:
            self._changes -= 1

    async def _reload_every(self, changes: ReloadWatcher, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._reload(changes)

    # Stopping

    def _stop(self, number: int) -> None:
        if not self._is_loaded:
            self._exit(0)  # the server has not reported that it is ready
        if self._stopping.is_set():
            self._exit(128 + number)  # a second signal exits at once
        self._stopping.set()

    def _exit(self, code: int) -> NoReturn:
        for child in self._children:
            child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(code)

    async def _drain(self) -> None:
        """Have the workers answer their open requests, then end all processes."""
        logger.info("shutting down: answering open requests")
        for listener in (*self._sockets, self._grpc):
            if listener is not None:
                listener.close()
        drain_s = self._settings.drain_timeout
        for processes, timeout_s in ((self._workers, drain_s), (self._engines, 0.0)):
            for process in processes:
                process.is_stopping = True
            calls = (
                process.call(Drain(timeout_s), Done, timeout_s + _REPLY_S)
                for process in processes
                if process.is_running
            )
            await asyncio.gather(*calls, return_exceptions=True)
            for process in processes:
                process.end()
        until = time.monotonic() + _EXIT_S
        while any(child.is_running for child in self._children) and time.monotonic() < until:
            await asyncio.sleep(0.005)
        if self._changes:
            self._exit(0)  # a thread waits for processes that have ended

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("a background task failed: exiting with code %d", EXIT_FAULT, exc_info=error)
            self._exit(EXIT_FAULT)


async def supervise(settings: Settings, workers: int, on_ready: Callable[[Addresses], None]) -> None:
    """Serve from several processes until SIGTERM or SIGINT, then answer the open requests and return."""
    warn_about_variables()
    await Supervisor(settings, workers).run(on_ready)
