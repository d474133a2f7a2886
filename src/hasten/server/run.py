"""Serve from one process, or start several: event loop, model loading, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hasten.core.system.stage_times import StageTimes, process_age_s
from hasten.server.app import App
from hasten.server.credentials import Credentials
from hasten.server.frontend import (
    Addresses,
    Frontend,
    allow_connections,
    choose_grpc_port,
    require_packages,
    warn_if_open,
)
from hasten.server.http.acceptor import bracketed, listen
from hasten.server.models.reload import ReloadWatcher
from hasten.server.processes.worker_count import count_workers
from hasten.server.settings import Settings
from hasten.server.startup import (
    EXIT_FAULT,
    FAULT_LINGER_S,
    SWITCH_INTERVAL_S,
    bundle_paths,
    http_limits,
    load_models,
    make_app,
    run_periodic_tasks,
)

logger = logging.getLogger("hasten")

_HEALTH_CHECK_S = 0.5


def run(settings: Settings, on_ready: Callable[[Addresses], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT, then answer the open requests and return."""
    times = StageTimes(process_age_s())
    require_packages()
    import uvloop

    times.finish("imports")
    allow_connections()
    if (workers := count_workers(settings)) > 1:
        from hasten.server.processes.supervisor import supervise

        asyncio.run(supervise(settings, workers, on_ready))
        return
    app = make_app(settings)
    warn_if_open(settings, has_keys=bool(app.keys))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_Process(app, settings, times).run(on_ready))


class _Process:
    def __init__(self, app: App, settings: Settings, times: StageTimes) -> None:
        self._app = app
        self._times = times
        self._settings = settings
        self._credentials = Credentials(settings)
        self._frontend = Frontend(app, http_limits(settings), self._credentials.tls)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_loading = True
        self._reloading = 0

    async def run(self, on_ready: Callable[[Addresses], None]) -> None:
        settings, loop, frontend = self._settings, asyncio.get_running_loop(), self._frontend
        self._app.models.expect(bundle_paths(settings))
        changes = ReloadWatcher(self._app.models, lambda: bundle_paths(settings))
        sockets = listen(settings.host, settings.port)
        frontend.accept(sockets)
        grpc_port = choose_grpc_port(settings, sockets[0].getsockname()[1])
        if grpc_port is not None:
            grpc_port = await frontend.accept_grpc(f"{bracketed(settings.host)}:{grpc_port}")
        addresses = Addresses.of(sockets, grpc_port, has_tls=self._credentials.tls is not None)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._start_task(self._reload_all(changes)))
        self._times.finish("sockets")
        logger.info("listening on %s; loading models", addresses.http)
        try:
            try:
                await loop.run_in_executor(None, load_models, self._app, settings)
            finally:
                self._is_loading = False
            frontend.report_ready(is_ready=True)
            self._start_task(self._exit_on_fault())
            self._start_task(run_periodic_tasks(self._app))
            if settings.reload_interval is not None:
                self._start_task(self._reload_every(changes, settings.reload_interval))
            self._times.finish("models")
            logger.info("ready after %s", self._times)
            on_ready(addresses)
            await self._stopping.wait()
            await self._drain()
        finally:
            await frontend.close()

    def _stop(self, number: int) -> None:
        if self._is_loading:
            os._exit(0)  # the server has not reported that it is ready
        if self._stopping.is_set():
            os._exit(128 + number)  # a second signal exits at once
        self._stopping.set()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._app.supervise(task)

    async def _reload_all(self, changes: ReloadWatcher) -> None:
        """Reload bundles, API keys and TLS certificates on SIGHUP."""
        if not self._app.is_ready:
            logger.warning("SIGHUP ignored: the server is starting or stopping")
            return
        self._credentials.reload()
        self._app.keys = self._credentials.keys
        if not await self._reload(changes):
            logger.info("reload: no bundle has changed")

    async def _reload(self, changes: ReloadWatcher) -> int:
        if not self._app.is_ready:
            return 0
        self._reloading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(None, changes.reload)
        finally:
            self._reloading -= 1

    async def _reload_every(self, changes: ReloadWatcher, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._reload(changes)

    async def _exit_on_fault(self) -> None:
        """Report readiness to gRPC, and exit on a fault that the process cannot repair but a supervisor can."""
        was_ready, fault = True, None
        while fault is None:
            await asyncio.sleep(_HEALTH_CHECK_S)
            fault, is_ready = self._app.fault(), self._app.can_serve()
            if is_ready != was_ready:
                self._frontend.report_ready(is_ready=is_ready)
            was_ready = is_ready
        logger.critical("%s: exiting with code %d, so that a supervisor restarts the process", fault, EXIT_FAULT)
        await asyncio.sleep(FAULT_LINGER_S)
        with suppress(Exception):
            self._app.metrics.deferred.run()
        os._exit(EXIT_FAULT)

    async def _drain(self) -> None:
        logger.info("shutting down: answering open requests")
        is_done = await self._frontend.drain(self._settings.drain_timeout)
        if not is_done or self._reloading:
            # Running batches cannot be interrupted, and no client waits for them.
            os._exit(0)
        for task in self._tasks:
            task.cancel()
