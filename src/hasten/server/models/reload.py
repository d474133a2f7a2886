"""Hot reload: serve bundles that are new or have changed on disk, without losing a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hasten.core.errors import HastenError
from hasten.server.models.registry import Registry, stamp_of

logger = logging.getLogger("hasten")


class ReloadWatcher:
    """Reloads changed bundles. `paths` returns the current paths of the bundles by name."""

    def __init__(self, models: Registry[Any], paths: Callable[[], Mapping[str, Path]]) -> None:
        self._models = models
        self._paths = paths
        self._missing: set[str] = set()

    def reload(self) -> int:
        """Load new and changed bundles and return the number of bundles tried.

        If a bundle cannot be opened, the old model keeps serving.
        """
        try:
            paths = self._paths()
        except (HastenError, OSError) as error:
            logger.error("reload failed, the loaded models stay: %s", error)
            return 1
        loaded = {model.name for model in self._models}
        known = self._models.paths
        # An unloaded model stays unloaded until a client loads it.
        candidates = {**paths, **known}
        return sum(self._try(name, path) for name, path in candidates.items() if name in loaded or name not in known)

    def _try(self, name: str, path: Path) -> bool:
        if stamp_of(path) is None:
            if name in self._models.paths and name not in self._missing:
                self._missing.add(name)
                logger.warning("%s is missing from %s: the loaded model stays", name, path)
            return False
        self._missing.discard(name)
        is_new = name not in self._models.paths
        change, fallback = ("is new", "") if is_new else ("has changed", ", the previous version stays")
        try:
            model = self._models.refresh(path, name)
        except HastenError as error:
            logger.error("%s %s and cannot be served%s: %s", name, change, fallback, error)
        except Exception:
            logger.exception("%s %s and cannot be served%s", name, change, fallback)
        else:
            if model is None:
                return False
            logger.info("%s %s: now serving %s", name, change, model.variant)
        return True
