from __future__ import annotations

import errno

import pytest

import hasten
from hasten.core import errors
from hasten.core.errors import AccuracyError, HastenError, StageError, missing_package, translate_os_errors
from hasten.core.report import Candidate, Status

EXIT_CODES = {
    "PlanError": 2,
    "InputError": 2,
    "UnsupportedError": 3,
    "StageError": 4,
    "AccuracyError": 5,
    "BundleError": 6,
}


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_each_error_is_public_and_has_its_exit_code(name: str, code: int) -> None:
    kind = getattr(hasten, name)
    assert kind is getattr(errors, name)
    assert issubclass(kind, hasten.HastenError)
    assert kind.exit_code == code


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        _ = hasten.biuld


def test_the_hint_follows_the_message() -> None:
    assert str(HastenError("it broke", hint="mend it")) == "it broke (mend it)"
    assert str(HastenError("it broke")) == "it broke"


def test_accuracy_error_carries_the_refused() -> None:
    refused = Candidate("openvino-fp16", Status.INACCURATE, "same label 0.9 < 0.995")
    assert AccuracyError("none may be used", candidates=[refused]).candidates == (refused,)
    assert AccuracyError("none may be used").candidates == ()


def test_accuracy_error_says_why_in_a_line() -> None:
    refused = [Candidate(f"v{place}", Status.INACCURATE, f"0.{place} < 0.9") for place in range(5)]
    told = str(AccuracyError("none may be used", hint="ask for less", candidates=refused))
    assert told == "none may be used (ask for less): v0: 0.0 < 0.9; v1: 0.1 < 0.9; v2: 0.2 < 0.9; and 2 more"
    assert str(AccuracyError("none may be used", hint="ask for less")) == "none may be used (ask for less)"


@pytest.mark.parametrize(
    ("extra", "command"), [(None, "pip install openvino"), ("openvino", "pip install 'hasten[openvino]'")]
)
def test_a_missing_package_is_answered_with_the_command(extra: str | None, command: str) -> None:
    error = missing_package("openvino", "backend 'openvino'", extra)
    assert error.exit_code == 3
    assert error.message == "backend 'openvino' needs the package 'openvino', which is not installed"
    assert error.hint == command


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "disk is full: writing x"),
        (errno.EDQUOT, "disk is full: writing x"),
        (errno.EACCES, "not allowed to write: writing x"),
        (errno.EPERM, "not allowed to write: writing x"),
        (errno.EROFS, "not allowed to write: writing x"),
    ],
)
def test_the_disks_own_errors_are_translated(number: int, said: str) -> None:
    original = OSError(number, "as the system says it")
    with pytest.raises(StageError, match=said) as caught, translate_os_errors("writing x"):
        raise original
    assert caught.value.__cause__ is original


def test_other_os_errors_pass_unchanged() -> None:
    original = OSError(errno.EIO, "input/output error")
    with pytest.raises(OSError, match="input/output") as caught, translate_os_errors("writing x"):
        raise original
    assert caught.value is original
