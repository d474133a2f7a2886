"""Virtual environments of the peers, created from their requirements on first use."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from provenance import provenance

PEERS = Path(__file__).parent / "peers"
# Packages whose versions may affect a result.
_RECORDED = """
fastapi grpcio hasten httptools litserve numpy nvidia-pytriton onnxruntime openvino pydantic ray starlette tokenizers
torch transformers uvicorn uvloop
"""


def peers_python(folder: Path) -> str:
    """Return the interpreter of the Python peers; create their environment if needed."""
    return _environment(folder, ["-r", str(PEERS / "requirements.txt")])


def triton_python(folder: Path) -> str:
    """Return the interpreter of tritonserver's environment; create it if needed."""
    requirements = ["-r", str(PEERS / "requirements-triton.txt")]
    return _environment(folder, requirements, ["--no-deps", "nvidia-pytriton==0.7.0"])


def _environment(folder: Path, *installs: list[str]) -> str:
    # The marker file is written last, so that an interrupted installation is repeated.
    python, finished = folder / "bin" / "python", folder / "finished"
    if not finished.exists():
        print(f"creating {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        for arguments in installs:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)
        finished.touch()
    return str(python)


def versions(python: str) -> dict[str, str]:
    """Return the versions of the recorded packages in an environment."""
    packages = json.loads(subprocess.check_output([python, "-m", "pip", "list", "--format", "json"], text=True))
    return {entry["name"]: entry["version"] for entry in packages if entry["name"].lower() in _RECORDED.split()}


def provenance_with_versions(pythons: dict[str, str]) -> dict[str, Any]:
    """Return the provenance of a result with the package versions of each interpreter."""
    return provenance() | {"versions": {name: versions(python) for name, python in pythons.items()}}
