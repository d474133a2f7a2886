"""Metrics of several processes as one set."""

from __future__ import annotations

import pytest

from hasten.server.processes.merged_metrics import MergedMetrics
from support.server_operations import parsed_metrics

prometheus = pytest.importorskip("prometheus_client")


def render(requests: int, queued: int, peak: int, gpu: int, created: float = 1.0, model: str = "m") -> bytes:
    """Render the metrics of a process that has answered requests of 0.02 s."""
    registry = prometheus.CollectorRegistry()
    counter = prometheus.Counter("hasten_requests", "Requests.", ["model", "status"], registry=registry)
    counter.labels(model, 200).inc(requests)
    histogram = prometheus.Histogram("hasten_seconds", "Latency.", ["model"], registry=registry, buckets=(0.01, 0.1))
    for _ in range(requests):
        histogram.labels(model).observe(0.02)
    for name, value in (
        ("hasten_queue_size", queued),
        ("hasten_peak_memory_bytes", peak),
        ("hasten_gpu_memory_bytes", gpu),
        ("process_start_time_seconds", created),
    ):
        prometheus.Gauge(name, "A gauge.", registry=registry).set(value)
    return bytes(prometheus.generate_latest(registry))


def merge(**processes: bytes) -> MergedMetrics:
    merged = MergedMetrics()
    for process, text in processes.items():
        merged.update(process, text)
    return merged


def test_counts_are_added_and_other_gauges_are_not() -> None:
    merged = merge(first=render(3, 1, 50, 7, 100.0), second=render(4, 2, 40, 7, 99.0))
    samples = parsed_metrics(merged.render().decode())
    assert samples["hasten_requests_total", ("m", "200")] == 7
    assert samples["hasten_seconds_count", ("m",)] == 7
    assert samples["hasten_seconds_sum", ("m",)] == pytest.approx(0.14)
    assert samples["hasten_seconds_bucket", ("0.01", "m")] == 0
    assert samples["hasten_seconds_bucket", ("+Inf", "m")] == 7
    assert samples["hasten_queue_size", ()] == 3
    assert samples["hasten_peak_memory_bytes", ()] == 50
    assert samples["hasten_gpu_memory_bytes", ()] == 7
    assert samples["process_start_time_seconds", ()] == 99.0


def test_merged_text_has_the_types_of_one_process() -> None:
    text = render(3, 1, 50, 7)
    families = prometheus.parser.text_string_to_metric_families
    assert {family.name: family.type for family in families(merge(one=text).render().decode())} == {
        family.name: family.type for family in families(text.decode())
    }


def test_models_that_only_some_processes_know_are_kept() -> None:
    samples = parsed_metrics(merge(first=render(3, 0, 0, 0), second=render(4, 0, 0, 0, model="n")).render().decode())
    assert samples["hasten_requests_total", ("m", "200")] == 3
    assert samples["hasten_requests_total", ("n", "200")] == 4


def test_ended_process_leaves_its_counts_but_not_its_gauges() -> None:
    merged = merge(first=render(3, 1, 50, 7), second=render(4, 2, 40, 7))
    merged.end("first")
    merged.end("unknown")
    for _ in range(2):  # rendering changes nothing
        samples = parsed_metrics(merged.render().decode())
        assert samples["hasten_requests_total", ("m", "200")] == 7
        assert samples["hasten_seconds_count", ("m",)] == 7
        assert samples["hasten_queue_size", ()] == 2
        assert samples["hasten_peak_memory_bytes", ()] == 40
    # Its successor counts from zero.
    merged.update("first", render(1, 0, 10, 7))
    merged.end("first")
    assert parsed_metrics(merged.render().decode())["hasten_requests_total", ("m", "200")] == 8
