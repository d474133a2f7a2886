"""GPU gauges; without GPUs or the NVML package there are none, and no error."""

from __future__ import annotations

import sys

import pytest

from hasten.core.system.hardware import this_machine
from hasten.server.telemetry.nvml import GAUGES, GpuReadings


def test_no_readings_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert len(GpuReadings()) == 0
    assert [list(GpuReadings().read(gauge)) for gauge in GAUGES] == [[]] * len(GAUGES)


def test_readings_cover_all_gpus() -> None:
    pytest.importorskip("pynvml", reason="NVML needs hasten[fused]")
    gpus = GpuReadings()
    assert len(gpus) == len(this_machine().gpus)
    for index in range(len(gpus)):
        readings = {gauge: dict(gpus.read(gauge))[index] for gauge in ("memory_used_bytes", "memory_total_bytes")}
        assert 0 < readings["memory_used_bytes"] < readings["memory_total_bytes"]
        assert 0 <= dict(gpus.read("utilization_ratio"))[index] <= 1
