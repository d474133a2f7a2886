"""What is told of GPUs: where there is none, or nothing to ask them with, nothing, and without a word."""

from __future__ import annotations

import sys

import pytest

from hasten.core.hardware import this_machine
from hasten.server.gpus import GAUGES, Gpus


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert len(Gpus()) == 0
    assert [list(Gpus().read(gauge)) for gauge in GAUGES] == [[]] * len(GAUGES)


def test_as_many_as_the_machine_has() -> None:
    pytest.importorskip("pynvml", reason="GPUs are asked with hasten[fused]")
    gpus = Gpus()
    assert len(gpus) == len(this_machine().gpus)
    for place in range(len(gpus)):
        readings = {gauge: dict(gpus.read(gauge))[place] for gauge in ("memory_used_bytes", "memory_total_bytes")}
        assert 0 < readings["memory_used_bytes"] < readings["memory_total_bytes"]
        assert 0 <= dict(gpus.read("utilization_ratio"))[place] <= 1
