"""The server's process: models opened, a socket, an event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hasten.core.errors import PlanError, UnavailableError, missing_package
from hasten.core.hardware import usable_cores
from hasten.server.app import App
from hasten.server.connection import Connections, HttpLimits
from hasten.server.fairness import Turns
from hasten.server.metrics import Metrics
from hasten.server.models import Models
from hasten.server.served import ModelSettings, Served

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class Settings:
    bundles: tuple[Path, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    model: ModelSettings = field(default_factory=ModelSettings)
    http: HttpLimits = field(default_factory=HttpLimits)
    key_file: Path | None = None
    drain_s: float = 30.0


def run(settings: Settings, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Until SIGTERM or SIGINT, and then until all that was taken is answered."""
    try:
        import httptools  # noqa: F401
        import uvloop
    except ImportError as error:
        raise missing_package(error.name or "uvloop", "serving", "serve") from error
    keys = read_keys(settings.key_file)
    if not keys and not _is_local(settings.host):
        logger.warning("anyone who reaches %s may ask: no API keys are set (--key-file)", settings.host)
    app = make_app(settings, keys)
    uvloop.run(_serve(app, settings, on_ready))


def make_app(settings: Settings, keys: tuple[str, ...] = ()) -> App:
    """The application with its models, ready to be asked; for any server that drives it."""
    names = [path.resolve().name for path in settings.bundles]
    if len(set(names)) < len(names):
        raise PlanError("two bundles have the same name", hint="models go by the names of their directories")
    metrics, threads = Metrics(), settings.model.threads or usable_cores()
    turns = Turns(max(settings.model.instances, usable_cores() // threads))
    models = Models(lambda path, name: Served.open(path, settings.model, turns, metrics.of(name), name))
    for path, name in zip(settings.bundles, names, strict=True):
        models.load(path, name)
    return App(models, metrics, keys=keys)


def read_keys(file: Path | None) -> tuple[str, ...]:
    lines = os.environ.get("HASTEN_API_KEYS", "").replace(",", "\n").splitlines()
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise PlanError(f"no keys at {file}: {error.strerror or error}") from error
    return tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))


async def _serve(app: App, settings: Settings, on_ready: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    connections = Connections(app, settings.http)
    try:
        server = await loop.create_server(connections, settings.host, settings.port, backlog=2048)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", hint="--port takes another"
        ) from error
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    host, port = server.sockets[0].getsockname()[:2]
    app.is_ready = True
    on_ready(f"http://{host}:{port}")
    await stopping.wait()
    app.is_ready = False
    server.close()
    connections.drain()
    if not await loop.run_in_executor(None, app.models.close, settings.drain_s):
        logger.warning("some requests were not answered in %.0f s", settings.drain_s)
    # What was answered last is still on its way out.
    while connections.open:
        await asyncio.sleep(0.01)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
