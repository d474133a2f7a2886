"""Run on Ray Serve: on a local Ray that ends with this process, or on a cluster that keeps running."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from hasten.bundle import open_bundle
from hasten.core.errors import HastenError, PlanError, StageError, UnavailableError, UnsupportedError, missing_package
from hasten.core.system.hardware import usable_cores
from hasten.deploy.ray.config import APPLICATION, max_gpu_replicas, replica_share, serve_config, with_gpus, write
from hasten.deploy.ray.replica import open_shared
from hasten.server.frontend import Addresses
from hasten.server.settings import Settings
from hasten.server.startup import bundle_paths

logger = logging.getLogger("hasten")

_CONNECT_S = 5.0
_POLL_S = 0.1
_LOCAL = ("127.0.0.1", "::1", "localhost")


def run(settings: Settings, on_ready: Callable[[Addresses], None] = lambda _: None) -> None:
    """Serve on a local Ray until SIGTERM or SIGINT; on a cluster, deploy, wait until it answers, and return."""
    if (settings.write_config is not None or settings.address is not None) and settings.host in _LOCAL:
        logger.warning("nodes will listen on %s only, which clients cannot reach: use --host 0.0.0.0", settings.host)
    if settings.write_config is not None:
        write(serve_config(settings), settings.write_config)
        logger.info("wrote %s", settings.write_config)
        return
    is_local = settings.address is None
    if is_local:
        settings = replace(settings, port=_free_port(settings.host, settings.port))
    document = serve_config(settings)
    _check(settings)
    if find_spec("ray") is None:
        raise missing_package("ray", "serving on Ray", "ray")
    if settings.host not in _LOCAL and settings.api_key_file is None and not os.environ.get("HASTEN_API_KEYS"):
        logger.warning("any client of %s may send requests: no API keys are set (--api-key-file)", settings.host)
    if is_local:
        # Read when Ray is imported. Ray's ports let clients run code: require the token that Ray creates.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        if is_local:
            # Not kept in `settings`: the next version of a bundle may not need a GPU.
            _start(with_gpus(settings))
        else:
            _connect(str(settings.address))
        signal.signal(signal.SIGTERM, on_term)  # Ray has replaced it
        addresses = Addresses(deploy(document), None)
        signals = _queue_signals() if is_local else None
        on_ready(addresses)
        if signals is not None:
            _wait_for_stop(settings, document, signals)
            logger.info("stopping after answering the accepted requests")
            serve.shutdown()
    finally:
        # Stops a local Ray with all its processes; disconnects from a cluster.
        ray.shutdown()


def _check(settings: Settings) -> None:
    for path in bundle_paths(settings).values():
        open_bundle(path).check()


def deploy(document: dict[str, Any]) -> str:
    """Deploy to the Ray that this process is connected to, wait until it answers, and return its address.

    This is what `serve run FILE` does; `serve.run` would restart the replicas although their bundle has not changed.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = {name: document[name] for name in ("proxy_location", "http_options", "logging_config")}
    serve.start(**options)
    client = _get_global_client()
    running = client.get_serve_details()["applications"]
    others = other_applications(running)
    if APPLICATION in running:
        _open_once(document["applications"][0], running[APPLICATION].get("deployed_app_config") or {})
    merged = {**document, "applications": [*others, *document["applications"]]}
    client.deploy_apps(ServeDeploySchema.model_validate(merged))
    _wait_until_running()
    client.wait_for_proxies_serving(wait_for_applications_running=True)
    http = client.http_config
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"{'https' if http.ssl_certfile else 'http'}://{host}:{http.port}"


def _open_once(wanted: dict[str, Any], running: dict[str, Any]) -> None:
    """Open changed bundles once in a separate worker: a replica that fails to reload is lost."""
    import ray

    (after,), before = wanted["deployments"], running.get("deployments", [{}])
    is_same = wanted["args"] == running.get("args") and after["user_config"] == before[0].get("user_config")
    if is_same or "num_gpus" in after["ray_actor_options"]:  # there may be no free share of a GPU
        return
    try:
        ray.get(ray.remote(num_cpus=0)(open_shared).remote(wanted["args"]))
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        raise StageError(f"not deployed, since a bundle cannot be opened: {_last_line(str(cause))}") from error


