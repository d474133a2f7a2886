"""Requests as OpenTelemetry spans, where that is configured by its own environment variables (`OTEL_…`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from hasten.core.errors import PlanError, missing_package
from hasten.server.watch import Seen

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"
_SERVER_FAULT = 500
# A collector that does not answer does not keep the server from leaving.
_FLUSH_S = 5.0


def is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporters := environment.get("OTEL_TRACES_EXPORTER", ""):
        return "otlp" in exporters.split(",")
    return any(environment.get(name) for name in _ENDPOINTS)


class Tracer:
    """A span for each request to a model, with its waiting and computing in it; the caller's span is its parent.

    Made when the request is over, from what was measured anyway: nothing is carried through the engine for it.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        protocol = next((given for name in _PROTOCOLS if (given := environment.get(name))), _SPOKEN)
        if protocol != _SPOKEN:
            raise PlanError(f"traces are not sent by {protocol}", hint=f"{_PROTOCOLS[1]}={_SPOKEN}")
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

    def __call__(self, seen: Seen) -> None:
        if not seen.model:
            return  # health checks and scrapes are nobody's request
        end = seen.at_ns
        begin = end - int(seen.seconds * 1e9)
        parent = self._propagator.extract({"traceparent": seen.trace}) if seen.trace else None
        attributes = {"hasten.model": seen.model, "hasten.request": seen.id, "http.response.status_code": seen.status}
        span = self._source.start_span(seen.what, parent, self._api.SpanKind.SERVER, attributes, start_time=begin)
        if seen.measured is not None:
            cost = seen.measured
            span.set_attributes({"hasten.rows": cost.rows, "hasten.tokens": cost.tokens})
            inside = self._api.set_span_in_context(span)
            at = begin
            for step, seconds in (("encode", cost.encode_s), ("queue", cost.queue_s), ("compute", cost.compute_s)):
                child = self._source.start_span(step, inside, start_time=at)
                at += int(seconds * 1e9)
                child.end(at)
        if seen.status >= _SERVER_FAULT:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what was not sent yet."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_FLUSH_S)
