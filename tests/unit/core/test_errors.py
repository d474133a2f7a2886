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


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'biuld'"):
        _ = hasten.biuld


def test_hint_follows_the_message() -> None:
    assert str(HastenError("it broke", hint="mend it")) == "it broke (mend it)"
    assert str(HastenError("it broke")) == "it broke"


def test_accuracy_error_carries_the_rejected_candidates() -> None:
    rejected = Candidate("openvino-fp16", Status.INACCURATE, "same label 0.9 < 0.995")
    assert AccuracyError("none may be used", candidates=[rejected]).candidates == (rejected,)
    assert AccuracyError("none may be used").candidates == ()


def test_accuracy_error_message_names_the_first_rejections() -> None:
    rejected = [Candidate(f"v{index}", Status.INACCURATE, f"0.{index} < 0.9") for index in range(5)]
    text = str(AccuracyError("none may be used", hint="ask for less", candidates=rejected))
    assert text == "none may be used (ask for less): v0: 0.0 < 0.9; v1: 0.1 < 0.9; v2: 0.2 < 0.9; and 2 more"
    assert str(AccuracyError("none may be used", hint="ask for less")) == "none may be used (ask for less)"


@pytest.mark.parametrize(
    ("extra", "command"), [(None, "pip install openvino"), ("openvino", "pip install 'hasten[openvino]'")]
)
def test_missing_package_error_has_the_install_command(extra: str | None, command: str) -> None:
    error = missing_package("openvino", "backend 'openvino'", extra)
    assert error.exit_code == 3
    assert error.message == "backend 'openvino' needs the package 'openvino', which is not installed"
    assert error.hint == command


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "disk is full: writing x"),
        (errno.EDQUOT, "disk is full: writing x"),
        (errno.EACCES, "no permission to write: writing x"),
        (errno.EPERM, "no permission to write: writing x"),
        (errno.EROFS, "no permission to write: writing x"),
    ],
)
def test_disk_errors_are_translated(number: int, message: str) -> None:
    original = OSError(number, "as the system says it")
    with pytest.raises(StageError, match=message) as caught, translate_os_errors("writing x"):
        raise original
    assert caught.value.__cause__ is original


def test_other_os_errors_pass_unchanged() -> None:
    original = OSError(errno.EIO, "input/output error")
    with pytest.raises(OSError, match="input/output") as caught, translate_os_errors("writing x"):
        raise original
    assert caught.value is original
