"""Quantizers print, log and draw progress bars, each in its own way; ours is the only voice a user should hear."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def silenced() -> Iterator[None]:
    before = logging.root.manager.disable
    # Their advice goes to the root logger or to one of their own, so all are stopped.
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
