"""Run NVIDIA's tritonserver without a container: the binary in the package nvidia-pytriton, with its Python backend.

It is installed once into a separate virtual environment, in `$HASTEN_TRITON_ENV` or the cache, since its backend needs
an older NumPy than hasten. A binary named by the user is run as it is.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hasten.core.errors import PlanError, StageError, UnsupportedError, translate_os_errors
from hasten.core.system.cache import cache_directory
from hasten.core.system.closing import Closing

_PACKAGES = (("--no-deps", "nvidia-pytriton==0.7.0"), ("numpy<2", "onnxruntime", "tokenizers", "msgspec"))
_GLIBC = (2, 35)
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_HINT = "--check takes the path of a tritonserver binary, or the address of a running server: 127.0.0.1:8000"
_SHOWN_CHARACTERS = 2000
_START_TIMEOUT_S = 300.0
# It binds its ports after it has loaded its models: another process may have bound them by then.
_MAX_STARTS, _PORT_IN_USE = 3, "already in use"
# Marker files of an environment made by hasten: written first, so that no other is ever cleared, and last.
_BEGUN, _COMPLETE = "begun", "complete"


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A tritonserver that can be started."""

    binary: Path
    # The virtual environment with the packages of the Python backend; None for a binary named by the user.
    environment: Path | None = None

    @classmethod
    def find(cls, location: str | None, packages: Sequence[str] = ()) -> ServerBinary:
        """Find a server: a binary, an environment of `installed`, or an empty folder for one (default: the cache)."""
        if not location:
            environment = os.environ.get("HASTEN_TRITON_ENV") or cache_directory() / "tritonserver"
            return cls.installed(Path(environment), packages)
        path = Path(location).expanduser()
        if not path.exists():
            raise PlanError(f"no tritonserver at {path}: the path does not exist", hint=_HINT)
        if not path.is_file():
            return cls.installed(path, packages)
        if not os.access(path, os.X_OK):
            raise PlanError(f"{path} is not an executable file", hint=_HINT)
        return cls(path)

    @classmethod
    def installed(cls, environment: Path, packages: Sequence[str] = ()) -> ServerBinary:
        """Return the server from PyPI; install it, and packages that it lacks, if necessary."""
        kind, version = platform.libc_ver()
        if sys.platform != "linux" or kind != "glibc" or tuple(map(int, version.split("."))) < _GLIBC:
            raise UnsupportedError("tritonserver from PyPI needs Linux with glibc 2.35 or newer", hint=_HINT)
        if not (_library() / str(sysconfig.get_config_var("INSTSONAME"))).exists():
            reason = "this Python has no shared library, which tritonserver's Python backend loads"
            raise UnsupportedError(reason, hint=_HINT)
        if not (environment / _COMPLETE).exists():
            _create(environment)
        site = environment / "lib" / f"python{_PYTHON}" / "site-packages"
        missing = [package for package in packages if not list(site.glob(f"{_name(package)}-*.dist-info"))]
        if missing:
            _install(environment, ["numpy<2", *missing])
        root = site / "pytriton" / "tritonserver"
        if not _stub(root).exists():
            raise UnsupportedError(f"tritonserver from PyPI has no Python backend for Python {_PYTHON}", hint=_HINT)
        return cls(root / "bin" / "tritonserver", environment)


def _create(environment: Path) -> None:
    """Create the environment anew, also after an interruption; never clear one that hasten did not make."""
    with translate_os_errors(f"installing tritonserver in {environment}"):
        if environment.exists() and any(environment.iterdir()) and not (environment / _BEGUN).exists():
            raise PlanError(f"{environment} is not empty and was not created by hasten", hint=_HINT)
        shutil.rmtree(environment, ignore_errors=True)
        environment.mkdir(parents=True)
        (environment / _BEGUN).touch()
    _execute([sys.executable, "-m", "venv", str(environment)])
    for arguments in _PACKAGES:
        _install(environment, arguments)
    (environment / _COMPLETE).touch()


def _install(environment: Path, arguments: Sequence[str]) -> None:
    _execute([str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *arguments])


