"""Create virtual environments for tests, once, in a directory that a variable names or in the user's cache."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def folder(name: str) -> Path:
    """Return the directory of an environment: `HASTEN_RAY_ENV` for "ray", or a folder in the user's cache.

    All clones share it, since installing takes minutes; other constraints or another Python get another folder.
    """
    override = os.environ.get(f"HASTEN_{name.upper()}_ENV")
    if override:
        return Path(override)
    version = f"{sys.version_info.major}.{sys.version_info.minor}-{zlib.crc32(CONSTRAINTS.read_bytes()):08x}"
    return user_cache() / f"{name}-{version}"


def user_cache() -> Path:
    """Return the directory that tests of all clones share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hasten-tests"


def python(environment: Path, *installs: str, has_ours: bool = False) -> Path:
    """Return the environment's Python, after pip has installed the requirements; fail the test if pip fails.

    With `has_ours`, the environment also sees the packages of this one. An existing environment is used as it is, and
    any other non-empty directory is left alone: only an interrupted installation of ours is ever deleted.
    """
    with making(environment):
        return _python(environment, installs, has_ours)


def making(environment: Path) -> FileLock:
    """Return a lock, so that one of several test processes creates the environment; it lies outside of it."""
    name = f"tests-of-hasten-{os.getuid()}-{zlib.crc32(bytes(environment)):08x}.lock"
    return FileLock(Path(tempfile.gettempdir()) / name)


def _python(environment: Path, installs: Sequence[str], has_ours: bool) -> Path:
    interpreter, marker = environment / "bin" / "python", environment / "hasten-tests-begun"
    if marker.exists():
        shutil.rmtree(environment)
    if not interpreter.exists():
        if environment.is_dir() and any(environment.iterdir()):
            pytest.skip(f"{environment} is not empty and is not a virtual environment")
        environment.mkdir(parents=True, exist_ok=True)
        marker.touch()
        _run([sys.executable, "-m", "venv", environment])
        _link_ours(environment, has_ours)
        for requirement in installs:
            _run([interpreter, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *shlex.split(requirement)])
        marker.unlink()
    # The environment may have been created from another clone.
    _link_ours(environment, has_ours)
    return interpreter


def _link_ours(environment: Path, has_ours: bool) -> None:
    if has_ours:
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(sysconfig.get_path("purelib"))


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "it failed").splitlines()[-1]
        pytest.fail(f"{shlex.join(map(str, command[1:]))}: {reason}")