def other_applications(applications: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the configurations of the cluster's other applications: Ray deletes those that are not listed."""
    configs = []
    for name, details in applications.items():
        if name == APPLICATION:
            continue
        if details["route_prefix"] == "/":
            raise PlanError(
                f"the application '{name}' of this cluster already has the route /", hint="see serve status"
            )
        if (config := details.get("deployed_app_config")) is not None:
            configs.append(config)
    return configs


def _wait_until_running() -> None:
    from ray import serve

    logged = ""
    while True:
        application = serve.status().applications.get(APPLICATION)
        state, message = ("", "") if application is None else (str(application.status.value), application.message)
        if state == "RUNNING":
            return
        if state == "DEPLOY_FAILED":
            raise StageError(
                f"Ray could not start the application: {_last_line(message)}", hint="see Ray's log in logs/serve"
            )
        if message != logged:
            logged = message
            logger.info("%s", message)
        time.sleep(_POLL_S)


def _last_line(message: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def _queue_signals() -> SimpleQueue[int]:
    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.put(number))
    return signals


def _wait_for_stop(settings: Settings, document: dict[str, Any], signals: SimpleQueue[int]) -> None:
    """Wait until a signal stops the server; on SIGHUP or periodically, deploy the bundles that have changed."""
    while True:
        number = int(signal.SIGHUP)
        with suppress(Empty):
            number = signals.get(timeout=settings.reload_interval)
        if number != signal.SIGHUP:
            # A second signal kills the process.
            signal.signal(number, signal.SIG_DFL)
            return
        document = _redeploy(settings, document)


def _redeploy(settings: Settings, document: dict[str, Any]) -> dict[str, Any]:
    try:
        changed = serve_config(settings)
        if changed != document:
            _check(settings)
            deploy(changed)
            logger.info("the changed bundles are deployed")
    except HastenError as error:
        logger.error("the changed bundles are not deployed: %s", error)
        return document
    return changed


def _start(settings: Settings) -> None:
    import ray

    share, replicas = replica_share(settings), settings.replicas
    # More replicas than cores are slow but allowed.
    cores = max(usable_cores(), share.cpus * (replicas.max_count or replicas.min_count if replicas is not None else 1))
    try:
        ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            logging_level=logging.ERROR,
            # Ray's own lines are not JSON.
            log_to_driver=settings.log_format == "text",
        )
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UnavailableError(f"Ray does not start: {_last_line(str(error))}") from error
    logger.info("Ray has started; its address is %s", ray.get_runtime_context().gcs_address)
    min_replicas = replicas.min_count if replicas is not None else 1
    gpus = int(ray.cluster_resources().get("GPU", 0))
    # Ray would wait forever for more GPUs.
    if settings.gpus is not None and max_gpu_replicas(gpus, settings.gpus) < min_replicas:
        hint = "use fewer --replicas, or a smaller share" if gpus else "leave --gpus out"
        raise UnsupportedError(
            f"{min_replicas} × {settings.gpus:g} GPUs do not fit on this machine, which has {gpus}", hint=hint
        )


def _connect(address: str) -> None:
    import ray

    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.port is not None:
            # Ray itself would retry for minutes.
            socket.create_connection((parts.hostname or "", parts.port), _CONNECT_S).close()
        elif address != "auto":
            raise ValueError("the address is not HOST:PORT")
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        lines = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UnavailableError(
            f"no Ray cluster at {address}: {lines[0]}", hint="start one with ray start --head"
        ) from error


def _free_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0: Ray neither reports the port it chose nor clearly that one is in use."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint="choose others with --host and --port"
        ) from error
