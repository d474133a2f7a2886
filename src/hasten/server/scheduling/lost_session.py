"""Sessions in another process, which may end and start again while this one stays."""

from __future__ import annotations

from abc import abstractmethod

from hasten.backends import Session
from hasten.core.errors import UnavailableError


class SessionLostError(UnavailableError):
    """The process of a session ended before it returned the outputs of a batch."""

    def __init__(self, message: str, *, was_running: bool) -> None:
        super().__init__(message)
        # Whether the batch had started: it may be what ended the process.
        self.was_running = was_running


class RemoteSessionBase(Session):
    """A session whose batches run in another process. `run` raises SessionLostError if that process ends."""

    @abstractmethod
    def reconnect(self) -> bool:
        """Try once to connect to the process that has replaced a lost one; return whether the session works again."""

    @property
    @abstractmethod
    def load(self) -> int:
        """Return the tokens in flight in the session's process, of all its clients."""
