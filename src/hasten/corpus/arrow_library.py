"""Load pyarrow, which is optional, and translate its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hasten.core.errors import InputError, missing_package


def require_arrow(needed_for: str) -> None:
    """Raise UnsupportedError with a hint if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise missing_package("pyarrow", needed_for, "data") from error


@contextmanager
def arrow_errors(problem: str) -> Iterator[None]:
    """Raise a one-line InputError for the errors of pyarrow."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError) as error:
        raise InputError(f"{problem}: {' '.join(str(error).split())[:200]}") from error
