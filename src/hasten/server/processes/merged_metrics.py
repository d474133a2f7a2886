"""One set of metrics from those of all processes of a server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

# Gauges that are not sums: the smallest or largest value of any process.
_MIN_SUFFIXES = ("_created", "_start_time_seconds")
_MAX_NAMES = ("hasten_peak_memory_bytes", "process_max_fds")
# Every process reads the same GPUs.
_MAX_PREFIX = "hasten_gpu_"
# Types of metrics that only grow, and stay when their process ends.
_CUMULATIVE = ("counter", "histogram", "summary")

# Name and sorted labels of a sample.
_Key = tuple[str, tuple[tuple[str, str], ...]]


class MergedMetrics:
    """Metrics of all processes, of each the latest. What an ended process has counted stays counted.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._texts: dict[Hashable, bytes] = {}
        # The sums of the processes that have ended.
        self._ended = _Families()

    def update(self, process: Hashable, text: bytes) -> None:
        """Set the metrics of a process, in Prometheus text format."""
        self._texts[process] = text

    def end(self, process: Hashable) -> None:
        """Keep what a process has counted, and forget its gauges."""
        text = self._texts.pop(process, None)
        if text is not None:
            self._ended.add(text, lambda kind: kind in _CUMULATIVE)

    def render(self) -> bytes:
        """Return the merged metrics in Prometheus text format."""
        import prometheus_client

        merged = self._ended.copy()
        for text in self._texts.values():
            merged.add(text)
        registry = prometheus_client.CollectorRegistry()
        registry.register(merged)
        rendered: bytes = prometheus_client.generate_latest(registry)
        return rendered


class _Families:
    """Families of metrics, merged sample by sample; a collector for Prometheus' registry."""

    def __init__(self) -> None:
        # By name: documentation, type and samples.
        self._families: dict[str, tuple[str, str, dict[_Key, float]]] = {}

    def copy(self) -> _Families:
        copied = _Families()
        copied._families = {name: (text, kind, dict(samples)) for name, (text, kind, samples) in self._families.items()}
        return copied

    def add(self, text: bytes, is_wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Merge the metrics of a process whose types are wanted."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(text.decode()):
            if not is_wanted(family.type):
                continue
            _, _, samples = self._families.setdefault(family.name, (family.documentation, family.type, {}))
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                samples[key] = _merge(sample.name, samples[key], sample.value) if key in samples else sample.value

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import Metric

        for name, (text, kind, samples) in self._families.items():
            metric = Metric(name, text, kind)
            for (sample, labels), value in samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


def _merge(name: str, first: float, second: float) -> float:
    if name.endswith(_MIN_SUFFIXES):
        return min(first, second)
    if name in _MAX_NAMES or name.startswith(_MAX_PREFIX):
        return max(first, second)
    return first + second
