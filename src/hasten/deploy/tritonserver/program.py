"""NVIDIA's own tritonserver, without a container: the binary that nvidia-pytriton carries, with its Python backend.

It runs in a virtual environment of its own, since its backend needs an older NumPy than we do. That is made once, in
`$HASTEN_TRITON_ENV` or the cache. A binary of one's own is taken as it is.
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

from hasten.core.cache import cache_directory
from hasten.core.closing import Closing
from hasten.core.errors import PlanError, StageError, UnsupportedError, translate_os_errors

_PACKAGES = (("--no-deps", "nvidia-pytriton==0.7.0"), ("numpy<2", "onnxruntime", "tokenizers", "msgspec"))
_GLIBC = (2, 35)
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_HINT = "--check takes the path of a tritonserver of your own, or the address of one that runs: 127.0.0.1:8000"
_SHOWN_CHARACTERS = 2000
# It takes its ports after it has loaded its models: somebody else may have taken them by then.
_STARTS, _TAKEN = 3, "already in use"
# In an environment that we make: first, so that no other is ever cleared, and last.
_BEGUN, _COMPLETE = "begun", "complete"


@dataclass(frozen=True, slots=True)
class Program:
    """A tritonserver that can be started."""

    binary: Path
    # Of PyPI's: where its Python backend finds its packages. One of one's own has all that it needs.
    environment: Path | None = None

    @classmethod
    def find(cls, given: str | None, packages: Sequence[str] = ()) -> Program:
        """A binary, an environment that `installed` made, or an empty folder for one; none given, PyPI's."""
        if given:
            path = Path(given).expanduser()
            if path.is_file():
                if not os.access(path, os.X_OK):
                    raise PlanError(f"{path} is no program", hint=_HINT)
                return cls(path)
            if not path.exists():
                raise PlanError(f"there is no tritonserver at {path}", hint=_HINT)
            return cls.installed(path, packages)
        chosen = os.environ.get("HASTEN_TRITON_ENV")
        return cls.installed(Path(chosen) if chosen else cache_directory() / "tritonserver", packages)

    @classmethod
    def installed(cls, environment: Path, packages: Sequence[str] = ()) -> Program:
        """PyPI's, installed first where it is not yet, with these packages where it lacks them."""
        kind, version = platform.libc_ver()
        if sys.platform != "linux" or kind != "glibc" or tuple(map(int, version.split("."))) < _GLIBC:
            raise UnsupportedError("PyPI's tritonserver needs Linux with glibc 2.35 or newer", hint=_HINT)
        if not (_library() / str(sysconfig.get_config_var("INSTSONAME"))).exists():
            raise UnsupportedError(
                "this Python has no shared library, which tritonserver's Python backend loads", hint=_HINT
            )
        if not (environment / _COMPLETE).exists():
            _make(environment)
        site = environment / "lib" / f"python{_PYTHON}" / "site-packages"
        missing = [package for package in packages if not list(site.glob(f"{_name(package)}-*.dist-info"))]
        if missing:
            _install(environment, ["numpy<2", *missing])
        root = site / "pytriton" / "tritonserver"
        if not _stub(root).exists():
            raise UnsupportedError(f"PyPI's tritonserver has no Python backend for Python {_PYTHON}", hint=_HINT)
        return cls(root / "bin" / "tritonserver", environment)


def _make(environment: Path) -> None:
    """From the beginning, also where we were interrupted before; what somebody else made is left alone."""
    with translate_os_errors(f"installing tritonserver in {environment}"):
        if environment.exists() and any(environment.iterdir()) and not (environment / _BEGUN).exists():
            raise PlanError(f"{environment} is not empty, and holds no tritonserver of ours", hint=_HINT)
        shutil.rmtree(environment, ignore_errors=True)
        environment.mkdir(parents=True)
        (environment / _BEGUN).touch()
    _do([sys.executable, "-m", "venv", str(environment)])
    for words in _PACKAGES:
        _install(environment, words)
    (environment / _COMPLETE).touch()


def _install(environment: Path, words: Sequence[str]) -> None:
    _do([str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *words])


def _do(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"{command[2]} failed"]
        raise UnsupportedError(f"tritonserver cannot be installed: {told[-1]}", hint=_HINT)


def _name(package: str) -> str:
    return re.split(r"[<>=!~\[; ]", package)[0].replace("-", "_")


def _library() -> Path:
    return Path(str(sysconfig.get_config_var("LIBDIR")))


def _stub(root: Path) -> Path:
    return root / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"


class TritonServer(Closing):
    """A process of its own, ready when this is made; `place` is a folder for what it needs and writes."""

    def __init__(
        self,
        program: Program,
        repository: Path,
        place: Path,
        *,
        words: Sequence[str] = (),
        is_lenient: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        """Lenient, it runs although models do not load: its index then says why."""
        self._log = place / "log"
        # What it leaves in /dev/shm where it dies.
        self._region = f"hasten-{uuid.uuid4().hex[:8]}"
        command: list[str | Path] = [
            program.binary,
            f"--model-repository={repository}",
            f"--backend-config=python,shm-region-prefix-name={self._region}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--allow-metrics=false",
            # Clients that are still connected hold it up.
            "--exit-timeout-secs=5",
            *(("--exit-on-error=false", "--strict-readiness=false") if is_lenient else ()),
            *words,
        ]
        variables = dict(os.environ)
        if program.environment is not None:
            command.append(f"--backend-directory={_backends(program, place)}")
            command.append(f"--cache-directory={program.binary.parents[1] / 'caches'}")
            variables["PATH"] = f"{program.environment / 'bin'}:{os.environ['PATH']}"
            variables["LD_LIBRARY_PATH"] = str(_library())
        for _ in range(_STARTS):
            self.port, self.grpc_port = _free_ports()
            ports = (f"--http-port={self.port}", f"--grpc-port={self.grpc_port}")
            with self._log.open("w") as log:
                try:
                    self._process = subprocess.Popen([*command, *ports], stdout=log, stderr=log, env=variables)
                except OSError as error:
                    raise PlanError(f"{program.binary} is no program: {error.strerror}", hint=_HINT) from error
            if self._is_ready(timeout_s):
                return
            self.close()
            told = _told(self._log) or f"it wrote nothing, and ended with exit code {self._process.returncode}"
            if _TAKEN not in told:
                break
        raise StageError(f"tritonserver does not start: {told}", hint=_HINT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for left in Path("/dev/shm").glob(f"{self._region}*"):
            left.unlink(missing_ok=True)

    def _is_ready(self, timeout_s: float) -> bool:
        """Waits until it is, or has ended."""
        end = time.monotonic() + timeout_s
        try:
            while self._process.poll() is None and time.monotonic() < end:
                with suppress(OSError), urllib.request.urlopen(f"{self.url}/v2/health/ready", timeout=1):
                    return True
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise
        return False


def _told(log: Path) -> str:
    """The errors it wrote, or what it wrote last."""
    text = log.read_text(errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("E")]
    return ("\n".join(errors) or text)[-_SHOWN_CHARACTERS:]


def _backends(program: Program, place: Path) -> Path:
    """Where it looks for them; links, since what it loads is found beside where a file really is."""
    root = program.binary.parents[1]
    folder = place / "backends" / "python"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in (*(root / "backends" / "python").glob("*.*"), _stub(root)):
        (folder / file.name).symlink_to(file)
    return folder.parent


def _free_ports() -> tuple[int, int]:
    """Held until both are found, so that they are two."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
