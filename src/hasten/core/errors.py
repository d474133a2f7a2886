"""Every error hasten raises on purpose.

HastenError                what, why, and a hint for the next step
├── PlanError         2    the request contradicts itself or names something unknown
├── InputError        2    a text or a data file that cannot be answered
├── UnsupportedError  3    a sound request that this machine or this installation cannot fulfil
├── StageError        4    a stage of the work failed
├── AccuracyError     5    no variant answers like the original
├── BundleError       6    a bundle that is missing, damaged or not ours
└── ServeError        7    a request that a server does not answer
    ├── UnauthorizedError  whoever asks has no key
    ├── TooLargeError      more than it was told to take at once
    ├── OverloadedError    more than it can take now: later, or elsewhere
    ├── DeadlineError      not in the time that was given
    └── UnavailableError   not while it starts, stops or is broken

The number is the exit code of the command line; a server answers with the codes of its protocol
(`server/exchange.py`). Vendors' exceptions are translated where the vendor is called.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.core.report import Candidate

# Of the variants that were refused, in one line.
_TOLD = 3


class HastenError(Exception):
    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class PlanError(HastenError):
    exit_code = 2


class InputError(HastenError):
    exit_code = 2


class UnsupportedError(HastenError):
    exit_code = 3


class StageError(HastenError):
    exit_code = 4


class AccuracyError(HastenError):
    """Carries the refused candidates, so that whoever catches it can show the numbers."""

    exit_code = 5

    def __init__(self, message: str, *, hint: str | None = None, candidates: Sequence[Candidate] = ()) -> None:
        super().__init__(message, hint=hint)
        self.candidates = tuple(candidates)

    def __str__(self) -> str:
        """With why the first of them were refused: in Python nobody prints the table."""
        judged = [one for one in self.candidates if one.verdict is not None] or self.candidates
        reasons = "; ".join(f"{one.variant}: {one.reason}" for one in judged[:_TOLD])
        more = f"; and {len(judged) - _TOLD} more" if len(judged) > _TOLD else ""
        return f"{super().__str__()}: {reasons}{more}" if reasons else super().__str__()


class BundleError(HastenError):
    exit_code = 6


class ServeError(HastenError):
    exit_code = 7


class UnauthorizedError(ServeError):
    pass


class TooLargeError(ServeError):
    pass


class OverloadedError(ServeError):
    """Carries how long to wait before it is worth trying again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, hint=f"try again in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class DeadlineError(ServeError):
    pass


class UnavailableError(ServeError):
    pass


def missing_package(package: str, needed_for: str, extra: str | None = None) -> UnsupportedError:
    """The one wording for an optional library that is not installed."""
    command = f"pip install 'hasten[{extra}]'" if extra else f"pip install {package}"
    return UnsupportedError(f"{needed_for} needs the package '{package}', which is not installed", hint=command)


# With less than this left, a vendor's failure to write is a full disk, whatever it calls it.
_NO_SPACE_BYTES = 2**22


@contextmanager
def translate_os_errors(doing: str, place: Path | None = None) -> Iterator[None]:
    """Give a full disk or a read-only directory one clear line instead of a traceback or a vendor's riddle."""
    try:
        yield
    except StageError as error:
        if isinstance(error.__cause__, OSError):
            raise _translated(error.__cause__, doing) or error from error.__cause__
        if place is not None and shutil.disk_usage(place).free < _NO_SPACE_BYTES:
            raise _full_disk(doing) from error
        raise
    except OSError as error:
        translated = _translated(error, doing)
        if translated is None:
            raise
        raise translated from error


def _translated(error: OSError, doing: str) -> StageError | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _full_disk(doing)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StageError(f"not allowed to write: {doing}", hint="choose another place with -o")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StageError(f"a file is in the way: {doing}", hint="choose another place with -o")
    return None


def _full_disk(doing: str) -> StageError:
    return StageError(f"the disk is full: {doing}", hint="free some space, or choose another place with -o and TMPDIR")
