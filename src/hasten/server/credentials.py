"""The API keys and the TLS certificate of a process, which SIGHUP reads again."""

from __future__ import annotations

import logging

from hasten.core.errors import PlanError
from hasten.server.auth import ApiKeys
from hasten.server.settings import Settings
from hasten.server.tls import Tls, TlsFiles

logger = logging.getLogger("hasten")


class Credentials:
    """API keys and TLS certificate as the settings name them; the constructor raises if a file is invalid."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.keys = ApiKeys.read(settings.api_key_file)
        files = TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self.tls = None if files is None else Tls(files)

    def reload(self, *, is_quiet: bool = False) -> None:
        """Read changed files again; what is invalid stays as it was. If quiet, another process logs the result."""
        success, failure = (logging.DEBUG, logging.DEBUG) if is_quiet else (logging.INFO, logging.ERROR)
        if self._settings.api_key_file is not None:
            try:
                self.keys = ApiKeys.read(self._settings.api_key_file)
            except PlanError as error:
                logger.log(failure, "the API keys were not reloaded: %s", error)
            else:
                logger.log(success, "reloaded %d API keys", len(self.keys))
        if self.tls is not None:
            try:
                self.tls.reload()
            except (PlanError, OSError) as error:
                logger.log(failure, "the TLS certificate was not reloaded: %s", error)
            else:
                logger.log(success, "reloaded the TLS certificate")
