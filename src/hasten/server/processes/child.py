"""A child process of the server: start it, talk to it, and end it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from hasten.server.processes.control import ControlChannel, Handler

# Time for a process whose control channel is closed to end by itself.
_EXIT_S = 2.0
_POLL_S = 0.005


class ChildProcess:
    """A running child process. It ends when its control channel closes, as it does when this process dies."""

    def __init__(self, process: subprocess.Popen[bytes], channel: ControlChannel) -> None:
        self._process = process
        self.channel = channel

    @classmethod
    async def start(cls, module: str, handle: Handler, files: Sequence[int] = ()) -> ChildProcess:
        """Run a module with one end of a control channel as its argument; `handle` answers its requests.

        It inherits the files, which keep their numbers.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # In its own session: Ctrl-C reaches this process, which drains the child.
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *files),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        return cls(process, await ControlChannel.open(ours, handle))

    @property
    def id(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait until the process has ended, and return how; it is killed if it lives on after closing its channel."""
        await self.channel.closed.wait()
        until = time.monotonic() + _EXIT_S
        while self._process.poll() is None:
            if time.monotonic() > until:
                self.kill()
            await asyncio.sleep(_POLL_S)
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def end(self) -> None:
        """Ask the process to end."""
        self.channel.close()
