"""Where hasten keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    given = os.environ.get("HASTEN_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hasten"
