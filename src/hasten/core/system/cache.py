"""The cache directory, for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory: `HASTEN_CACHE`, or `hasten` in the user's cache directory."""
    override = os.environ.get("HASTEN_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hasten"
