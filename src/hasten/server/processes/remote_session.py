"""The client side of an engine process: sessions whose batches run there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hasten.core.tensors import Batch, Outputs
from hasten.server.models.encoder_model import RemoteSessions
from hasten.server.scheduling.lost_session import RemoteSessionBase


class RemoteSession(RemoteSessionBase):
    """A connection to an engine process that carries one batch at a time. Not thread-safe: one thread owns it."""

    def __init__(self, directory: Path, engine: int, model: str, generation: int) -> None:
        raise NotImplementedError

    def run(self, batch: Batch) -> Outputs:
        raise NotImplementedError

    def reconnect(self) -> bool:
        raise NotImplementedError

    @property
    def load(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def connect(
    directory: Path,
    engines: Sequence[int],
    model: str,
    generation: int,
    *,
    encoders: int,
    slots: int | None = None,
    timeout_s: float = 60.0,
) -> RemoteSessions:
    """Open the sessions of a loaded model: `slots` per engine process, by default one more than its own sessions.

    `encoders` is the number of tokenizer threads of this process. Waits up to `timeout_s` for an engine process that
    is starting or has not loaded this generation yet, then raises UnavailableError. For `EncoderModel(…, remote=…)`.
    """
    raise NotImplementedError
