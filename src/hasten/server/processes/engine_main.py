"""The main program of an engine process: `python -m hasten.server.processes.engine_main CONTROL`.

Its main thread answers the parent; `EngineHost` answers the API workers on threads of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from hasten.bundle import open_bundle
from hasten.core.errors import BundleError, StageError
from hasten.server.processes.child_main import control_socket, remove_after_parent, settings_of
from hasten.server.processes.control import ControlChannel
from hasten.server.processes.engine_process import EngineHost
from hasten.server.processes.messages import (
    Configure,
    Done,
    Drain,
    LoadModel,
    MetricsText,
    ModelVersion,
    ReadMetrics,
    ReadStatus,
    Reply,
    Request,
    Status,
    UnloadModel,
)
from hasten.server.startup import SWITCH_INTERVAL_S, freeze_objects

Result = TypeVar("Result")

# Models load one at a time, while others are unloaded and metrics are read.
_THREADS = 4


class EngineProgram:
    """Answers the requests of the parent."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "control")
        self._host: EngineHost | None = None
        self._directory = Path()
        self._loaded: set[ModelVersion] = set()

    async def run(self, end: socket.socket) -> None:
        """Answer until the parent closes the control channel or dies."""
        parent = os.getppid()
        channel = await ControlChannel.open(end, self.handle)
        await channel.closed.wait()
        if self._host is not None:
            await remove_after_parent(self._directory, parent)
        # Running batches cannot be interrupted, and no worker waits for them.
        os._exit(0)

    async def handle(self, request: Request) -> Reply:
        """Answer one request of the parent."""
        match request:
            case Configure():
                await self._in_thread(lambda: self._configure(request))
                return Done()
            case LoadModel(version=version):
                await self._in_thread(lambda: self._load(version))
                return Done()
            case UnloadModel(version=version):
                await self._in_thread(lambda: self._unload(version))
                return Done()
            case ReadStatus():
                return Status(self._opened.fault(), self._opened.can_serve())
            case ReadMetrics():
                return MetricsText(await self._in_thread(lambda: self._opened.metrics()))
            case Drain(timeout_s=timeout_s):
                await self._in_thread(lambda: self._opened.close(timeout_s))
                return Done()
        raise StageError(f"an engine process does not answer {type(request).__name__}")

    @property
    def _opened(self) -> EngineHost:
        if self._host is None:
            raise StageError("the engine process is not configured yet")
        return self._host

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _configure(self, request: Configure) -> None:
        self._directory = Path(request.directory)
        self._host = EngineHost(settings_of(request), self._directory, request.index)

    def _load(self, version: ModelVersion) -> None:
        path = Path(version.path)
        if open_bundle(path).manifest.digest != version.digest:
            raise BundleError(f"{version.name} has changed on disk since it was loaded")
        self._opened.load(path, version.name, version.generation)
        self._loaded.add(version)
        freeze_objects()

    def _unload(self, version: ModelVersion) -> None:
        if version in self._loaded:  # not if it could not be loaded
            self._loaded.remove(version)
            self._opened.unload(version.name, version.generation)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asyncio.run(EngineProgram().run(control_socket()))
