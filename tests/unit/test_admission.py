"""Who is let in, and who is refused."""

from __future__ import annotations

import pytest

from hasten.core.errors import OverloadedError
from hasten.server.admission import Admission
from hasten.server.queue import Limits


def is_let_in(admission: Admission, taken: int) -> bool:
    try:
        admission.check(taken)
    except OverloadedError:
        return False
    return True


def test_so_many_and_no_more() -> None:
    admission = Admission(Limits(requests=2), sessions=1)
    admission.check(1)
    with pytest.raises(OverloadedError, match="2 requests are waiting"):
        admission.check(2)


def test_more_than_is_answered_in_time_is_refused() -> None:
    admission = Admission(Limits(wait_s=1.0), sessions=1)
    admission.encoded(100)
    admission.check(1)  # how long that takes nobody knows yet
    admission.ran(tokens=10, requests=1, seconds=1.0)
    with pytest.raises(OverloadedError) as refused:
        admission.check(1)
    assert refused.value.retry_after_s == pytest.approx(10.0)
    admission.answered(100)
    admission.check(0)


def test_what_is_not_encoded_yet_counts_like_the_others() -> None:
    admission = Admission(Limits(wait_s=1.0), sessions=1)
    admission.encoded(50)
    admission.ran(tokens=50, requests=1, seconds=0.5)
    admission.answered(50)
    assert [admission.wait_s(taken) for taken in (0, 1, 4)] == pytest.approx([0.0, 0.5, 2.0])
    assert [is_let_in(admission, taken) for taken in (0, 1, 2, 3)] == [True, True, True, False]


def test_sessions_share_the_work() -> None:
    admission = Admission(Limits(), sessions=4)
    admission.encoded(100)
    admission.ran(tokens=10, requests=1, seconds=1.0)
    assert admission.wait_s(1) == pytest.approx(2.5)


def test_nobody_takes_many_times_as_long_as_alone() -> None:
    admission = Admission(Limits(slowdown=3.0), sessions=1)
    assert is_let_in(admission, 1000)  # how long one takes alone is not known yet
    for _ in range(2):
        admission.encoded(16)
        admission.ran(tokens=16, requests=1, seconds=0.010)
        admission.answered(16)
    # Behind two others it takes three times as long as alone, behind three four times.
    assert [is_let_in(admission, taken) for taken in (0, 2, 3)] == [True, True, False]


def test_batches_that_pay_let_more_in() -> None:
    admission = Admission(Limits(slowdown=3.0), sessions=1)
    admission.encoded(16)
    admission.ran(tokens=16, requests=1, seconds=0.010)
    admission.answered(16)
    for _ in range(60):
        admission.ran(tokens=16 * 8, requests=8, seconds=0.020)
    assert [is_let_in(admission, taken) for taken in (7, 9)] == [True, False]
