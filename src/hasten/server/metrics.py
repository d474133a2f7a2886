"""What Prometheus scrapes: the official client's counters and histograms, fed by the engine and the protocols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hasten.core.errors import missing_package
from hasten.core.hardware import peak_memory_bytes
from hasten.server.engine import Observer
from hasten.server.gpus import GAUGES, Gpus
from hasten.server.models import Models
from hasten.server.queue import Job
from hasten.server.served_writer import ServedWriter
from hasten.server.watch import Later, Seen
from hasten.server.writing import WritingObserver, Written

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOO_MANY = 429
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """One registry a process; a model's numbers go by its name."""

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise missing_package("prometheus_client", "metrics", "serve") from error
        registry = self._registry = prometheus.CollectorRegistry()
        self.later = Later()
        self._known: dict[tuple[object, ...], Any] = {}
        label = ["model"]

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Any:
            return prometheus.Histogram(f"hasten_{name}", what, label, registry=registry, buckets=buckets)

        def counter(name: str, what: str, labels: list[str] | None = None) -> Any:
            return prometheus.Counter(f"hasten_{name}", what, labels or label, registry=registry)

        self.requests = counter("requests", "Requests, by how they were answered.", ["model", "status"])
        self.duration = histogram("request_seconds", "From a request to its answer.")
        self.encode = histogram("encode_seconds", "Turning texts into tokens.")
        self.queue = histogram("queue_seconds", "Waiting for a session.")
        self.compute = histogram("compute_seconds", "In the model.")
        self.batch_rows = histogram("batch_rows", "Rows that ran together.", _ROWS)
        self.tokens = counter("tokens", "Tokens that were asked for.")
        self.padding = counter("padding_tokens", "Tokens that were computed for nothing.")
        self.rejected = counter("rejected", "Requests refused because too many waited.")
        self.first_token = histogram("first_token_seconds", "From a request to the first piece of its text.")
        self.step = histogram("step_seconds", "One more token for every text that is being written.")
        self.written = counter("written_tokens", "Tokens that were written.")
        self.rate = histogram("text_tokens_per_second", "Of a text, from its first token on.", _RATES)
        memory = prometheus.Gauge("hasten_peak_memory_bytes", "The most memory held so far.", registry=registry)
        memory.set_function(peak_memory_bytes)
        prometheus.ProcessCollector(registry=registry)
        self._render = prometheus.generate_latest
        self.content_type: str = prometheus.CONTENT_TYPE_LATEST

    def follow(self, models: Models) -> None:
        """What is asked when it is scraped, rather than told when it changes."""
        self._registry.register(_Live(models))

    def render(self) -> bytes:
        self.later.do()
        text: bytes = self._render(self._registry)
        return text

    def of(self, model: str) -> ModelMetrics:
        for one in (self.duration, self.encode, self.queue, self.rejected):
            one.labels(model)  # there from the start, at zero
        return ModelMetrics(self, model)

    def of_writer(self, model: str) -> WriterMetrics:
        for one in (self.duration, self.queue, self.rejected, self.written):
            one.labels(model)
        return WriterMetrics(self, model)

    def on_seen(self, seen: Seen) -> None:
        model = seen.model
        self._series(self.requests, model, seen.status).inc()
        if not model:
            return
        self._series(self.duration, model).observe(seen.seconds)
        if seen.status == _TOO_MANY:
            self._series(self.rejected, model).inc()
        if seen.measured is not None:
            self._series(self.encode, model).observe(seen.measured.encode_s)
            self._series(self.queue, model).observe(seen.measured.queue_s)

    def _series(self, metric: Any, *labels: object) -> Any:
        """Found by the client under a lock, each time: too long a way for who asks again at once."""
        key = (metric, *labels)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = metric.labels(*labels)
        return found


class _Live:
    """What waits at each model that is there now, and how the GPUs are, if there are any."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._gpus = Gpus()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        waiting = GaugeMetricFamily("hasten_waiting", "Requests that wait for a session.", labels=["model"])
        for served in self._models:
            waiting.add_metric([served.name], served.engine.waiting)
        yield waiting
        writing = GaugeMetricFamily("hasten_slots_taken", "Texts that are being written.", labels=["model"])
        for served in self._models:
            if isinstance(served, ServedWriter):
                writing.add_metric([served.name], served.engine.running)
        yield writing
        for name, (what, _) in GAUGES.items() if len(self._gpus) else ():
            gauge = GaugeMetricFamily(f"hasten_gpu_{name}", f"Of a GPU, by everyone: {what}", labels=["gpu"])
            for place, value in self._gpus.read(name):
                gauge.add_metric([str(place)], value)
            yield gauge


class ModelMetrics(Observer):
    """What a model's batches tell."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._later = metrics.later
        self._compute, self._rows, self._tokens, self._padding = (
            one.labels(model) for one in (metrics.compute, metrics.batch_rows, metrics.tokens, metrics.padding)
        )

    def on_batch(self, job: Job, seconds: float) -> None:
        self._later.add(lambda: self._count(job, seconds))

    def _count(self, job: Job, seconds: float) -> None:
        self._compute.observe(seconds)
        self._rows.observe(len(job.batch))
        self._tokens.inc(job.tokens)
        if padding := job.padding:
            self._padding.inc(padding)


class WriterMetrics(WritingObserver):
    """What the texts of a model tell, and its steps."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._first, self._step, self._rows, self._tokens, self._written, self._rate = (
            one.labels(model)
            for one in (
                metrics.first_token,
                metrics.step,
                metrics.batch_rows,
                metrics.tokens,
                metrics.written,
                metrics.rate,
            )
        )

    def on_begin(self, seconds: float) -> None:
        self._first.observe(seconds)

    def on_step(self, rows: int, seconds: float) -> None:
        self._step.observe(seconds)
        self._rows.observe(rows)

    def on_end(self, written: Written, seconds: float) -> None:
        self._tokens.inc(written.prompt_tokens)
        self._written.inc(written.tokens)
        if written.tokens > 1 and seconds > 0:
            self._rate.observe((written.tokens - 1) / seconds)
