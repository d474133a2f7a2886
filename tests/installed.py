"""Virtual environments of what tests need beside us, made once: in a folder that a variable names, or the cache."""

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

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def folder(config: pytest.Config, name: str) -> Path:
    """Where it is, or will be: `HASTEN_RAY_ENV` for "ray"."""
    given = os.environ.get(f"HASTEN_{name.upper()}_ENV")
    return Path(given) if given else config.cache.mkdir(name) / "environment"


def python(environment: Path, *installs: str, has_ours: bool = False) -> Path:
    """Its Python, once pip has installed that; `has_ours` lets it see this one's packages, where it has none itself.

    Where pip cannot, tests are skipped. An environment that somebody else made is taken as it is, and a folder that is
    none is left alone: only what was begun here, and interrupted, is ever deleted.
    """
    with making(environment):
        return _python(environment, installs, has_ours)


def making(environment: Path) -> FileLock:
    """Tests run in several processes, and one makes it for all. Not beside it: there it may be somebody else's."""
    name = f"tests-of-hasten-{os.getuid()}-{zlib.crc32(bytes(environment)):08x}.lock"
    return FileLock(Path(tempfile.gettempdir()) / name)


def _python(environment: Path, installs: Sequence[str], has_ours: bool) -> Path:
    found, begun = environment / "bin" / "python", environment / "hasten-tests-begun"
    if begun.exists():
        shutil.rmtree(environment)
    if not found.exists():
        if environment.is_dir() and any(environment.iterdir()):
            pytest.skip(f"{environment} is not empty and no virtual environment")
        environment.mkdir(parents=True, exist_ok=True)
        begun.touch()
        _do([sys.executable, "-m", "venv", environment])
        if has_ours:
            (site,) = environment.glob("lib/python*/site-packages")
            (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
        for words in installs:
            _do([found, "-m", "pip", "install", "--quiet", *shlex.split(words)])
        begun.unlink()
    return found


def _do(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip() or "it failed").splitlines()[-1]
        pytest.skip(f"{shlex.join(map(str, command[1:]))}: {why}")
