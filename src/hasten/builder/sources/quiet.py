"""Silence libraries while they load and trace, and shorten their errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings, transformers' logs and its progress bars: a build has its own display."""
    from transformers.utils import logging as transformers_logging

    level, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    exporter_log = logging.getLogger("torch.onnx")
    exporter_level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        exporter_log.setLevel(exporter_level)
        if had_bars:
            transformers_logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
