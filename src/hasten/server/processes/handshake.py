"""The start of a connection to an engine process: which model, what its sessions are, and the memory to share."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from hasten.core.errors import PlanError
from hasten.core.tensors import SessionSpec
from hasten.server.processes.shared_batches import ProtocolError

Message = TypeVar("Message", bound=msgspec.Struct)

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 2**20


class Hello(msgspec.Struct, frozen=True):
    """The first message of an API worker."""

    model: str
    generation: int


class Description(msgspec.Struct, frozen=True):
    """A model of an engine process."""

    # The digest of the bundle's manifest.
    digest: str
    variant: str
    spec: SessionSpec
    instances: int
    tokens_per_batch: int
    rows_per_batch: int
    is_packed: bool

    def is_compatible(self, other: Description) -> bool:
        """Return whether both processes give the same answers, however many sessions each has."""
        return (self.digest, self.variant, self.spec) == (other.digest, other.variant, other.spec)


class Welcome(msgspec.Struct, frozen=True):
    """The answer: with a description, two file descriptors follow; without, the model is not loaded (yet)."""

    description: Description | None = None


def socket_path(directory: Path, engine: int) -> str:
    """Return the path of the socket of an engine process."""
    return str(directory / f"engine-{engine}.sock")


def check_private(directory: Path) -> None:
    """Raise PlanError unless the directory is this user's and closed to all others: sockets in it trust their peers."""
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise PlanError(f"{directory} is not a private directory of this user", hint=f"chmod 700 {directory}")


def send(peer: socket.socket, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
    """Send a message and file descriptors."""
    text = msgspec.json.encode(message)
    data = _LENGTH.pack(len(text)) + text
    sent = socket.send_fds(peer, [data], descriptors)
    # An empty rest is not sent: the peer may have answered and closed, and the send would fail.
    if sent < len(data):
        peer.sendall(data[sent:])


def receive(peer: socket.socket, kind: type[Message], descriptors: int = 0) -> tuple[Message, list[int]]:
    """Receive a message and up to this many file descriptors, which the caller owns; raise EOFError at the end."""
    data, received, _, _ = socket.recv_fds(peer, 2**16, descriptors)
    try:
        while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _size(data):
            more = peer.recv(2**16)
            if not data or not more:
                raise EOFError
            data += more
        return msgspec.json.decode(data[_LENGTH.size :], type=kind), received
    except BaseException as error:
        for descriptor in received:
            os.close(descriptor)
        if isinstance(error, msgspec.MsgspecError):
            raise ProtocolError(f"the handshake cannot be read: {error}") from error
        raise


def _size(data: bytes) -> int:
    size: int = _LENGTH.unpack_from(data)[0]
    if size > _MAX_BYTES:
        raise ProtocolError(f"the handshake has {size} bytes")
    return size
