"""The messages that start a connection between processes."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

from hasten.server.processes import handshake
from hasten.server.processes.handshake import Hello


class HastyPeer(socket.socket):
    """A socket whose peer reads the first message and closes before the sender goes on."""

    other: socket.socket

    def sendmsg(self, buffers: Iterable[Any], *arguments: Any) -> int:
        sent = super().sendmsg(buffers, *arguments)
        self.received = handshake.receive(self.other, Hello)[0]
        self.other.close()
        return sent


def test_message_is_sent_to_peer_that_closes_after_reading() -> None:
    ours, other = socket.socketpair()
    with HastyPeer(fileno=ours.detach()) as peer:
        peer.other = other
        handshake.send(peer, Hello("classifier", 1))
        assert peer.received == Hello("classifier", 1)
