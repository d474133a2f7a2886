"""The server's process: sockets, an event loop, models opened, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hasten.bundle import open_bundle
from hasten.core.errors import PlanError, UnavailableError, missing_package
from hasten.core.hardware import usable_cores
from hasten.server import logs
from hasten.server.app import App, State
from hasten.server.connections import Connections, HttpLimits
from hasten.server.fairness import Turns
from hasten.server.keys import Keys
from hasten.server.metrics import Metrics
from hasten.server.models import Model, Models
from hasten.server.queue import Limits
from hasten.server.reload import Changes
from hasten.server.served import ModelSettings, Served
from hasten.server.served_writer import ServedWriter, writes
from hasten.server.settings import Settings, bundles_in, unknown_variables
from hasten.server.supervise import Heart
from hasten.server.tracing import Tracer, is_configured
from hasten.server.watch import Watcher

logger = logging.getLogger("hasten")

# The exit code of a process whose session hangs.
HUNG = 70
_BEAT_S = 1.0
# How late whoever waits may be told that its time is over.
_TICK_S = 0.02
# Objects made and not freed before the garbage collector looks through them; requests leave it next to nothing.
_COLLECT_AFTER = (50_000, 20, 100)
# Clients that are busy on a connection send their next request within this, and are told that it was the last.
_LINGER_S = 0.5
# For the last answers by gRPC to be sent.
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Addresses:
    http: str
    grpc: str | None


def run(settings: Settings, on_ready: Callable[[Addresses], None] = lambda _: None) -> None:
    """Until SIGTERM or SIGINT, and then until all that was taken is answered."""
    for package in ("httptools", "uvloop"):
        if find_spec(package) is None:
            raise missing_package(package, "serving", "serve")
    import uvloop

    _allow_connections()
    app = make_app(settings)
    if not app.keys and not _is_local(settings.host):
        logger.warning("anyone who reaches %s may ask: no API keys are set (--key-file)", settings.host)
    uvloop.run(_Process(app, settings).run(on_ready))


def make_app(settings: Settings) -> App:
    """The application, still without its models; for any server that drives it."""
    for problem in unknown_variables(os.environ):
        logger.warning("%s", problem)
    metrics, about = Metrics(), _model_settings(settings)
    turns = Turns(max(usable_cores(), (settings.instances or 1) * (settings.threads or 1)))

    def open_model(path: Path, name: str, before: Model | None) -> Model:
        # As many sessions as it has: among others' requests they cannot be measured, nor would those like it.
        chosen = about if before is None else replace(about, instances=before.instances)
        # What is read of it is held against its hash: the other variants need not be.
        bundle = open_bundle(path)
        if writes(bundle):
            return ServedWriter(name, bundle, chosen, turns, metrics.of_writer(name))
        return Served(name, bundle, chosen, turns, metrics.of(name))

    models = Models(open_model, drain_s=max(settings.drain, settings.timeout))
    metrics.follow(models)
    watchers: list[Watcher] = [logs.access_log()] if settings.logs_requests else []
    keys = Keys.read(settings.key_file)
    if not is_configured():
        return App(models, metrics, keys, watchers, hang_s=settings.hang)
    tracer = Tracer()
    return App(models, metrics, keys, [*watchers, tracer], hang_s=settings.hang, on_close=tracer.close)


def bundle_paths(settings: Settings) -> dict[str, Path]:
    """By the names of their directories; of a link its own, so that what it leads to may change."""
    given = [path for bundle in settings.bundles for path in bundles_in(Path(bundle).expanduser())]
    paths = {(path.resolve() if path.name in ("", "..") else path).name: path for path in given}
    if len(paths) < len(given):
        raise PlanError("two bundles have the same name", hint="models go by the names of their directories")
    return paths


def load_models(app: App, settings: Settings) -> None:
    """Open, warm and test each; from then on it is asked, and the server is ready when all are."""
    for name, path in bundle_paths(settings).items():
        app.models.load(path, name)
    # What is there now stays: looking through it again would stop all threads, for every large request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    app.state = State.READY


async def keep_time(app: App) -> None:
    """Whoever waits in a queue is told when its time is over, whatever the sessions do; what is done is recorded."""
    while True:
        await asyncio.sleep(_TICK_S)
        app.metrics.later.do()
        now = time.monotonic()
        for served in app.models:
            if served.engine.waiting:
                served.engine.expire(now)


class _Process:
    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._connections = Connections(app, http_limits(settings), app.refusal, app.watch)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = 0

    async def run(self, on_ready: Callable[[Addresses], None]) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        self._app.models.expect(bundle_paths(settings))
        changes = Changes(self._app.models, lambda: bundle_paths(settings))
        certificate = _tls(settings)
        server = await self._listen(certificate)
        host, port = server.sockets[0].getsockname()[:2]
        grpc = self._grpc(port)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._begin(self._reload_all(changes)))
        scheme = "http" if certificate is None else "https"
        addresses = Addresses(f"{scheme}://{_written(host)}:{port}", grpc and f"{_written(host)}:{grpc.port}")
        logger.info("listening on %s; the models are being loaded", addresses.http)
        try:
            await self._load()
            if grpc is not None:
                grpc.tell(is_ready=True)
            self._begin(self._watch_over(Heart.inherited(), grpc))
            self._begin(keep_time(self._app))
            if settings.watch is not None:
                self._begin(self._reload_every(changes, settings.watch))
            logger.info("ready")
            on_ready(addresses)
            await self._stopping.wait()
            await self._drain(server, grpc)
        finally:
            if grpc is not None:
                grpc.stop(0)

    async def _load(self) -> None:
        loading = asyncio.get_running_loop().run_in_executor(None, load_models, self._app, self._settings)
        stopping = asyncio.ensure_future(self._stopping.wait())
        both: list[asyncio.Future[Any]] = [loading, stopping]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # Nothing was promised to anyone yet.
            os._exit(0)
        stopping.cancel()
        loading.result()

    async def _listen(self, certificate: ssl.SSLContext | None) -> asyncio.Server:
        settings = self._settings
        try:
            return await asyncio.get_running_loop().create_server(
                self._connections,
                settings.host,
                settings.port,
                backlog=2048,
                ssl=certificate,
                ssl_handshake_timeout=None if certificate is None else settings.read_timeout,
            )
        except OSError as error:
            where = f"{_written(settings.host)}:{settings.port}"
            is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
            hint = "--port takes another" if is_port else "--host takes an address of this machine, or 0.0.0.0 for all"
            raise UnavailableError(f"cannot listen on {where}: {error.strerror or error}", hint=hint) from error

    def _grpc(self, port: int) -> Any | None:
        settings = self._settings
        if not settings.grpc:
            return None
        # Its core writes lines of its own to stderr, which nothing that reads our log understands.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        if find_spec("grpc") is None and settings.grpc_port is None:
            logger.warning("gRPC is not served: the package 'grpcio' is not installed (pip install 'hasten[serve]')")
            return None
        from hasten.server.grpc_v2 import GrpcServer

        chosen = settings.grpc_port if settings.grpc_port is not None else (port + 1 if settings.port else 0)
        pair = None
        if settings.tls_key is not None and settings.tls_cert is not None:
            pair = settings.tls_key, settings.tls_cert
        server = GrpcServer(self._app, f"{_written(settings.host)}:{chosen}", http_limits(settings), pair)
        server.start()
        return server

    # While it runs

    def _stop(self, number: int) -> None:
        if self._stopping.is_set():
            os._exit(128 + number)  # asked twice: now
        self._stopping.set()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload_all(self, changes: Changes) -> None:
        """What SIGHUP asks for: bundles, and keys."""
        if not self._app.is_ready:
            logger.warning("asked to reload while it starts or stops: nothing is")
            return
        if self._settings.key_file is not None:
            try:
                self._app.keys = Keys.read(self._settings.key_file)
            except PlanError as error:
                logger.error("the API keys stay as they were: %s", error)
            else:
                logger.info("asked to reload: %d API keys are known", len(self._app.keys))
        if not await self._reload(changes):
            logger.info("asked to reload: no bundle has changed")

    async def _reload(self, changes: Changes) -> int:
        if not self._app.is_ready:
            return 0
        self._reloading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(None, changes.reload)
        finally:
            self._reloading -= 1

    async def _reload_every(self, changes: Changes, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self._reload(changes)

    async def _watch_over(self, heart: Heart, grpc: Any | None) -> None:
        """A session that hangs cannot be stopped; a process can."""
        while self._app.is_alive():
            if not heart.beat():
                logger.error("the supervisor is gone: leaving")
                self._stopping.set()
            await asyncio.sleep(_BEAT_S)
        if grpc is not None:
            grpc.tell(is_ready=False)
        logger.critical("a session hangs: leaving, so that whoever supervises this process starts it again")
        # Whoever asks for its health meanwhile is told.
        await asyncio.sleep(2 * _BEAT_S)
        self._app.metrics.later.do()
        os._exit(HUNG)

    # The end

    async def _drain(self, server: asyncio.Server, grpc: Any | None) -> None:
        """Take no new connections, answer what comes on those there are and tell that it was the last, then leave."""
        begin = time.monotonic()
        until = begin + self._settings.drain
        logger.info("stopping: what was taken is answered first")
        self._app.state = State.DRAINING
        server.close()
        if grpc is not None:
            grpc.stop(self._settings.drain)
        self._connections.is_draining = True
        while self._connections.open and time.monotonic() < min(until, begin + _LINGER_S):
            await asyncio.sleep(0.005)
        self._connections.drain()
        while self._connections.open:
            if time.monotonic() > until:
                logger.warning("not all were answered, or took their answers, in %g s", self._settings.drain)
                self._connections.abort()
                break
            await asyncio.sleep(0.005)
        left = max(0.0, until - time.monotonic())
        loop = asyncio.get_running_loop()
        is_done = await loop.run_in_executor(None, self._app.close, left)
        if grpc is not None:
            # All that was asked is answered: who still holds a call only watches, or has a stream without a request.
            await loop.run_in_executor(None, grpc.stop(_FLUSH_S).wait)
        if not is_done or self._reloading:
            # What still runs cannot be stopped, and nobody waits for it.
            os._exit(0)
        for task in self._tasks:
            task.cancel()


def _model_settings(settings: Settings) -> ModelSettings:
    limits = Limits(
        requests=settings.max_queue,
        wait_s=settings.max_queue_time,
        slowdown=settings.max_slowdown,
    )
    return ModelSettings(
        variant=settings.variant,
        instances=settings.instances,
        threads=settings.threads,
        max_wait_s=settings.max_wait / 1e6,
        timeout_s=settings.timeout,
        batch_tokens=settings.batch_tokens,
        limits=limits,
        items=settings.max_items,
        tokens=settings.max_tokens,
        slots=settings.slots,
        written_tokens=settings.max_new_tokens,
    )


def http_limits(settings: Settings) -> HttpLimits:
    return HttpLimits(
        body_bytes=settings.max_body,
        read_s=settings.read_timeout,
        idle_s=settings.idle_timeout,
        connections=settings.max_connections,
        held_bytes=max(HttpLimits().held_bytes, 4 * settings.max_body),
    )


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise PlanError("TLS needs a certificate and its key", hint="--tls-cert FILE --tls-key FILE")
    for option, file in (("--tls-cert", settings.tls_cert), ("--tls-key", settings.tls_key)):
        if not file.is_file():
            raise PlanError(f"there is no file {file}", hint=f"{option} names it")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")  # nobody is asked for one
    except OSError as error:  # of TLS too
        raise PlanError(
            f"no certificate and key in {settings.tls_cert} and {settings.tls_key}: {error.strerror or error}",
            hint="both in PEM form, the key without a password, and of that certificate",
        ) from error
    return context


def _allow_connections() -> None:
    """Each is a file, and shells allow few."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host