def _execute(command: Sequence[str]) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        lines = (process.stderr.strip() or process.stdout.strip()).splitlines() or [f"{command[2]} failed"]
        raise UnsupportedError(f"tritonserver cannot be installed: {lines[-1]}", hint=_HINT)


def _name(package: str) -> str:
    return re.split(r"[<>=!~\[; ]", package)[0].replace("-", "_")


def _library() -> Path:
    return Path(str(sysconfig.get_config_var("LIBDIR")))


def _stub(root: Path) -> Path:
    return root / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"


class TritonServer(Closing):
    """A server process that is ready once constructed; `work` is a folder for its links and its log."""

    def __init__(
        self,
        server: ServerBinary,
        repository: Path,
        work: Path,
        *,
        arguments: Sequence[str] = (),
        is_lenient: bool = False,
    ) -> None:
        """Start the server; a lenient one runs although models do not load, and reports the reasons in its index."""
        self._log = work / "log"
        # The prefix of the files that the server leaves in /dev/shm if it dies.
        self._region = f"hasten-{uuid.uuid4().hex[:8]}"
        command: list[str | Path] = [
            server.binary,
            f"--model-repository={repository}",
            f"--backend-config=python,shm-region-prefix-name={self._region}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--allow-metrics=false",
            # Clients that are still connected delay its exit.
            "--exit-timeout-secs=5",
            *(("--exit-on-error=false", "--strict-readiness=false") if is_lenient else ()),
            *arguments,
        ]
        variables = dict(os.environ)
        if server.environment is not None:
            command.append(f"--backend-directory={_backends(server, work)}")
            command.append(f"--cache-directory={server.binary.parents[1] / 'caches'}")
            variables["PATH"] = f"{server.environment / 'bin'}:{os.environ['PATH']}"
            variables["LD_LIBRARY_PATH"] = str(_library())
        for _ in range(_MAX_STARTS):
            self.port, self.grpc_port = _free_ports()
            ports = (f"--http-port={self.port}", f"--grpc-port={self.grpc_port}")
            with self._log.open("w") as log:
                try:
                    self._process = subprocess.Popen([*command, *ports], stdout=log, stderr=log, env=variables)
                except OSError as error:
                    raise PlanError(f"{server.binary} cannot be executed: {error.strerror}", hint=_HINT) from error
            if self._wait_until_ready():
                return
            self.close()
            reason = _errors(self._log) or f"no output, exit code {self._process.returncode}"
            if _PORT_IN_USE not in reason:
                break
        raise StageError(f"tritonserver does not start: {reason}", hint=_HINT)

    @property
    def url(self) -> str:
        """Return the address of the HTTP API."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop the server and delete its shared memory."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for file in Path("/dev/shm").glob(f"{self._region}*"):
            file.unlink(missing_ok=True)

    def _wait_until_ready(self) -> bool:
        """Return True once the server is ready, or False if it has exited or the time is up."""
        end = time.monotonic() + _START_TIMEOUT_S
        try:
            while self._process.poll() is None and time.monotonic() < end:
                with suppress(OSError), urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=1):
                    return True
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise
        return False


def _errors(log: Path) -> str:
    """Return the errors in the log or, if there are none, its end."""
    text = log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("E")]
    return ("\n".join(errors) or text)[-_SHOWN_CHARACTERS:]


def _backends(server: ServerBinary, work: Path) -> Path:
    """Create a backend directory of links: libraries are still found beside the files that the links lead to."""
    root = server.binary.parents[1]
    folder = work / "backends" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in (*(root / "backends" / "python").glob("*.*"), _stub(root)):
        (folder / file.name).symlink_to(file)
    return folder.parent


def _free_ports() -> tuple[int, int]:
    """Return two free ports; both sockets stay open until both ports are known, so that they differ."""
    with socket.socket() as http, socket.socket() as grpc:
        for probe in (http, grpc):
            probe.bind(("127.0.0.1", 0))
        return int(http.getsockname()[1]), int(grpc.getsockname()[1])
