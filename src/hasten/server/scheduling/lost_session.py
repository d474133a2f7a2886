"""Sessions whose batches run in another process, which may end and be replaced while the session stays."""

from __future__ import annotations

from abc import abstractmethod

from hasten.backends import Session
from hasten.core.errors import UnavailableError
from hasten.core.tensors import Batch, Outputs


class SessionLostError(UnavailableError):
    """The process of a session ended before it returned the outputs of a batch."""

    def __init__(self, message: str, *, was_running: bool) -> None:
        super().__init__(message)
        # Whether the batch had started: it may be what ended the process.
        self.was_running = was_running


class ReconnectingSession(Session):
    """A session whose batches run in another process. `run` raises SessionLostError if that process ends."""

    @abstractmethod
    def run_alone(self, batch: Batch) -> Outputs:
        """Run a batch that may have ended a process before: there it is not merged with other batches."""

    @abstractmethod
    def reconnect(self) -> bool:
        """Try once to connect to the process that replaces a lost one; return whether batches can run again."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Return the tokens in flight in the session's process, those of its other clients included."""
