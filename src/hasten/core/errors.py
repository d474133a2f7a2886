"""Every error that hasten raises on purpose.

HastenError                what failed, why, and a hint for the next step
├── PlanError         2    the request contradicts itself or names something unknown
├── InputError        2    invalid input: a text or a data file
├── UnsupportedError  3    a valid request that this machine or installation does not support
├── StageError        4    a stage of the work failed
├── AccuracyError     5    no variant answers like the reference
├── BundleError       6    a bundle is missing, damaged or of an unknown format
└── ServeError        7    the server rejected the request
    ├── UnauthorizedError  the API key is missing or invalid
    ├── ForbiddenError     the server is set to allow no such request
    ├── TooLargeError      the request exceeds a size limit
    ├── OverloadedError    the server is overloaded: retry later or elsewhere
    ├── DeadlineError      the deadline was exceeded
    └── UnavailableError   the server or the model is starting, stopping or broken

The number is the exit code of the command line; a server answers with the codes of its protocol
(`server/http/exchange.py`). Vendors' exceptions are translated where the vendor is called.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

# The rejected variants that an AccuracyError names in its message.
_MAX_NAMED_CANDIDATES = 3
# With less free space than this, a vendor's failure to write means a full disk, whatever the vendor calls it.
_FULL_DISK_BYTES = 2**22


class RejectedCandidate(Protocol):
    """A variant that was rejected, as `core/report.py` records it: errors must not import the report."""

    @property
    def variant(self) -> str:
        """Return the name of the variant."""

    @property
    def reason(self) -> str:
        """Return why it was rejected."""

    @property
    def verdict(self) -> object:
        """Return the verdict on its accuracy, or None if it was not judged."""


class HastenError(Exception):
    """The base of all errors: what failed and why, with a hint for the next step."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = one_line(message)
        self.hint = hint
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def one_line(message: str) -> str:
    """Return a message as one printable line: it may quote a stranger's file, whose escapes a terminal would obey."""
    if message.isprintable():
        return message
    return "".join(
        char if char.isprintable() else " " if char.isspace() else char.encode("unicode_escape").decode()
        for char in message
    )


class PlanError(HastenError):
    """The request contradicts itself or names something unknown."""

    exit_code = 2


class InputError(HastenError):
    """A text or a data file is invalid."""

    exit_code = 2


class UnsupportedError(HastenError):
    """The request is valid, but this machine or installation does not support it."""

    exit_code = 3


class StageError(HastenError):
    """A stage of the work failed."""

    exit_code = 4


class AccuracyError(HastenError):
    """A variant, or every variant, failed the accuracy gate. Carries the rejected candidates and their measurements."""

    exit_code = 5

    def __init__(self, message: str, *, hint: str | None = None, candidates: Sequence[RejectedCandidate] = ()) -> None:
        super().__init__(message, hint=hint)
        self.candidates = tuple(candidates)

    def __str__(self) -> str:
        """Include the first rejections: a Python caller does not see the table that the command line prints."""
        judged = [candidate for candidate in self.candidates if candidate.verdict is not None] or self.candidates
        reasons = "; ".join(f"{candidate.variant}: {candidate.reason}" for candidate in judged[:_MAX_NAMED_CANDIDATES])
        unnamed = len(judged) - _MAX_NAMED_CANDIDATES
        more = f"; and {unnamed} more" if unnamed > 0 else ""
        return f"{super().__str__()}: {reasons}{more}" if reasons else super().__str__()


class BundleError(HastenError):
    """A bundle is missing, damaged or of an unknown format."""

    exit_code = 6


class ServeError(HastenError):
    """The server cannot start, cannot be reached, or rejected the request."""

    exit_code = 7


class UnauthorizedError(ServeError):
    """The API key is missing or invalid."""


class ForbiddenError(ServeError):
    """The server is set to allow no such request from any client."""


class TooLargeError(ServeError):
    """The request exceeds a size limit."""


class OverloadedError(ServeError):
    """The server is overloaded. Carries how long to wait before a retry."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, hint=f"try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class DeadlineError(ServeError):
    """The deadline was exceeded."""


class UnavailableError(ServeError):
    """The server or the model is starting, stopping or broken."""


def missing_package(package: str, needed_for: str, extra: str | None = None) -> UnsupportedError:
    """Return the error for an optional library that is not installed, worded the same everywhere."""
    command = f"pip install 'hasten[{extra}]'" if extra else f"pip install {package}"
    return UnsupportedError(f"{needed_for} needs the package '{package}', which is not installed", hint=command)


@contextmanager
def translate_mismatch(problem: str) -> Iterator[None]:
    """Raise BundleError for what happens when files of a bundle, each of them valid, contradict each other."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError, StopIteration) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BundleError(f"{problem}: {reason}", hint="build the bundle again") from error


@contextmanager
def translate_os_errors(action: str, directory: Path | None = None) -> Iterator[None]:
    """Raise a one-line StageError for a full disk or a read-only directory instead of the vendor's message.

    With `directory`, a StageError that a vendor raised counts as a full disk if no space is left there.
    """
    try:
        yield
    except StageError as error:
        if isinstance(error.__cause__, OSError):
            raise _translate(error.__cause__, action) or error from error.__cause__
        if directory is not None and shutil.disk_usage(directory).free < _FULL_DISK_BYTES:
            raise _full_disk(action) from error
        raise
    except OSError as error:
        translated = _translate(error, action)
        if translated is None:
            raise
        raise translated from error


def _translate(error: OSError, action: str) -> StageError | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full_disk(action)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StageError(f"no permission to write: {action}", hint="choose another directory with -o")
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return StageError(f"a file is in the way: {action}", hint="choose another directory with -o")
    return None


def _full_disk(action: str) -> StageError:
    return StageError(
        f"the disk is full: {action}", hint="free some space, or choose other directories with -o and TMPDIR"
    )
