"""GPU gauges from NVIDIA's management library; empty without the library, its Python package or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

# Help text and reader of each gauge; values are those of the whole GPU, all processes included.
GAUGES: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "utilization_ratio": (
        "Share of the last sample period in which a kernel ran.",
        lambda library, gpu: library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "memory_used_bytes": ("Memory in use.", lambda library, gpu: library.nvmlDeviceGetMemoryInfo(gpu).used),
    "memory_total_bytes": ("Total memory.", lambda library, gpu: library.nvmlDeviceGetMemoryInfo(gpu).total),
    "temperature_celsius": (
        "Temperature.",
        lambda library, gpu: library.nvmlDeviceGetTemperature(gpu, library.NVML_TEMPERATURE_GPU),
    ),
    "clock_hertz": (
        "Clock of the multiprocessors, which drops at the power limit.",
        lambda library, gpu: library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_SM) * 1e6,
    ),
    "power_watts": ("Power draw.", lambda library, gpu: library.nvmlDeviceGetPowerUsage(gpu) / 1000),
}


class GpuReadings:
    """Reads the gauges of all GPUs."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        self._library = pynvml
        with suppress(pynvml.NVMLError):  # there is no driver
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def read(self, gauge: str) -> Iterator[tuple[int, float]]:
        """Yield the index and value of each GPU that has the sensor."""
        read = GAUGES[gauge][1]
        for index, gpu in enumerate(self._handles):
            try:
                value = float(read(self._library, gpu))
            except self._library.NVMLError:
                continue
            yield index, value
