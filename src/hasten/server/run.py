"""The server process: sockets, event loop, model loading, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hasten.bundle import open_bundle
from hasten.core.errors import PlanError, UnavailableError, missing_package
from hasten.core.system.hardware import usable_cores
from hasten.families import family_of_bundle
from hasten.server.app import App
from hasten.server.auth import ApiKeys
from hasten.server.http.connection import Connection
from hasten.server.http.state import HttpLimits, HttpState
from hasten.server.models.registry import Model, ModelRegistry
from hasten.server.models.reload import ReloadWatcher
from hasten.server.request_records import RequestListener
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.settings import Settings, find_bundles, unknown_variables
from hasten.server.telemetry import logs
from hasten.server.telemetry.metrics import Metrics
from hasten.server.telemetry.tracing import Tracer, is_configured
from hasten.server.tls import Tls, TlsFiles

logger = logging.getLogger("hasten")

# The exit code of a process that a supervisor should restart.
EXIT_FAULT = 70
_HEALTH_CHECK_S = 0.5
# Time for liveness probes and load balancers to notice a fault before the process exits.
_FAULT_LINGER_S = 2.0
# The delay after which an expired request is answered at the latest.
_TICK_S = 0.02
# Allocations before the garbage collector runs; requests leave it next to nothing to collect.
_GC_THRESHOLD = (50_000, 20, 100)
# How long the event loop waits for a thread that computes in Python, such as one that decodes a large response. The
# default is 5 ms.
_SWITCH_INTERVAL_S = 0.001
# Busy keep-alive clients send their next request within this time and learn from its answer that it was the last.
_LINGER_S = 0.5
# Time to send the last gRPC answers.
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses that the server listens on."""

    http: str
    grpc: str | None


