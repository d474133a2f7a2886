"""An engine process without a parent: its models are loaded by lines on its standard input."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_MAIN = """
import json, sys
from pathlib import Path
from hasten.core.errors import HastenError
from hasten.server.processes.engine_process import EngineHost
from hasten.server.settings import Settings

directory, index, options = sys.argv[1:]
host = EngineHost(Settings(**json.loads(options)), Path(directory), int(index))
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        result = getattr(host, name)(*arguments)
    except HastenError as error:
        result = {"error": type(error).__name__, "message": error.message}
    print(json.dumps(result.decode() if isinstance(result, bytes) else result), flush=True)
host.close(0.0)
"""


class EngineProcess:
    """A running engine process; `call` calls a method of its host."""

    def __init__(
        self, directory: Path, index: int = 0, environment: dict[str, str] | None = None, **settings: Any
    ) -> None:
        directory.chmod(0o700)
        command = [sys.executable, "-c", _MAIN, str(directory), str(index), json.dumps({"threads": 1, **settings})]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        # A test that fails may not stop it.
        atexit.register(self.process.kill)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the host and return its result."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, *map(_plain, arguments)]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the engine process has ended: {self.process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        """End the process as a crash does."""
        self.process.kill()
        self._close()

    def stop(self) -> int:
        """End the process as its parent does, and return its exit code."""
        self._close()
        return self.process.returncode

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait(30)


def _plain(argument: object) -> object:
    return str(argument) if isinstance(argument, Path) else argument
