"""What NVIDIA's management library says of the GPUs; nothing where it, its Python package or a GPU is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# By the name of a gauge: what it tells, and where that is asked for. Of a GPU, by everyone who uses it.
GAUGES: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "utilization_ratio": (
        "The share of the last moments in which it computed.",
        lambda library, gpu: library.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "memory_used_bytes": ("Memory in use.", lambda library, gpu: library.nvmlDeviceGetMemoryInfo(gpu).used),
    "memory_total_bytes": ("Memory there is.", lambda library, gpu: library.nvmlDeviceGetMemoryInfo(gpu).total),
    "temperature_celsius": (
        "Its temperature.",
        lambda library, gpu: library.nvmlDeviceGetTemperature(gpu, library.NVML_TEMPERATURE_GPU),
    ),
    "clock_hertz": (
        "What its multiprocessors run at, which is less where it draws all that it may.",
        lambda library, gpu: library.nvmlDeviceGetClockInfo(gpu, library.NVML_CLOCK_SM) * 1e6,
    ),
    "power_watts": ("What it draws.", lambda library, gpu: library.nvmlDeviceGetPowerUsage(gpu) / 1000),
}


class Gpus:
    def __init__(self) -> None:
        self._library, self._handles = _open()

    def __len__(self) -> int:
        return len(self._handles)

    def read(self, gauge: str) -> Iterator[tuple[int, float]]:
        """Of each GPU that tells it: not all have a sensor for everything."""
        ask = GAUGES[gauge][1]
        for place, gpu in enumerate(self._handles):
            try:
                value = float(ask(self._library, gpu))
            except self._library.NVMLError:
                continue
            yield place, value


def _open() -> tuple[Any, list[Any]]:
    """The library, and its handles of the GPUs."""
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # there is no driver
        return None, []