def run(settings: Settings, on_ready: Callable[[Addresses], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT, then answer the open requests and return."""
    for package in ("httptools", "uvloop"):
        if find_spec(package) is None:
            raise missing_package(package, "serving", "serve")
    import uvloop

    _allow_connections()
    app = make_app(settings)
    if not app.keys and not _is_local(settings.host):
        logger.warning("%s is open to everyone who can reach it: no API keys are set (--api-key-file)", settings.host)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_Process(app, settings).run(on_ready))


def make_app(settings: Settings) -> App:
    """Return the application without its models, for our own HTTP server or an ASGI server."""
    for problem in unknown_variables(os.environ):
        logger.warning("%s", problem)
    metrics = Metrics()
    scheduler = CoreScheduler(max(usable_cores(), (settings.instances or 1) * (settings.threads or 1)))

    def open_model(path: Path, name: str, old: Model | None) -> Model:
        # Keep the number of sessions: measuring it under load would be wrong and would slow down other requests.
        chosen = settings if old is None else replace(settings, instances=old.instances)
        # Hashes are checked for the files that are read; those of other variants need no check.
        bundle = open_bundle(path)
        return family_of_bundle(bundle).serve(name, bundle, chosen, scheduler, metrics)

    models = ModelRegistry(open_model, drain_s=max(settings.drain_timeout, settings.timeout))
    metrics.follow(models)
    listeners: list[RequestListener] = [logs.log_request] if settings.logs_requests else []
    keys = ApiKeys.read(settings.api_key_file)
    make = partial(App, models, metrics, keys, model_control=settings.model_control)
    if not is_configured():
        return make(listeners, stall_timeout_s=settings.stall_timeout)
    tracer = Tracer()
    return make([*listeners, tracer], stall_timeout_s=settings.stall_timeout, on_close=tracer.close)


def bundle_paths(settings: Settings) -> dict[str, Path]:
    """Return the bundles by directory name; a symbolic link keeps its own name, so that its target may change."""
    candidates = [path for bundle in settings.bundles for path in find_bundles(Path(bundle).expanduser())]
    names = [(path.resolve() if path.name in ("", "..") else path).name for path in candidates]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise PlanError(f"two bundles are named '{name}'", hint="models are named after their directories; rename one")
    return dict(zip(names, candidates, strict=True))


def load_models(app: App, settings: Settings) -> None:
    """Load, warm up and check all models; each serves requests at once, and the server is ready after the last."""
    for name, path in bundle_paths(settings).items():
        app.models.load(path, name)
    # These objects live as long as the process: collecting them again would stop all threads at each large request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)
    app.is_ready = True


async def run_periodic_tasks(app: App) -> None:
    """Fail expired requests, even while all sessions are busy, and record the answered ones."""
    while True:
        await asyncio.sleep(_TICK_S)
        app.metrics.deferred.run()
        now = time.monotonic()
        for model in app.models:
            if model.engine.waiting:
                model.engine.expire(now)


class _Process:
    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._connections = HttpState(app, http_limits(settings), app.refusal, app.watch)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        files = TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._tls = None if files is None else Tls(files)
        self._is_loading = True
        self._reloading = 0

    async def run(self, on_ready: Callable[[Addresses], None]) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        self._app.models.expect(bundle_paths(settings))
        changes = ReloadWatcher(self._app.models, lambda: bundle_paths(settings))
        server = await self._listen()
        host, port = server.sockets[0].getsockname()[:2]
        grpc = await self._grpc(port)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._start_task(self._reload_all(changes)))
        scheme = "http" if self._tls is None else "https"
        addresses = Addresses(f"{scheme}://{_bracketed(host)}:{port}", grpc and f"{_bracketed(host)}:{grpc.port}")
        logger.info("listening on %s; loading models", addresses.http)
        try:
            try:
                await loop.run_in_executor(None, load_models, self._app, settings)
            finally:
                self._is_loading = False
            if grpc is not None:
                grpc.health.report(is_ready=True)
            self._start_task(self._exit_on_fault(grpc))
            self._start_task(run_periodic_tasks(self._app))
            if settings.reload_interval is not None:
                self._start_task(self._reload_every(changes, settings.reload_interval))
            logger.info("ready")
            on_ready(addresses)
            await self._stopping.wait()
            await self._drain(server, grpc)
        finally:
            if grpc is not None:
                await grpc.stop(0)

    async def _listen(self) -> asyncio.Server:
        settings = self._settings
        try:
            return await asyncio.get_running_loop().create_server(
                partial(Connection, self._connections),
                settings.host,
                settings.port,
                backlog=2048,
                ssl=None if self._tls is None else self._tls.context,
                ssl_handshake_timeout=None if self._tls is None else settings.read_timeout,
            )
        except OSError as error:
            address = f"{_bracketed(settings.host)}:{settings.port}"
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            hint = "choose another --port" if is_port else "choose a --host of this machine, or 0.0.0.0 for all"
            raise UnavailableError(f"cannot listen on {address}: {error.strerror or error}", hint=hint) from error

    async def _grpc(self, port: int) -> Any | None:
        settings = self._settings
        if not settings.grpc:
            return None
        # The gRPC core writes lines to stderr that are not in our log format.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        if find_spec("grpc") is None and settings.grpc_port is None:
            logger.warning("gRPC is disabled: the package 'grpcio' is not installed (pip install 'hasten[serve]')")
            return None
        from hasten.server.grpc.server import GrpcServer

        chosen = settings.grpc_port if settings.grpc_port is not None else (port + 1 if settings.port else 0)
        address, limits = f"{_bracketed(settings.host)}:{chosen}", self._connections.limits
        server = GrpcServer(self._app, address, limits, self._connections.buffered_bytes, self._tls)
        await server.start()
        return server

    def _stop(self, number: int) -> None:
        if self._is_loading:
            os._exit(0)  # the server has not reported that it is ready
        if self._stopping.is_set():
            os._exit(128 + number)  # a second signal exits at once
        self._stopping.set()

    def _start_task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._app.supervise(task)

    async def _reload_all(self, changes: ReloadWatcher) -> None:
        """Reload bundles, API keys and TLS certificates on SIGHUP."""
        if not self._app.is_ready:
            logger.warning("SIGHUP ignored: the server is starting or stopping")
            return
        if self._settings.api_key_file is not None:
            try:
                self._app.keys = ApiKeys.read(self._settings.api_key_file)
            except PlanError as error:
                logger.error("the API keys were not reloaded: %s", error)
            else:
                logger.info("reloaded %d API keys", len(self._app.keys))
        if self._tls is not None:
            try:
                self._tls.reload()
            except (PlanError, OSError) as error:
                logger.error("the TLS certificate was not reloaded: %s", error)
            else:
                logger.info("reloaded the TLS certificate")
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

    async def _exit_on_fault(self, grpc: Any | None) -> None:
        """Report readiness to gRPC, and exit on a fault that the process cannot repair but a supervisor can."""
        was_ready, fault = True, None
        while fault is None:
            await asyncio.sleep(_HEALTH_CHECK_S)
            fault, is_ready = self._app.fault(), self._app.can_serve()
            if grpc is not None and is_ready != was_ready:
                grpc.health.report(is_ready=is_ready)
            was_ready = is_ready
        logger.critical("%s: exiting with code %d, so that a supervisor restarts the process", fault, EXIT_FAULT)
        await asyncio.sleep(_FAULT_LINGER_S)
        with suppress(Exception):
            self._app.metrics.deferred.run()
        os._exit(EXIT_FAULT)

    async def _drain(self, server: asyncio.Server, grpc: Any | None) -> None:
        """Close the sockets, answer the requests of open connections with `connection: close`, then stop."""
        begin = time.monotonic()
        until = begin + self._settings.drain_timeout
        logger.info("shutting down: answering open requests")
        self._app.is_ready = False
        server.close()
        if grpc is not None:
            self._start_task(grpc.stop(self._settings.drain_timeout))
        self._connections.is_draining = True
        while self._connections.open and time.monotonic() < min(until, begin + _LINGER_S):
            await asyncio.sleep(0.005)
        self._connections.drain()
        while self._connections.open:
            if time.monotonic() > until:
                logger.warning(
                    "not all requests were answered, or their answers read, within %g s",
                    self._settings.drain_timeout,
                )
                self._connections.abort()
                break
            await asyncio.sleep(0.005)
        left = max(0.0, until - time.monotonic())
        loop = asyncio.get_running_loop()
        is_done = await loop.run_in_executor(None, self._app.close, left)
        if grpc is not None:
            # All requests are answered: calls that are still open watch health or hold an idle stream.
            await grpc.stop(_FLUSH_S)
        if not is_done or self._reloading:
            # Running batches cannot be interrupted, and no client waits for them.
            os._exit(0)
        for task in self._tasks:
            task.cancel()


def http_limits(settings: Settings) -> HttpLimits:
    """Return the limits of HTTP connections."""
    buffered_bytes = max(HttpLimits().buffered_bytes, 4 * settings.max_body)
    if settings.max_memory is not None:
        buffered_bytes = min(buffered_bytes, max(settings.max_body, settings.max_memory // 8))
    return HttpLimits(
        body_bytes=settings.max_body,
        read_s=settings.read_timeout,
        idle_s=settings.idle_timeout,
        connections=settings.max_connections,
        buffered_bytes=buffered_bytes,
    )


def _allow_connections() -> None:
    """Raise the limit of open files, which shells set low: each connection is one."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
