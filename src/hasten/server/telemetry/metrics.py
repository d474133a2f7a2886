"""Prometheus metrics of requests, batches, generation and GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hasten.core.errors import missing_package
from hasten.core.system.hardware import peak_memory_bytes
from hasten.server.models.registry import Model
from hasten.server.request_records import DeferredRecorder, RequestRecord
from hasten.server.scheduling.encoder_engine import EngineObserver
from hasten.server.scheduling.generation_engine import GenerationObserver, GenerationResult
from hasten.server.scheduling.queue import BatchJob
from hasten.server.telemetry.nvml import GAUGES, GpuReadings

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOO_MANY_REQUESTS = 429
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of a process; those of a model are labelled with its name."""

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise missing_package("prometheus_client", "metrics", "serve") from error
        registry = self._registry = prometheus.CollectorRegistry()
        self.deferred = DeferredRecorder()
        self._series_cache: dict[tuple[object, ...], Any] = {}
        label = ["model"]

        def histogram(name: str, description: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
            return prometheus.Histogram(f"hasten_{name}", description, label, registry=registry, buckets=buckets)

        def counter(name: str, description: str, labels: list[str] | None = None) -> Any:
            return prometheus.Counter(f"hasten_{name}", description, labels or label, registry=registry)

        self.requests = counter("requests", "Requests by HTTP status.", ["model", "status"])
        self.duration = histogram("request_seconds", "Latency from request to answer.")
        self.encode = histogram("encode_seconds", "Time to tokenize a request.")
        self.queue = histogram("queue_seconds", "Time a request waited for a session.")
        self.compute = histogram("compute_seconds", "Duration of one batch in the model.")
        self.batch_rows = histogram("batch_rows", "Rows per batch or decode step.", _ROWS)
        self.prompt_tokens = counter("prompt_tokens", "Input tokens processed.")
        self.padding = counter("padding_tokens", "Padding tokens computed.")
        self.rejected = counter("rejected", "Requests rejected with 429 because of overload.")
        self.first_token = histogram("time_to_first_token_seconds", "Time from a request to its first output text.")
        self.decode_step = histogram("decode_step_seconds", "Duration of one decode step.")
        self.generation_tokens = counter("generation_tokens", "Output tokens generated.")
        self.output_rate = histogram(
            "output_tokens_per_second", "Output tokens per second per request, after the first token.", _RATES
        )
        memory = prometheus.Gauge("hasten_peak_memory_bytes", "Peak memory of the process.", registry=registry)
        memory.set_function(peak_memory_bytes)
        prometheus.ProcessCollector(registry=registry)
        self._render = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def follow(self, models: Callable[[], Iterable[Model]], *, reads_gpus: bool = True) -> None:
        """Register the gauges that are read at scrape time: of the queues of models and of the GPUs."""
        self._registry.register(_QueueGauges(models))
        if reads_gpus:
            self._registry.register(_GpuGauges())

    def render(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        self.deferred.run()
        text: bytes = self._render(self._registry)
        return text

    def of_encoder(self, model: str) -> EncoderMetrics:
        """Return the observer of an encoder model."""
        self._export(model, self.encode, self.compute, self.batch_rows, self.prompt_tokens, self.padding)
        return EncoderMetrics(self, model)

    def of_generator(self, model: str) -> GenerationMetrics:
        """Return the observer of a generative model."""
        self._export(model, self.first_token, self.decode_step, self.batch_rows, self.prompt_tokens)
        self._export(model, self.generation_tokens, self.output_rate)
        return GenerationMetrics(self, model)

    def _export(self, model: str, *metrics: Any) -> None:
        """Export metrics of a model from the start, at zero."""
        for metric in (self.duration, self.queue, self.rejected, *metrics):
            self.series(metric, model)

    def on_request(self, record: RequestRecord) -> None:
        """Count an answered request."""
        model = record.model
        self.series(self.requests, model, record.status).inc()
        if not model:
            return
        self.series(self.duration, model).observe(record.seconds)
        if record.status == _TOO_MANY_REQUESTS:
            self.series(self.rejected, model).inc()
        if record.stats is not None:
            self.series(self.encode, model).observe(record.stats.encode_s)
            self.series(self.queue, model).observe(record.stats.queue_s)

    def series(self, metric: Any, *labels: object) -> Any:
        """Return a labelled series from a cache: the Prometheus client takes a lock for each lookup."""
        key = (metric, *labels)
        series = self._series_cache.get(key)
        if series is None:
            series = self._series_cache[key] = metric.labels(*labels)
        return series


class _QueueGauges:
    """Reads the queues of the loaded models at scrape time."""

    def __init__(self, models: Callable[[], Iterable[Model]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        queue_size = GaugeMetricFamily("hasten_queue_size", "Requests waiting for a session.", labels=["model"])
        slots_in_use = GaugeMetricFamily("hasten_slots_in_use", "Sequences being generated.", labels=["model"])
        for model in self._models():
            queue_size.add_metric([model.name], model.engine.waiting)
            if model.running_sequences is not None:
                slots_in_use.add_metric([model.name], model.running_sequences)
        yield from (queue_size, slots_in_use)


class _GpuGauges:
    """Reads the GPUs at scrape time."""

    def __init__(self) -> None:
        self._gpus = GpuReadings()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, (description, _) in GAUGES.items() if len(self._gpus) else ():
            gauge = GaugeMetricFamily(f"hasten_gpu_{name}", f"GPU, all processes: {description}", labels=["gpu"])
            for index, value in self._gpus.read(name):
                gauge.add_metric([str(index)], value)
            yield gauge


class EncoderMetrics(EngineObserver):
    """Counts the batches of an encoder model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model

    def on_batch(self, job: BatchJob, seconds: float) -> None:
        self._metrics.deferred.add(lambda: self._count(job, seconds))

    def _count(self, job: BatchJob, seconds: float) -> None:
        metrics, model = self._metrics, self._model
        metrics.series(metrics.compute, model).observe(seconds)
        metrics.series(metrics.batch_rows, model).observe(len(job.batch))
        metrics.series(metrics.prompt_tokens, model).inc(job.tokens)
        metrics.series(metrics.padding, model).inc(job.padding)


class GenerationMetrics(GenerationObserver):
    """Counts the sequences and decode steps of a generative model."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics, self._model = metrics, model

    def on_first_token(self, seconds: float) -> None:
        self._metrics.series(self._metrics.first_token, self._model).observe(seconds)

    def on_decode_step(self, rows: int, seconds: float) -> None:
        self._metrics.series(self._metrics.decode_step, self._model).observe(seconds)
        self._metrics.series(self._metrics.batch_rows, self._model).observe(rows)

    def on_finish(self, result: GenerationResult, seconds: float) -> None:
        metrics, model = self._metrics, self._model
        metrics.series(metrics.prompt_tokens, model).inc(result.prompt_tokens)
        metrics.series(metrics.generation_tokens, model).inc(result.tokens)
        if result.tokens > 1 and seconds > 0:
            metrics.series(metrics.output_rate, model).observe((result.tokens - 1) / seconds)
