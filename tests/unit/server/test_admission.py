"""Admission control: which requests are accepted and which are rejected."""

from __future__ import annotations

import pytest

from hasten.core.errors import OverloadedError, TooLargeError
from hasten.server.scheduling.admission import Admission, SlotAdmission, TokenAdmission
from hasten.server.scheduling.queue import Limits


def is_accepted(admission: Admission, open_requests: int) -> bool:
    try:
        admission.check(open_requests)
    except OverloadedError:
        return False
    return True


def test_requests_beyond_the_queue_limit_are_rejected() -> None:
    admission = TokenAdmission(Limits(requests=2), sessions=1)
    admission.check(1)
    with pytest.raises(OverloadedError, match=r"open requests: 2; the limit is 2 \(--max-queue\)"):
        admission.check(2)


def test_requests_that_would_wait_too_long_are_rejected() -> None:
    admission = TokenAdmission(Limits(wait_s=1.0), sessions=1)
    admission.on_encoded(100)
    admission.check(1)  # nothing was measured yet
    admission.on_batch(tokens=10, requests=1, seconds=1.0, is_loaded=True)
    with pytest.raises(OverloadedError, match=r"wait: 10\.0 s; the limit is 1 s \(--max-queue-time\)") as rejected:
        admission.check(1)
    assert rejected.value.retry_after_s == pytest.approx(10.0)
    admission.on_answered(100)
    admission.check(0)


def test_untokenized_requests_count_with_the_average_length() -> None:
    admission = TokenAdmission(Limits(wait_s=1.0), sessions=1)
    admission.on_encoded(50)
    admission.on_batch(tokens=50, requests=1, seconds=0.5, is_loaded=True)
    admission.on_answered(50)
    assert [admission.wait_s(count) for count in (0, 1, 4)] == pytest.approx([0.0, 0.5, 2.0])
    assert [is_accepted(admission, count) for count in (0, 1, 2, 3)] == [True, True, True, False]


def test_lone_short_requests_do_not_lower_the_throughput() -> None:
    admission = TokenAdmission(Limits(wait_s=5.0), sessions=1)
    for _ in range(20):
        admission.on_batch(tokens=3, requests=1, seconds=0.003, is_loaded=False)
    admission.on_encoded(20_000)
    admission.check(1)  # 20 s at the speed of the short requests
    admission.on_batch(tokens=1024, requests=1, seconds=0.1, is_loaded=True)
    assert admission.wait_s(1) == pytest.approx(20_000 / 10_240)


def test_tokens_that_have_run_are_not_waited_for() -> None:
    admission = TokenAdmission(Limits(), sessions=1)
    admission.on_encoded(1000)
    admission.on_batch(tokens=100, requests=1, seconds=1.0, is_loaded=True)
    admission.on_run(900)
    assert admission.wait_s(1) == pytest.approx(1.0)
    admission.on_answered(100)
    assert admission.wait_s(0) == 0.0


def test_wait_is_divided_among_sessions() -> None:
    admission = TokenAdmission(Limits(), sessions=4)
    admission.on_encoded(100)
    admission.on_batch(tokens=10, requests=1, seconds=1.0, is_loaded=True)
    assert admission.wait_s(1) == pytest.approx(2.5)


def test_slowdown_over_unloaded_latency_is_bounded() -> None:
    admission = TokenAdmission(Limits(slowdown=3.1), sessions=1)
    assert is_accepted(admission, 1000)  # the unloaded latency is not known yet
    for _ in range(2):
        admission.on_encoded(16)
        admission.on_batch(tokens=16, requests=1, seconds=0.010, is_loaded=True)
        admission.on_answered(16)
    # Behind two others a request takes three times its unloaded latency, behind three others four times.
    assert [is_accepted(admission, count) for count in (0, 2, 3)] == [True, True, False]


def test_efficient_batching_raises_the_limit() -> None:
    admission = TokenAdmission(Limits(slowdown=3.0), sessions=1)
    admission.on_encoded(16)
    admission.on_batch(tokens=16, requests=1, seconds=0.010, is_loaded=True)
    admission.on_answered(16)
    for _ in range(60):
        admission.on_batch(tokens=16 * 8, requests=8, seconds=0.020, is_loaded=True)
    assert [is_accepted(admission, count) for count in (7, 9)] == [True, False]


def test_sequences_wait_for_a_slot_only_if_none_is_free() -> None:
    loads = iter([(0, 1), (0, 2), (2, 2), (2, 2)])
    admission = SlotAdmission(Limits(wait_s=5.0), slots=2, load=lambda: next(loads))
    admission.on_sequence(4.0)
    assert [admission.wait_s(0) for _ in range(3)] == pytest.approx([0.0, 2.0, 6.0])
    assert not is_accepted(admission, 4)


def test_prompt_that_cannot_be_prefilled_before_its_deadline_is_rejected() -> None:
    admission = SlotAdmission(Limits(), slots=1, load=lambda: (0, 0))
    admission.check_prefill(10**6, 0, 0.0, left_s=1.0)  # nothing was measured yet
    admission.check_prefill(900, 0, 100.0, left_s=10.0)
    with pytest.raises(TooLargeError, match=r"1100 prompt tokens take at least 11\.0 s, and the deadline"):
        admission.check_prefill(1100, 0, 100.0, left_s=10.0)
    with pytest.raises(OverloadedError, match="200 prompt tokens come first") as rejected:
        admission.check_prefill(900, 200, 100.0, left_s=10.0)
    assert rejected.value.retry_after_s == pytest.approx(2.0)
