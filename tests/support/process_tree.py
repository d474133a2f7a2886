"""The processes of `hasten serve --workers`, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

from support.server_operations import Running

_ESTABLISHED = "01"


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class ServerProcesses:
    """The children of a server's parent process."""

    def __init__(self, server: Running) -> None:
        self._parent = server.process.pid

    @property
    def workers(self) -> list[int]:
        """Return the ids of the API workers that run."""
        return self._running("api_worker")

    @property
    def engines(self) -> list[int]:
        """Return the ids of the engine processes that run."""
        return self._running("engine_main")

    @property
    def all(self) -> list[int]:
        """Return the ids of all children that run."""
        return self._running("")

    def connections(self, pid: int, port: int) -> int:
        """Return how many clients of the port a process is connected to."""
        inodes = {
            fields[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if (fields := line.split())[3] == _ESTABLISHED and int(fields[1].rpartition(":")[2], 16) == port
        }
        links = [link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
        return len({link for link in links if link.startswith("socket:[") and link[8:-1] in inodes})

    def _running(self, module: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and is_alive(pid := int(entry.name)):
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    command = (entry / "cmdline").read_text()
                except OSError:
                    continue
                if parent == self._parent and module in command:
                    found.append(pid)
        return sorted(found)
