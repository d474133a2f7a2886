"""KServe's own Python client in a virtual environment of its own: its models are made from the published API.

It pins what we do not (NumPy, FastAPI, Ray), so it is installed without what it depends on; its models need little.
Made once, in `$HASTEN_KSERVE_ENV` or pytest's cache.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGES = ("--no-deps kserve", "kubernetes six")


class NotHereError(Exception):
    """Why it cannot be had here."""


def installed(environment: Path) -> Path:
    """Its Python."""
    python, is_complete = environment / "bin" / "python", environment / "complete"
    if not is_complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True, capture_output=True)
        for words in PACKAGES:
            command = [python, "-m", "pip", "install", "--quiet", *words.split(" ")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
                raise NotHereError(f"KServe's client cannot be installed: {why}")
        is_complete.touch()
    return python
