"""What libraries say while they load and trace: kept quiet, and of their errors the first line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """transformers draws bars and logs advice for people who train; a build has a display of its own."""
    from transformers.utils import logging as theirs

    level, had_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    root = logging.getLogger("torch.onnx")
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        root.setLevel(before)
        if had_bars:
            theirs.enable_progress_bar()


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def loading_hint(error: Exception) -> str | None:
    return "--trust-remote-code if you trust its author" if "trust_remote_code" in str(error) else None
