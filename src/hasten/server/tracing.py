"""Requests as OpenTelemetry spans, where that is configured by its own environment variables (`OTEL_…`)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from hasten.core.errors import missing_package
from hasten.server.watch import Seen, Watcher

_CONFIGURED = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")
_SERVER_FAULT = 500


def is_configured(environment: Mapping[str, str] = os.environ) -> bool:
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    given = [environment.get(name, "") for name in _CONFIGURED]
    return any(value and value != "none" for value in given)


def tracer() -> Watcher:
    """A span for each request, with its waiting and computing in it; the caller's span is its parent.

    Made when the request is over, from what was measured anyway: nothing is carried through the engine for it.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as error:
        raise missing_package("opentelemetry-exporter-otlp-proto-http", "tracing", "tracing") from error
    name = os.environ.get("OTEL_SERVICE_NAME", "hasten")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    source = provider.get_tracer("hasten")
    propagator = TraceContextTextMapPropagator()

    def record(seen: Seen) -> None:
        end = time.time_ns()
        begin = end - int(seen.seconds * 1e9)
        parent = propagator.extract({"traceparent": seen.trace}) if seen.trace else None
        attributes = {"hasten.model": seen.model, "hasten.request": seen.id, "http.response.status_code": seen.status}
        span = source.start_span(seen.what, parent, trace.SpanKind.SERVER, attributes, start_time=begin)
        if seen.measured is not None:
            inside = trace.set_span_in_context(span)
            at = begin
            cost = seen.measured
            for step, seconds in (("encode", cost.encode_s), ("queue", cost.queue_s), ("compute", cost.compute_s)):
                child = source.start_span(step, inside, start_time=at)
                at += int(seconds * 1e9)
                child.end(at)
        if seen.status >= _SERVER_FAULT:
            span.set_status(trace.StatusCode.ERROR)
        span.end(end)

    return record
