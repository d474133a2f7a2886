"""Bundles that changed on the disk take the place of those that are served, without a lost request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from hasten.bundle.manifest import FILE
from hasten.core.errors import HastenError
from hasten.server.models import Models

logger = logging.getLogger("hasten")

# Of every file: its name, what it is on the disk, when it was written, and its size.
Stamp = frozenset[tuple[str, int, int, int]]


class Changes:
    """Made before the models are loaded: what changes while they are is not missed."""

    def __init__(self, models: Models, paths: Mapping[str, Path]) -> None:
        self._models = models
        self._stamps = {name: _stamp(path) for name, path in paths.items()}

    def reload(self) -> None:
        """What cannot be opened leaves what is served in its place, and is tried again when it changes again."""
        there = {served.name for served in self._models}
        for name, path in self._models.paths.items():
            stamp = _stamp(path)
            if stamp is None and self._stamps.get(name) is not None:
                self._stamps[name] = None
                logger.warning("%s is gone from %s: what was loaded of it stays", name, path)
            if name not in there or stamp is None or stamp == self._stamps.get(name):
                continue
            self._stamps[name] = stamp
            try:
                served = self._models.load(path, name)
            except HastenError as error:
                logger.error("%s has changed and cannot be served, the one before stays: %s", name, error)
            except Exception:
                logger.exception("%s has changed and cannot be served, the one before stays", name)
            else:
                logger.info("%s has changed: %s is served now", name, served.variant)


def _stamp(path: Path) -> Stamp | None:
    """None while it is being replaced. All files, not the manifest alone: those that come file by file come last."""
    try:
        if not (path / FILE).is_file():
            return None
        found = ((file, file.stat()) for file in path.rglob("*") if file.is_file())
        return frozenset(
            (str(file.relative_to(path)), about.st_ino, about.st_mtime_ns, about.st_size) for file, about in found
        )
    except OSError:
        return None
