"""The engine process: it owns the sessions of the models of one device and runs the batches of all API workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hasten.server.settings import Settings


class EngineHost:
    """The models of an engine process, and the Unix socket on which API workers send batches. Thread-safe.

    Several generations of a model serve side by side during a hot reload.
    """

    def __init__(self, settings: Settings, directory: Path, index: int) -> None:
        """Listen on a socket of `directory`, which must be private (0700). Of `settings`, sockets are ignored."""
        raise NotImplementedError

    def load(self, path: Path, name: str, generation: int) -> None:
        """Open, warm up and test a bundle; raise a HastenError if that fails. API workers may then connect to it."""
        raise NotImplementedError

    def unload(self, name: str, generation: int, drain_s: float = 0.0) -> bool:
        """Drain and close a model, and the connections to it; return whether all batches were answered."""
        raise NotImplementedError

    def fault(self) -> str | None:
        """Return why only a new process would serve again, or None: a stalled or broken session, an ended thread."""
        raise NotImplementedError

    def can_serve(self) -> bool:
        """Return whether batches run: there is no fault and no session is being tried again."""
        raise NotImplementedError

    def metrics(self) -> bytes:
        """Return the metrics of batches, and of this process, in Prometheus text format.

        Those of requests, queues and GPUs are the workers'.
        """
        raise NotImplementedError

    def close(self, drain_s: float) -> bool:
        """Drain and close all models and connections; return whether all batches were answered. May be called twice."""
        raise NotImplementedError


def serve_engine(settings: Settings, directory: Path, index: int, control: Callable[[EngineHost], None]) -> None:
    """Run the engine process until `control` returns, which loads and unloads models; then close the host."""
    raise NotImplementedError
