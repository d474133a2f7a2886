"""NVIDIA's own tritonserver, without a container: the binary that nvidia-pytriton carries, with its Python backend.

It runs in a virtual environment of its own, since its backend needs an older NumPy than we do. That is made once, in
`$HASTEN_TRITON_ENV` or pytest's cache.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("--no-deps nvidia-pytriton==0.7.0", "numpy<2 onnxruntime tokenizers")
GLIBC = (2, 35)
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class NotHereError(Exception):
    """Why it cannot run on this machine."""


@dataclass(frozen=True)
class Installed:
    environment: Path

    @classmethod
    def at(cls, environment: Path) -> Installed:
        kind, version = platform.libc_ver()
        if sys.platform != "linux" or kind != "glibc" or tuple(map(int, version.split("."))) < GLIBC:
            raise NotHereError("tritonserver needs Linux with glibc 2.35 or newer")
        if not (cls.library() / str(sysconfig.get_config_var("INSTSONAME"))).exists():
            raise NotHereError("this Python has no shared library, which tritonserver's backend loads")
        is_complete = environment / "complete"
        if not is_complete.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True, capture_output=True)
            for words in PACKAGES:
                command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", *words.split(" ")]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                    raise NotHereError(f"tritonserver cannot be installed: {why}")
            is_complete.touch()
        installed = cls(environment)
        if not installed.stub.exists():
            raise NotHereError(f"tritonserver's Python backend is not made for Python {VERSION}")
        return installed

    @staticmethod
    def library() -> Path:
        return Path(str(sysconfig.get_config_var("LIBDIR")))

    @property
    def root(self) -> Path:
        return self.environment / "lib" / f"python{VERSION}" / "site-packages" / "pytriton" / "tritonserver"

    @property
    def stub(self) -> Path:
        return self.root / "python_backend_stubs" / VERSION / "triton_python_backend_stub"


@dataclass(frozen=True)
class Tensor:
    """Of a model's configuration."""

    name: str
    kind: str
    dims: Sequence[int]

    def __str__(self) -> str:
        return f'{{ name: "{self.name}" data_type: TYPE_{self.kind} dims: {list(self.dims)} }}'


def add_model(
    repository: Path, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], parameters: Mapping[str, str]
) -> None:
    """One that `model.py` answers."""
    (repository / name / "1").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "model.py", repository / name / "1")
    lines = [f'name: "{name}"', 'backend: "python"', "max_batch_size: 0"]
    lines += [
        f"{field}: [{', '.join(map(str, tensors))}]" for field, tensors in (("input", inputs), ("output", outputs))
    ]
    lines += [
        f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"
        for key, value in parameters.items()
    ]
    (repository / name / "config.pbtxt").write_text("\n".join(lines))


class TritonServer:
    """A process of its own, ready when this is made."""

    def __init__(self, installed: Installed, repository: Path, place: Path) -> None:
        self.port, self.grpc_port = _free_port(), _free_port()
        self._log = place / "log"
        # What it leaves in /dev/shm where it dies.
        self._region = f"hasten-{uuid.uuid4().hex[:8]}"
        command = [
            installed.root / "bin" / "tritonserver",
            f"--model-repository={repository}",
            f"--backend-directory={_backends(installed, place)}",
            f"--backend-config=python,shm-region-prefix-name={self._region}",
            "--http-address=127.0.0.1",
            f"--http-port={self.port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--allow-metrics=false",
        ]
        environment = {
            **os.environ,
            "PATH": f"{installed.environment / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(installed.library()),
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self._wait(60.0)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for left in Path("/dev/shm").glob(f"{self._region}*"):
            left.unlink()

    def _wait(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/health/ready", timeout=1):
                return
            time.sleep(0.1)
        self.stop()
        raise NotHereError(f"tritonserver does not start: {self._log.read_text()[-2000:]}")


def _backends(installed: Installed, place: Path) -> Path:
    """Where it looks for them; links, since what it loads is found beside where a file really is."""
    folder = place / "backends" / "python"
    folder.mkdir(parents=True)
    for file in (*(installed.root / "backends" / "python").glob("*.*"), installed.stub):
        (folder / file.name).symlink_to(file)
    return folder.parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
