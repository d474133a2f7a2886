"""Export requests as OpenTelemetry spans, configured by its standard environment variables (`OTEL_…`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from hasten.core.errors import PlanError, missing_package
from hasten.server.request_records import RequestRecord

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED_PROTOCOL = "http/protobuf"
_SERVER_FAULT = 500
# A collector that does not answer must not keep the server from exiting.
_FLUSH_S = 5.0


def is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment asks for traces over OTLP."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporters := environment.get("OTEL_TRACES_EXPORTER", ""):
        return "otlp" in exporters.split(",")
    return any(environment.get(name) for name in _ENDPOINTS)


class Tracer:
    """Exports a span per request to a model, with child spans for its stages; the caller's span is the parent.

    Spans are made after the request from its record, so the engine carries no tracing state.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        protocol = next((value for name in _PROTOCOLS if (value := environment.get(name))), _SUPPORTED_PROTOCOL)
        if protocol != _SUPPORTED_PROTOCOL:
            hint = f"set {_PROTOCOLS[1]}={_SUPPORTED_PROTOCOL}"
            raise PlanError(f"traces over {protocol} are not supported", hint=hint)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise missing_package("opentelemetry-exporter-otlp-proto-http", "tracing", "tracing") from error
        name = environment.get("OTEL_SERVICE_NAME", "hasten")
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._source = self._provider.get_tracer("hasten")
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace

    def __call__(self, record: RequestRecord) -> None:
        if not record.model:
            return  # health checks and scrapes are not traced
        end = record.at_ns
        begin = end - int(record.seconds * 1e9)
        parent = self._propagator.extract({"traceparent": record.trace}) if record.trace else None
        attributes = {
            "hasten.model": record.model,
            "hasten.request": record.id,
            "http.response.status_code": record.status,
        }
        span = self._source.start_span(
            record.operation, parent, self._api.SpanKind.SERVER, attributes, start_time=begin
        )
        if record.stats is not None:
            stats = record.stats
            span.set_attributes({"hasten.rows": stats.rows, "hasten.tokens": stats.tokens})
            inside = self._api.set_span_in_context(span)
            stage_begin = begin
            for stage, seconds in (("encode", stats.encode_s), ("queue", stats.queue_s), ("compute", stats.compute_s)):
                child = self._source.start_span(stage, inside, start_time=stage_begin)
                stage_begin += int(seconds * 1e9)
                child.end(stage_begin)
        if record.status >= _SERVER_FAULT:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)
