"""Bundles that changed on the disk, or are new there, are served without a lost request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from hasten.core.errors import HastenError
from hasten.server.models import Models, stamp_of

logger = logging.getLogger("hasten")


class Changes:
    """`paths` tells where bundles are now, by their names."""

    def __init__(self, models: Models, paths: Callable[[], Mapping[str, Path]]) -> None:
        self._models = models
        self._paths = paths
        self._gone: set[str] = set()

    def reload(self) -> int:
        """How many it tried. What cannot be opened leaves what is served in its place, until it changes again."""
        try:
            paths = self._paths()
        except (HastenError, OSError) as error:
            logger.error("what is served stays as it is: %s", error)
            return 1
        there = {served.name for served in self._models}
        known = self._models.paths
        # One that was taken away stays so until it is asked for.
        wanted = {**paths, **known}
        return sum(self._try(name, path) for name, path in wanted.items() if name in there or name not in known)

    def _try(self, name: str, path: Path) -> bool:
        if stamp_of(path) is None:
            if name in self._models.paths and name not in self._gone:
                self._gone.add(name)
                logger.warning("%s is gone from %s: what was loaded of it stays", name, path)
            return False
        self._gone.discard(name)
        is_new = name not in self._models.paths
        why, wrong = ("is new", "") if is_new else ("has changed", ", the one before stays")
        try:
            served = self._models.refresh(path, name)
        except HastenError as error:
            logger.error("%s %s and cannot be served%s: %s", name, why, wrong, error)
        except Exception:
            logger.exception("%s %s and cannot be served%s", name, why, wrong)
        else:
            if served is None:
                return False
            logger.info("%s %s: %s is served now", name, why, served.variant)
        return True
