"""The client side of an engine process: sessions whose batches run there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hasten.core.errors import UnavailableError
from hasten.core.tensors import Batch, Outputs
from hasten.core.variant import Variant
from hasten.server.models.encoder_model import RemoteSessions
from hasten.server.processes import handshake
from hasten.server.processes.handshake import Description, Hello, Welcome
from hasten.server.processes.shared_batches import (
    MESSAGE_BYTES,
    BatchFormat,
    ProtocolError,
    Region,
    message_bytes,
    read_outputs,
    shared_words,
    write_batch,
)
from hasten.server.scheduling.lost_session import ReconnectingSession, SessionLostError

# Time for an engine process to answer a handshake; it has a thread that does nothing else that takes long.
_HANDSHAKE_S = 10.0
# How often an engine process that is starting is tried.
_CONNECT_S = 0.02


class RemoteSession(ReconnectingSession):
    """A connection to an engine process that carries one batch at a time. Not thread-safe: one thread owns it."""

    def __init__(self, directory: Path, engine: int, model: str, generation: int) -> None:
        """Connect; raise UnavailableError if the process does not listen or has not loaded the model."""
        self._path = handshake.socket_path(directory, engine)
        self._hello = Hello(model, generation)
        self._engine = engine
        self._number = 0
        self._buffer = bytearray(MESSAGE_BYTES)
        self._received = memoryview(self._buffer)
        self._socket: socket.socket | None = None
        self.description = self._connect()
        self.spec = self.description.spec
        self._format = BatchFormat.of(self.spec.signature)

    def run(self, batch: Batch) -> Outputs:
        return self._run(batch, is_suspect=False)

    def run_alone(self, batch: Batch) -> Outputs:
        return self._run(batch, is_suspect=True)

    def reconnect(self) -> bool:
        if self._socket is not None:
            return True
        try:
            description = self._connect()
        except UnavailableError:
            return False
        if description.is_compatible(self.description):
            return True
        # The bundle was replaced meanwhile, and this session's clients know the old one: a hot reload follows.
        self.close()
        return False

    @property
    def load(self) -> int:
        return self._loads[0]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._region.close()

    def _run(self, batch: Batch, *, is_suspect: bool) -> Outputs:
        if self._socket is None:
            raise SessionLostError(f"engine process {self._engine} has ended", was_running=False)
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        message = write_batch(self._region, self._format, batch, number, is_suspect=is_suspect)
        try:
            self._socket.sendall(message)
            size = self._receive(self._socket)
        except OSError as error:
            raise self._lost(str(error.strerror or error)) from error
        try:
            return read_outputs(self._region, self._format, self._received[:size], number)
        except ProtocolError as error:
            raise self._lost(error.message) from error

    def _receive(self, peer: socket.socket) -> int:
        """Receive a reply into the buffer and return its size."""
        size = 0
        while size < (expected := message_bytes(self._received[:size])):
            count = peer.recv_into(self._received[size:])
            if not count:
                raise self._lost("it has closed the connection")
            size += count
            if expected > MESSAGE_BYTES:
                raise self._lost("its message is too long")
        return size

    def _lost(self, reason: str) -> SessionLostError:
        was_running = self._region.is_running
        self.close()
        return SessionLostError(f"engine process {self._engine} was lost: {reason}", was_running=was_running)

    def _connect(self) -> Description:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as on_error:
            on_error.callback(peer.close)
            try:
                peer.settimeout(_HANDSHAKE_S)
                peer.connect(self._path)
                handshake.send(peer, self._hello)
                welcome, descriptors = handshake.receive(peer, Welcome, descriptors=2)
                for descriptor in descriptors:
                    on_error.callback(os.close, descriptor)
                peer.settimeout(None)
                if welcome.description is None:
                    name, generation = self._hello.model, self._hello.generation
                    raise UnavailableError(
                        f"engine process {self._engine} has not loaded '{name}' (generation {generation})"
                    )
                region, loads = descriptors
                self._loads = shared_words(loads)[1]
                self._region = Region(region)
            except (OSError, EOFError, ValueError, ProtocolError) as error:
                raise UnavailableError(f"engine process {self._engine} cannot be reached: {error}") from error
            self._socket = peer
            on_error.pop_all()
        os.close(loads)
        return welcome.description


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
    until = time.monotonic() + timeout_s
    with ExitStack() as on_error:
        sessions: list[RemoteSession] = []
        for engine in engines:
            first = on_error.enter_context(_open(directory, engine, model, generation, until))
            sessions.append(first)
            others = (slots or first.description.instances + 1) - 1
            sessions += [
                on_error.enter_context(_open(directory, engine, model, generation, until)) for _ in range(others)
            ]
        description = sessions[0].description
        for session in sessions:
            if not session.description.is_compatible(description):
                raise UnavailableError(f"the engine processes have loaded different versions of '{model}'")
        on_error.pop_all()
    return RemoteSessions(
        sessions,
        Variant.parse(description.variant),
        description.instances,
        description.tokens_per_batch,
        description.rows_per_batch,
        description.is_packed,
        encoders,
    )


def _open(directory: Path, engine: int, model: str, generation: int, until: float) -> RemoteSession:
    while True:
        try:
            return RemoteSession(directory, engine, model, generation)
        except UnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(_CONNECT_S)
