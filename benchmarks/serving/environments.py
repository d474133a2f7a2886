"""Where peers live: a virtual environment each, made from their requirements where it is not there yet."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hasten.core.hardware import this_machine

PEERS = Path(__file__).parent / "peers"
# What a figure may depend on.
_TOLD = """
fastapi grpcio hasten httptools litserve numpy nvidia-pytriton onnxruntime openvino pydantic ray starlette tokenizers
torch transformers uvicorn uvloop
"""


def peers_python(folder: Path) -> str:
    return _environment(folder, ["-r", str(PEERS / "requirements.txt")])


def triton_python(folder: Path) -> str:
    requirements = ["-r", str(PEERS / "requirements-triton.txt")]
    return _environment(folder, requirements, ["--no-deps", "nvidia-pytriton==0.7.0"])


def ray_python(folder: Path) -> str:
    """Ours with Ray Serve."""
    return _environment(folder, ["-e", f"{PEERS.parents[2]}[ray]"])


def _environment(folder: Path, *installs: list[str]) -> str:
    """Finished last: one that was interrupted is made again."""
    python, finished = folder / "bin" / "python", folder / "finished"
    if not finished.exists():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for words in installs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *words], check=True)
        finished.touch()
    return str(python)


def versions(python: str) -> dict[str, str]:
    listed = subprocess.check_output([python, "-m", "pip", "list", "--format", "json"], text=True)
    return {entry["name"]: entry["version"] for entry in json.loads(listed) if entry["name"].lower() in _TOLD.split()}


def about(pythons: dict[str, str]) -> dict[str, Any]:
    """What every result carries: when, where, of which commit, with which libraries."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(),
        "commit": commit(),
        "versions": {name: versions(python) for name, python in pythons.items()},
    }


def commit() -> str | None:
    """With a word where the code is not as it was committed; None where it came without its history."""
    words = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.check_output(words, text=True, cwd=PEERS, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
