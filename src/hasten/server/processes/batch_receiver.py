"""The socket of an engine process: receive batches of API workers, queue them and send the outputs back."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.errors import HastenError, StageError
from hasten.core.tensors import Outputs
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.processes import handshake
from hasten.server.processes.handshake import Description, Hello, Welcome
from hasten.server.processes.shared_batches import (
    BatchFormat,
    ProtocolError,
    ReceivedBatch,
    Region,
    read_batch,
    shared_words,
    write_error,
    write_outputs,
)
from hasten.server.scheduling.encoder_engine import EncoderRequest
from hasten.tasks import Encoded

logger = logging.getLogger("hasten")

_BACKLOG = 256
# Time for the rest of a handshake; it is one small message.
_HANDSHAKE_S = 1.0
# More than a message has: one with a second behind it is not in turn.
_RECEIVE_BYTES = 64
_NO_ITEMS = np.empty(0, np.int64)


def _return_outputs(outputs: Outputs, _: Encoded) -> Outputs:
    return outputs


class ServedModel:
    """A model of an engine process, and what its clients are told of it."""

    def __init__(self, model: EncoderModel) -> None:
        self.model = model
        self.format = BatchFormat.of(model.signature)
        limits = model.limits
        self.description = Description(
            model.bundle.manifest.digest,
            model.variant.name,
            model.session_spec,
            model.instances,
            limits.tokens_per_batch,
            limits.rows_per_batch,
            limits.round_up is not None,
        )


class _TokensInFlight:
    """The number of tokens of all batches, which the workers read to choose between engine processes. Thread-safe."""

    def __init__(self) -> None:
        self.descriptor, self._words = shared_words()
        self._lock = threading.Lock()

    def add(self, tokens: int) -> None:
        with self._lock:
            self._words[0] += tokens


class _Connection:
    """The connection of one session of an API worker. The receiver's thread reads, any thread replies."""

    def __init__(self, peer: socket.socket, served: ServedModel, in_flight: _TokensInFlight) -> None:
        self.served = served
        self.region = Region.create()
        self._peer = peer
        self._in_flight = in_flight
        self._lock = threading.Lock()
        self._request: EncoderRequest[Outputs] | None = None
        self._tokens = 0
        self._is_closed = False

    def receive(self) -> bool:
        """Queue the batch that has come; return whether the connection goes on."""
        message = self._peer.recv(_RECEIVE_BYTES)
        if not message:
            return False
        if self._request is not None:
            raise ProtocolError("a batch came before the last was answered")
        received = read_batch(self.region, self.served.format, message)
        batch = received.batch
        encoded = Encoded(batch, _NO_ITEMS, len(batch), (), ())
        request = self._request = EncoderRequest(
            lambda: encoded,
            _return_outputs,
            partial(self._reply, received),
            on_start=self._mark_running,
            is_suspect=received.is_suspect,
        )
        self._tokens = received.tokens
        self._in_flight.add(received.tokens)
        try:
            self.served.model.engine.submit_encoded(request)
        except HastenError as error:
            self._reply(received, error)
        return True

    def close(self) -> None:
        """Cancel the batch that is queued or runs, and close the socket."""
        with self._lock:
            self._is_closed = True
            request, self._request = self._request, None
            # Closed under the lock: another connection may get the number of the descriptor.
            self._peer.close()
            self.region.close()
        if request is not None:
            self._in_flight.add(-self._tokens)
            self.served.model.engine.cancel(request)

    def _mark_running(self) -> None:
        self.region.is_running = True

    def _reply(self, received: ReceivedBatch, answer: Outputs | HastenError, _: Any = None) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._request = None
            self._in_flight.add(-self._tokens)
            message = self._message(received.number, answer)
            with suppress(OSError):  # the receiver's thread finds that the worker has left
                self._peer.send(message)

    def _message(self, number: int, answer: Outputs | HastenError) -> bytes:
        try:
            if isinstance(answer, HastenError):
                return write_error(answer, number)
            return write_outputs(self.region, self.served.format, answer, number)
        except HastenError as error:
            return write_error(error, number)
        except Exception as error:
            logger.exception("the outputs of a batch could not be sent")
            return write_error(StageError(f"the outputs could not be sent: {type(error).__name__}"), number)


class BatchReceiver:
    """Listens for API workers, and receives the batches of all of them on one thread."""

    def __init__(self, directory: Path, index: int, find: Callable[[str, int], ServedModel | None]) -> None:
        handshake.check_private(directory)
        self._find = find
        self._path = handshake.socket_path(directory, index)
        self._in_flight = _TokensInFlight()
        self._connections: dict[socket.socket, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = self._listen()
        # Wakes the thread to close, or to drop the connections to a model.
        self._waker, self._wakes = socket.socketpair()
        self._unloaded: list[ServedModel] = []
        self._is_closing = False
        for peer, handle in ((self._listener, self._accept), (self._wakes, self._on_wake)):
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ, handle)
        self._thread = threading.Thread(target=self._run, name="receive", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def disconnect(self, served: ServedModel) -> None:
        """Close the connections to a model that was unloaded."""
        self._unloaded.append(served)
        self._wake()

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._is_closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # closed already
            self._waker.send(b"\0")

    def _listen(self) -> socket.socket:
        """Listen under a temporary name and rename it, so that a client finds a socket that accepts or none."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = Path(f"{self._path}.{os.getpid()}")
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        path.replace(self._path)
        return listener

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select():
                key.data()
        for peer in list(self._connections):
            self._drop(peer)
        for end in (self._listener, self._waker, self._wakes):
            end.close()
        self._selector.close()

    def _on_wake(self) -> None:
        self._wakes.recv(_RECEIVE_BYTES)
        unloaded, self._unloaded = self._unloaded, []
        for peer, connection in list(self._connections.items()):
            if connection.served in unloaded:
                self._drop(peer)

    def _accept(self) -> None:
        with suppress(OSError):  # the client may have left
            peer, _ = self._listener.accept()
            self._selector.register(peer, selectors.EVENT_READ, partial(self._greet, peer))

    def _greet(self, peer: socket.socket) -> None:
        """Answer the first message of a connection."""
        self._selector.unregister(peer)
        with ExitStack() as on_error:
            on_error.callback(peer.close)
            try:
                peer.settimeout(_HANDSHAKE_S)
                hello, _ = handshake.receive(peer, Hello)
                served = self._find(hello.model, hello.generation)
                if served is None:
                    handshake.send(peer, Welcome())
                    return
                connection = _Connection(peer, served, self._in_flight)
                on_error.callback(connection.close)
                handshake.send(peer, Welcome(served.description), [connection.region.fd, self._in_flight.descriptor])
                peer.setblocking(False)
            except (OSError, EOFError, HastenError) as error:
                logger.warning("the handshake of an API worker failed: %s", error or type(error).__name__)
                return
            on_error.pop_all()
        self._connections[peer] = connection
        self._selector.register(peer, selectors.EVENT_READ, partial(self._receive, peer, connection))

    def _receive(self, peer: socket.socket, connection: _Connection) -> None:
        try:
            if connection.receive():
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        except Exception as error:
            logger.error("the connection of an API worker was closed: %s", error, exc_info=True)
        self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        """Close a connection, unless that was done since the selector returned."""
        if (connection := self._connections.pop(peer, None)) is not None:
            self._selector.unregister(peer)
            connection.close()
