"""Silence the output of third-party quantizers, which print, log and draw progress bars of their own."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def quiet_logging() -> Iterator[None]:
    """Suppress stdout, warnings and log messages up to WARNING."""
    before = logging.root.manager.disable
    # They log to the root logger or to loggers of their own, so all loggers are disabled.
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
