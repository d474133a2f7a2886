"""Counters that processes share: the limit of open requests, and who accepts the next connection."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hasten.core.errors import OverloadedError
from hasten.server.processes.shared_counters import SharedCounters
from hasten.server.scheduling.admission import TokenAdmission
from hasten.server.scheduling.queue import Limits

LIMIT = 1000
_OTHER_PROCESS = """
import sys
from hasten.server.processes.shared_counters import SharedCounters

counters = SharedCounters(2, int(sys.argv[1]))
counters.requests(1, 0).add(5)
counters.set_connections(1, 7)
print(counters.requests(1, 0).total())
"""


def test_processes_count_together() -> None:
    counters = SharedCounters(2)
    own = counters.requests(0, 0)
    own.add(3)
    command = [sys.executable, "-c", _OTHER_PROCESS, str(counters.file)]
    shown = subprocess.run(command, pass_fds=[counters.file], capture_output=True, text=True, check=True)
    assert int(shown.stdout) == own.total() == 8
    assert counters.requests(0, 1).total() == 0
    own.add(-1)
    assert own.total() == 7
    # The process has ended.
    counters.clear(1)
    assert own.total() == 2


def test_limit_holds_for_the_open_requests_of_all_processes() -> None:
    counters = SharedCounters(2)
    admission = TokenAdmission(Limits(requests=4), sessions=1)
    admission.peers = counters.requests(0, 3)
    admission.check(0)
    counters.requests(1, 3).add(3)
    counters.requests(1, 2).add(9)  # of another model
    admission.check(0)
    admission.peers.add(1)
    with pytest.raises(OverloadedError, match="open requests: 4; the limit is 4"):
        admission.check(1)


def test_worker_with_more_connections_leaves_the_next_to_others() -> None:
    counters = SharedCounters(3)
    assert counters.may_accept(0, 100, LIMIT)  # no other listens yet
    counters.set_connections(1, 90)
    assert not counters.may_accept(0, 100, LIMIT)
    assert counters.may_accept(1, 90, LIMIT)
    counters.set_connections(2, 97)
    assert not counters.may_accept(2, 97, LIMIT)
    counters.clear(1)  # ended
    assert counters.may_accept(2, 97, LIMIT)
    assert counters.may_accept(0, 100, LIMIT)
    assert not counters.may_accept(0, 101, LIMIT)


def test_worker_at_its_limit_leaves_connections_to_those_below() -> None:
    counters = SharedCounters(2)
    counters.set_connections(1, 1)
    assert not counters.may_accept(0, 2, limit=2)
    counters.set_connections(1, 2)
    assert counters.may_accept(0, 2, limit=2)  # to reject it
