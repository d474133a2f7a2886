"""Build the application and load its models: what every way to serve has in common."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hasten.bundle import open_bundle
from hasten.core.errors import PlanError
from hasten.core.system.hardware import usable_cores
from hasten.families import family_of_bundle
from hasten.server.app import App
from hasten.server.auth import ApiKeys
from hasten.server.http.state import HttpLimits
from hasten.server.models.registry import Model, ModelRegistry
from hasten.server.request_records import RequestListener
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.settings import Settings, find_bundles, unknown_variables
from hasten.server.telemetry import logs
from hasten.server.telemetry.metrics import Metrics
from hasten.server.telemetry.tracing import Tracer, is_configured

logger = logging.getLogger("hasten")

AnyApp = TypeVar("AnyApp", bound=App)

# The exit code of a process that a supervisor should restart.
EXIT_FAULT = 70
# Time for liveness probes and load balancers to notice a fault before the process exits.
FAULT_LINGER_S = 2.0
# The delay after which an expired request is answered at the latest.
_TICK_S = 0.02
# How long the event loop waits for a thread that computes in Python, such as one that decodes a large response. The
# default is 5 ms.
SWITCH_INTERVAL_S = 0.001
# Allocations before the garbage collector runs; requests leave it next to nothing to collect.
_GC_THRESHOLD = (50_000, 20, 100)


def make_app(settings: Settings) -> App:
    """Return the application without its models, for our own HTTP server or an ASGI server."""
    warn_about_variables()
    metrics = Metrics()
    scheduler = CoreScheduler(max(usable_cores(), (settings.instances or 1) * (settings.threads or 1)))

    def open_model(path: Path, name: str, old: Model | None) -> Model:
        # Keep the number of sessions: measuring it under load would be wrong and would slow down other requests.
        chosen = settings if old is None else replace(settings, instances=old.instances)
        # Hashes are checked for the files that are read; those of other variants need no check.
        bundle = open_bundle(path)
        return family_of_bundle(bundle).serve(name, bundle, chosen, scheduler, metrics)

    models = ModelRegistry(open_model, drain_s=unload_timeout_s(settings))
    metrics.follow(lambda: models)
    return build_app(App, models, metrics, ApiKeys.read(settings.api_key_file), settings)


def build_app(kind: type[AnyApp], models: ModelRegistry, metrics: Metrics, keys: ApiKeys, settings: Settings) -> AnyApp:
    """Return an application that logs and traces its requests as the settings say."""
    listeners: list[RequestListener] = [logs.log_request] if settings.logs_requests else []
    tracer = Tracer() if is_configured() else None
    return kind(
        models,
        metrics,
        keys,
        listeners if tracer is None else [*listeners, tracer],
        model_control=settings.model_control,
        stall_timeout_s=settings.stall_timeout,
        on_close=(lambda: None) if tracer is None else tracer.close,
    )


def warn_about_variables() -> None:
    """Log environment variables that look like settings and are none."""
    for problem in unknown_variables(os.environ):
        logger.warning("%s", problem)


def unload_timeout_s(settings: Settings) -> float:
    """Return the time in which a replaced or unloaded model answers its open requests."""
    return max(settings.drain_timeout, settings.timeout)


def bundle_paths(settings: Settings) -> dict[str, Path]:
    """Return the bundles by directory name; a symbolic link keeps its own name, so that its target may change."""
    candidates = [path for bundle in settings.bundles for path in find_bundles(Path(bundle).expanduser())]
    names = [(path.resolve() if path.name in ("", "..") else path).name for path in candidates]
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise PlanError(f"two bundles are named '{name}'", hint="models are named after their directories; rename one")
    return dict(zip(names, candidates, strict=True))


def load_models(app: App, settings: Settings) -> None:
    """Load, warm up and check all models; each serves requests at once, and the server is ready after the last."""
    for name, path in bundle_paths(settings).items():
        app.models.load(path, name)
    freeze_objects()
    app.is_ready = True


def freeze_objects() -> None:
    """Exclude all present objects from garbage collection: they live as long as the process.

    Collecting them again would stop all threads at each large request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)


async def run_periodic_tasks(app: App) -> None:
    """Fail expired requests, even while all sessions are busy, and record the answered ones."""
    while True:
        await asyncio.sleep(_TICK_S)
        app.metrics.deferred.run()
        now = time.monotonic()
        for model in app.models:
            if model.engine.waiting:
                model.engine.expire(now)


def http_limits(settings: Settings, processes: int = 1) -> HttpLimits:
    """Return the limits of HTTP connections of one of several processes, which share the totals."""
    buffered_bytes = max(HttpLimits().buffered_bytes, 4 * settings.max_body)
    if settings.max_memory is not None:
        buffered_bytes = min(buffered_bytes, max(settings.max_body, settings.max_memory // 8))
    return HttpLimits(
        body_bytes=settings.max_body,
        read_s=settings.read_timeout,
        idle_s=settings.idle_timeout,
        connections=-(-settings.max_connections // processes),
        buffered_bytes=max(settings.max_body, -(-buffered_bytes // processes)),
    )
