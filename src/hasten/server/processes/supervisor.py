"""The parent of a server with several processes: it loads, watches, reloads and drains them, and serves nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

from hasten.core.errors import PlanError, StageError
from hasten.server.credentials import Credentials
from hasten.server.frontend import Addresses, choose_grpc_port, warn_if_open
from hasten.server.http.acceptor import listen, reserve
from hasten.server.models.reload import ReloadWatcher
from hasten.server.processes.children import Children
from hasten.server.processes.messages import (
    ChangeModel,
    Done,
    MetricsText,
    ReadMetrics,
    ReloadCredentials,
    Reply,
    Request,
    SetHealth,
)
from hasten.server.settings import Settings
from hasten.server.startup import EXIT_FAULT, FAULT_LINGER_S, bundle_paths, warn_about_variables

logger = logging.getLogger("hasten")

Result = TypeVar("Result")

# Changes of models that may wait at once for replaced and unloaded ones to drain.
_CONTROL_THREADS = 4
# How often processes that start are checked for errors.
_START_CHECK_S = 0.05


class Supervisor:
    """A server of several processes. Used on the event loop of the parent."""

    def __init__(self, settings: Settings, workers: int) -> None:
        """Listen, without starting a process."""
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._credentials = Credentials(settings)
        warn_if_open(settings, has_keys=bool(self._credentials.keys))
        self._sockets = listen(settings.host, settings.port)
        grpc_port = choose_grpc_port(settings, self._sockets[0].getsockname()[1])
        if grpc_port is not None:
            self._sockets_to_close = [*self._sockets, reserve(settings.host, grpc_port)]
            grpc_port = self._sockets_to_close[-1].getsockname()[1]
        else:
            self._sockets_to_close = self._sockets
        self._addresses = Addresses.of(self._sockets, grpc_port, has_tls=self._credentials.tls is not None)
        self._changed, self._stopping = asyncio.Event(), asyncio.Event()
        self._children = Children(settings, workers, self._sockets, grpc_port, self._handle, self._changed.set)
        self._models = self._children.models
        self._models.expect(bundle_paths(settings))
        self._is_loaded = False
        self._changes = 0
        self._threads = ThreadPoolExecutor(_CONTROL_THREADS, "control")
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, on_ready: Callable[[Addresses], None]) -> None:
        """Serve until SIGTERM or SIGINT, then answer the open requests and return."""
        settings = self._settings
        changes = ReloadWatcher(self._models, lambda: bundle_paths(settings))
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        self._loop.add_signal_handler(signal.SIGHUP, lambda: self._start_task(self._reload_all(changes)))
        try:
            for work in (*self._children.keep_running(), self._report_health()):
                self._start_task(work)
            logger.info("listening on %s; loading models", self._addresses.http)
            await self._load()
            if settings.reload_interval is not None:
                self._start_task(self._reload_every(changes, settings.reload_interval))
            logger.info("ready")
            on_ready(self._addresses)
            await self._stopping.wait()
            await self._drain()
        finally:
            for task in self._tasks:
                task.cancel()
            self._children.kill()

    # Starting

    async def _load(self) -> None:
        """Load all models for the first time; raise the error of a process that cannot start."""
        for child in self._children.all:
            await self._unless_failed(child.configured.wait())
        for name, path in bundle_paths(self._settings).items():
            await self._unless_failed(asyncio.to_thread(self._models.load, path, name))
        self._is_loaded = True
        self._changed.set()
        while not self._children.health.is_ready and not self._stopping.is_set():
            await asyncio.sleep(_START_CHECK_S)

    async def _unless_failed(self, work: Coroutine[Any, Any, Any]) -> None:
        """Await a step of the start, or raise the error of a process that cannot start."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait((task,), timeout=_START_CHECK_S)
            if error := next((child.error for child in self._children.all if child.error is not None), None):
                task.cancel()
                raise error
        task.result()

    # Requests of the workers

    async def _handle(self, request: Request) -> Reply:
        match request:
            case ReadMetrics():
                return MetricsText(await self._children.read_metrics())
            case ChangeModel(action=action, name=name):
                await self._change(partial(self._change_model, action, name))
                return Done()
        raise StageError(f"the parent does not answer {type(request).__name__}")

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
        children = self._children
        while True:
            self._changed.clear()
            fault = next((child.fault for child in children.all if child.fault is not None), None)
            is_serving = self._is_loaded and not self._stopping.is_set()
            can_serve = is_serving and all(child.can_serve for child in children.all)
            health = SetHealth(is_alive=fault is None, is_ready=can_serve)
            if health != children.health:
                children.health = health
                await children.tell_workers(health)
            if fault is not None:
                logger.critical("%s: exiting with code %d", fault, EXIT_FAULT)
                await asyncio.sleep(FAULT_LINGER_S)
                self._exit(EXIT_FAULT)
            await self._changed.wait()

    # Reloading

    async def _reload_all(self, changes: ReloadWatcher) -> None:
        """Reload bundles, API keys and TLS certificates on SIGHUP."""
        if not self._is_loaded or self._stopping.is_set():
            logger.warning("SIGHUP ignored: the server is starting or stopping")
            return
        await self._children.tell_workers(ReloadCredentials())
        self._credentials.reload()  # logs what the workers have done, too
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
        self._changed.set()

    def _exit(self, code: int) -> NoReturn:
        self._children.kill()
        os._exit(code)

    async def _drain(self) -> None:
        logger.info("shutting down: answering open requests")
        for listener in self._sockets_to_close:
            listener.close()
        await self._children.drain(self._settings.drain_timeout)
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
