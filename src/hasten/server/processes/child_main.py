"""The beginning and the end of every child process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

from hasten.server.processes.control import ControlChannel
from hasten.server.processes.messages import Configure, decode_settings
from hasten.server.settings import Settings
from hasten.server.telemetry import logs

# The parent coordinates the shutdown; these may be sent to all processes of a service at once.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time in which the end of the parent becomes visible after its channel has closed.
_PARENT_EXIT_S = 0.5


def control_socket() -> socket.socket:
    """Return this end of the control channel, which the command line names; call first."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    return end


def settings_of(request: Configure) -> Settings:
    """Return the settings of the server, and set up the log that they describe."""
    settings = decode_settings(request.settings)
    logs.set_up(settings.log_format)
    return settings


async def end_with_parent(channel: ControlChannel) -> None:
    """End this process when the parent closes the channel or dies."""
    await channel.closed.wait()
    os._exit(0)


async def remove_after_parent(directory: Path, parent: int) -> None:
    """Remove the parent's temporary directory if the parent has died."""
    until = time.monotonic() + _PARENT_EXIT_S
    while os.getppid() == parent and time.monotonic() < until:
        await asyncio.sleep(0.01)
    if os.getppid() != parent:
        shutil.rmtree(directory, ignore_errors=True)
