"""The child processes of a server: how each is started and configured, and what the parent asks all of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hasten.core.errors import HastenError, UnavailableError
from hasten.server.http.acceptor import bracketed
from hasten.server.models.registry import Registry
from hasten.server.processes.child import ChildProcess
from hasten.server.processes.control import Handler
from hasten.server.processes.fleet import Fleet, FleetModel
from hasten.server.processes.merged_metrics import MergedMetrics
from hasten.server.processes.messages import (
    Configure,
    Done,
    Drain,
    MetricsText,
    ReadMetrics,
    ReloadCredentials,
    SetHealth,
    encode_settings,
)
from hasten.server.processes.shared_counters import SharedCounters
from hasten.server.processes.supervised import SupervisedChild
from hasten.server.settings import Settings
from hasten.server.startup import unload_timeout_s

# The longest path of a Unix socket is 103 bytes on macOS and 107 on Linux; this leaves room for its name.
_MAX_DIRECTORY_BYTES = 85
_WORKER, _ENGINE = "hasten.server.processes.api_worker", "hasten.server.processes.engine_main"
# Time for a process to answer with its metrics; then its latest ones count.
_METRICS_S = 2.0
# A busy machine may delay an event loop for seconds.
_MIN_SILENCE_S = 10.0
# Time for a process to report that it has drained, beyond the time in which it drains.
_REPLY_S = 5.0
# Time for processes to end after the server has drained.
_EXIT_S = 5.0


class Children:
    """The engine processes and API workers of a server. Used on the event loop."""

    def __init__(
        self,
        settings: Settings,
        workers: int,
        sockets: Sequence[socket.socket],
        grpc_port: int | None,
        handle: Handler,
        on_change: Callable[[], None],
    ) -> None:
        """`handle` answers their requests; `on_change` is called when the state of one may have changed."""
        self._settings = settings
        self._sockets = sockets
        self._grpc_address = "" if grpc_port is None else f"{bracketed(settings.host)}:{grpc_port}"
        self._directory = socket_directory()
        self._counters = SharedCounters(workers)
        self._metrics = MergedMetrics()
        # What the workers report.
        self.health = SetHealth(is_alive=True, is_ready=False)
        max_silence_s = max(settings.stall_timeout, _MIN_SILENCE_S)
        self.engines = [
            SupervisedChild(
                f"engine process {index}",
                partial(ChildProcess.start, _ENGINE, handle),
                partial(self._take_up_engine, index),
                on_change,
                max_silence_s=max_silence_s,
            )
            for index in range(settings.engines)
        ]
        files = [*(listener.fileno() for listener in sockets), self._counters.file]
        self.workers = [
            SupervisedChild(
                f"API worker {index}",
                partial(ChildProcess.start, _WORKER, handle, files),
                partial(self._take_up_worker, index),
                on_change,
                max_silence_s=max_silence_s,
            )
            for index in range(workers)
        ]
        self._fleet = Fleet(self.engines, self.workers)
        # The models of all processes.
        self.models = Registry[FleetModel](self._fleet.open, unload_timeout_s(settings))

    @property
    def all(self) -> list[SupervisedChild]:
        """Return all child processes."""
        return [*self.engines, *self.workers]

    def keep_running(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work that starts each process whenever it does not run."""
        engines = [child.keep_running(partial(self._metrics.end, child.name)) for child in self.engines]
        workers = [child.keep_running(partial(self._forget_worker, index)) for index, child in enumerate(self.workers)]
        return [*engines, *workers]

    async def read_metrics(self) -> bytes:
        """Return the metrics of all processes as one."""

        async def read(child: SupervisedChild) -> None:
            with suppress(HastenError):
                self._metrics.update(child.name, (await child.call(ReadMetrics(), MetricsText, _METRICS_S)).text)

        await asyncio.gather(*(read(child) for child in self.all))
        return self._metrics.render()

    async def tell_workers(self, request: SetHealth | ReloadCredentials) -> None:
        """Send a request to all workers; one that does not answer is found by its supervision."""
        calls = (worker.call(request, Done, _REPLY_S) for worker in self.workers if worker.is_running)
        await asyncio.gather(*calls, return_exceptions=True)

    async def drain(self, timeout_s: float) -> None:
        """Have the workers answer their open requests, then end all processes."""
        for children, drain_s in ((self.workers, timeout_s), (self.engines, 0.0)):
            for child in children:
                child.is_stopping = True
            calls = (child.call(Drain(drain_s), Done, drain_s + _REPLY_S) for child in children if child.is_running)
            await asyncio.gather(*calls, return_exceptions=True)
            for child in children:
                child.end()
        until = time.monotonic() + _EXIT_S
        while any(child.is_running for child in self.all) and time.monotonic() < until:
            await asyncio.sleep(0.005)

    def kill(self) -> None:
        """End all processes at once, and remove what they leave behind."""
        for child in self.all:
            child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _take_up_engine(self, index: int) -> None:
        """Configure an engine process that has started, and load all models in it."""
        engine = self.engines[index]
        await engine.call(self._configuration(index), Done)
        engine.configured.set()
        await self._fleet.take_up_engine(engine)

    async def _take_up_worker(self, index: int) -> None:
        """Configure a worker that has started, which then listens, and open all models in it."""
        worker = self.workers[index]
        await worker.call(self._configuration(index), Done)
        worker.configured.set()
        await self._fleet.take_up_worker(worker)
        await worker.call(self.health, Done)

    def _configuration(self, index: int) -> Configure:
        return Configure(
            encode_settings(self._settings),
            index,
            len(self.workers),
            len(self.engines),
            str(self._directory),
            tuple(listener.fileno() for listener in self._sockets),
            self._counters.file,
            self._grpc_address,
            {name: str(path) for name, path in self.models.paths.items()},
            tuple(self.models.expected),
        )

    def _forget_worker(self, index: int) -> None:
        self._counters.clear(index)
        self._metrics.end(self.workers[index].name)


def socket_directory() -> Path:
    """Return a new private directory, whose path is short enough for sockets."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="hasten-"))
        if len(os.fsencode(directory)) > _MAX_DIRECTORY_BYTES:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix="hasten-", dir="/tmp"))
    except OSError as error:
        problem = f"cannot create a directory for sockets: {error.strerror or error}"
        raise UnavailableError(problem, hint="set TMPDIR to a writable directory with a short path") from error
    return directory
