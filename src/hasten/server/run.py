"""The server's process: a socket, an event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import signal

from hasten.core.errors import missing_package
from hasten.server.app import App
from hasten.server.connection import Connections, HttpLimits


async def serve_http(app: App, host: str, port: int, limits: HttpLimits, *, drain_s: float = 30.0) -> None:
    loop = asyncio.get_running_loop()
    connections = Connections(app, limits)
    server = await loop.create_server(connections, host, port, backlog=2048)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    app.is_ready = True
    print(f"ready on {server.sockets[0].getsockname()}", flush=True)
    await stopping.wait()
    app.is_ready = False
    server.close()
    connections.drain()
    await loop.run_in_executor(None, app.models.close, drain_s)
    await server.wait_closed()


def run(app: App, host: str, port: int) -> None:
    try:
        import uvloop
    except ImportError as error:
        raise missing_package("uvloop", "serving", "serve") from error
    uvloop.run(serve_http(app, host, port, HttpLimits()))
