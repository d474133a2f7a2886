"""The main program of an API worker: `python -m hasten.server.processes.api_worker CONTROL`.

It answers clients over HTTP and gRPC, tokenizes, and decodes; engine processes run the batches.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hasten.core.errors import StageError
from hasten.server.app import App
from hasten.server.credentials import Credentials
from hasten.server.frontend import Frontend, allow_connections
from hasten.server.processes.child_main import control_socket, settings_of
from hasten.server.processes.control import ControlChannel
from hasten.server.processes.messages import (
    Configure,
    Done,
    Drain,
    MetricsText,
    ModelLoaded,
    PrepareModel,
    ReadMetrics,
    ReadStatus,
    ReloadCredentials,
    Reply,
    Request,
    RetireModel,
    SetHealth,
    Status,
    SwapModel,
)
from hasten.server.processes.shared_counters import SharedCounters
from hasten.server.processes.worker_models import WorkerModels
from hasten.server.startup import SWITCH_INTERVAL_S, build_app, freeze_objects, http_limits, run_periodic_tasks
from hasten.server.telemetry.metrics import Metrics

Result = TypeVar("Result")

# Models that open, drain and close at once.
_THREADS = 8
_PUBLISH_S = 0.02
# Time for the parent to collect the metrics of all processes.
_METRICS_S = 10.0


class WorkerApp(App):
    """An application whose health and metrics are those of all processes."""

    channel: ControlChannel
    is_server_alive, is_server_ready = True, False

    def is_alive(self) -> bool:
        return self.is_server_alive

    def can_serve(self) -> bool:
        return self.is_ready and self.is_server_ready

    def render_metrics(self) -> bytes:
        return self.channel.call_from_thread(ReadMetrics(), MetricsText, _METRICS_S).text

    def status(self) -> Status:
        """Return the state of this process alone."""
        recovering = any(model.engine.is_recovering for model in self.models)
        return Status(self.fault(), can_serve=self.is_ready and not recovering)


class ApiWorker:
    """Answers the requests of the parent."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "control")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._channel: ControlChannel | None = None
        # Set by `Configure`.
        self._app: WorkerApp
        self._models: WorkerModels
        self._frontend: Frontend
        self._credentials: Credentials

    async def run(self, end: socket.socket) -> None:
        """Answer until the parent closes the control channel or dies."""
        channel = self._channel = await ControlChannel.open(end, self.handle)
        await channel.closed.wait()
        os._exit(0)

    async def handle(self, request: Request) -> Reply:
        """Answer one request of the parent."""
        match request:
            case Configure():
                await self._configure(request)
            case PrepareModel(version=version, column=column):
                variant = await self._in_thread(lambda: self._models.prepare(version, column))
                freeze_objects()
                return ModelLoaded(variant)
            case SwapModel(version=version):
                self._models.swap(version)
            case RetireModel(version=version, drain_s=drain_s):
                await self._in_thread(lambda: self._models.retire(version, drain_s))
            case ReadStatus():
                return self._app.status()
            case ReadMetrics():
                return MetricsText(await self._in_thread(self._app.metrics.render))
            case SetHealth(is_alive=is_alive, is_ready=is_ready):
                self._app.is_server_alive, self._app.is_server_ready = is_alive, is_ready
                self._frontend.report_ready(is_ready=is_ready)
            case ReloadCredentials():
                self._credentials.reload(is_quiet=True)
                self._app.keys = self._credentials.keys
            case Drain(timeout_s=timeout_s):
                await self._frontend.drain(timeout_s)
            case _:
                raise StageError(f"an API worker does not answer {type(request).__name__}")
        return Done()

    async def _configure(self, request: Configure) -> None:
        settings, loop = settings_of(request), asyncio.get_running_loop()
        assert self._channel is not None
        counters = SharedCounters(request.workers, request.counters)
        self._credentials = Credentials(settings)
        self._models = WorkerModels(settings, request, counters)
        self._models.channel = self._channel
        metrics = Metrics()
        metrics.follow(lambda: self._models, reads_gpus=False)  # the engine processes read them
        self._app = build_app(WorkerApp, self._models, metrics, self._credentials.keys, settings)
        self._app.channel = self._channel
        limits = http_limits(settings, request.workers)
        frontend = self._frontend = Frontend(self._app, limits, self._credentials.tls)
        listeners = [socket.socket(fileno=number) for number in request.listeners]
        for listener in listeners:
            listener.setblocking(False)

        def is_our_turn(opening: int) -> bool:
            return counters.may_accept(request.index, frontend.open_connections + opening, limits.connections)

        frontend.accept(listeners, is_our_turn)
        if request.grpc_address:
            await frontend.accept_grpc(request.grpc_address, shares_port=True)
        self._app.is_ready = True
        for work in (run_periodic_tasks(self._app), self._publish(counters, request.index)):
            self._supervise(loop.create_task(work))

    async def _publish(self, counters: SharedCounters, index: int) -> None:
        """Publish the number of connections, which falls when clients disconnect."""
        while True:
            counters.set_connections(index, self._frontend.open_connections)
            await asyncio.sleep(_PUBLISH_S)

    def _supervise(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        self._app.supervise(task)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def main() -> None:
    """Answer clients until the parent closes the control channel or dies."""
    end = control_socket()
    import uvloop

    allow_connections()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(ApiWorker().run(end))


if __name__ == "__main__":
    main()
