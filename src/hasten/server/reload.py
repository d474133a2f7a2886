"""Bundles that changed on the disk take the place of those that are served, without a lost request."""

from __future__ import annotations

import logging
from pathlib import Path

from hasten.core.errors import HastenError
from hasten.server.models import Models

logger = logging.getLogger("hasten")


class Changes:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._stamps = {name: _stamp(path) for name, path in models.paths.items()}

    def reload(self) -> None:
        """What cannot be opened leaves what is served in its place, and is tried again when it changes again."""
        there = {served.name for served in self._models}
        for name, path in self._models.paths.items():
            stamp = _stamp(path)
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


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """A bundle's manifest names every file with its hash: where it is the same, all is."""
    try:
        about = (path / "manifest.json").stat()
    except OSError:
        return None  # being replaced
    return about.st_ino, about.st_mtime_ns, about.st_size
