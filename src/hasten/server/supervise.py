"""A process that starts the server again when it dies or hangs: for those who have no other supervisor."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

logger = logging.getLogger("hasten")

_VARIABLE = "HASTEN_HEARTBEAT"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Whoever lived this long has not died of how it was started.
_LONG_S = 60.0
# A heart that is silent for so much longer than a batch may take has stopped.
_PATIENCE_S = 5.0


class Heart:
    """The beat of a server's event loop, which its supervisor listens to."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    @classmethod
    def inherited(cls) -> Heart:
        given = os.environ.get(_VARIABLE, "")
        return cls(int(given) if given.isdecimal() else None)

    def beat(self) -> bool:
        """Whether there is, as far as anyone knows, still somebody to hear it."""
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, b".")
            except BlockingIOError:
                pass  # the supervisor does not listen now
            except OSError:
                return False
        return True


def supervise(command: Sequence[str], hang_s: float) -> int:
    """Until it ends by itself or is asked to; its exit code."""
    asked_to_stop: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        if number != signal.SIGHUP:
            asked_to_stop.append(number)
        if child is not None:
            with suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    pause = _SHORTEST_PAUSE_S
    while not asked_to_stop:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        begin = time.monotonic()
        # A group of its own: Ctrl-C reaches it once, through us, and not twice, which would mean at once.
        environment = {**os.environ, _VARIABLE: str(writer)}
        child = subprocess.Popen(command, pass_fds=[writer], env=environment, process_group=0)
        os.close(writer)
        if asked_to_stop:  # asked while it was being started
            child.terminate()
        was_ready = _attend(child, reader, hang_s)
        os.close(reader)
        code = child.returncode
        if asked_to_stop or code == 0 or (code > 0 and not was_ready):
            # What cannot start will not start the next time either.
            return code if code >= 0 else 128 - code
        lived = time.monotonic() - begin
        pause = _SHORTEST_PAUSE_S if lived > _LONG_S else min(2 * pause, _LONGEST_PAUSE_S)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        logger.error("the server %s after %.0f s: it is started again in %.1f s", how, lived, pause)
        until = time.monotonic() + pause
        while not asked_to_stop and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
    return 0


def _attend(child: subprocess.Popen[bytes], reader: int, hang_s: float) -> bool:
    """Wait for its end, or bring it about where its heart has stopped; whether it ever beat."""
    was_ready = False
    while True:
        # Loading may take as long as it does.
        ready, _, _ = select.select([reader], [], [], hang_s + _PATIENCE_S if was_ready else None)
        if ready and not os.read(reader, 4096):
            child.wait()
            return was_ready
        if not ready:
            logger.error("the server does not answer any more: it is killed")
            child.kill()
        was_ready = True
