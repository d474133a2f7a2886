"""`hasten serve` in a subprocess, and a plain HTTP client for it."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import signal
import subprocess
import sys
from typing import Any


class Server:
    """A running server; the constructor waits until it is ready."""

    def __init__(self, *words: str, **environment: str) -> None:
        command = [sys.executable, "-m", "hasten", "serve", "--port", "0", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        # A test that fails may not stop it.
        atexit.register(self.process.kill)
        assert self.process.stdout is not None
        self.grpc_port = 0
        for line in self.process.stdout:
            if line.startswith("gRPC on "):
                self.grpc_port = int(line.rsplit(":", 1)[1])
            elif line.startswith("ready on "):
                self.port = int(line.rsplit(":", 1)[1])
                return
        raise AssertionError(f"not ready: {self.process.stderr and self.process.stderr.read()}")

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return status, headers and body."""
        connection = self.connect()
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request that must succeed and return the decoded body."""
        status, _, content = self.ask(method, path, body)
        assert status == 200, content
        return json.loads(content)

    def stop(self) -> tuple[int, str]:
        """Stop the server and return its exit code and stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors
