"""A fleet on Ray: one of our own on this machine, which ends with us, or a cluster that runs on without us."""

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
from hasten.core.hardware import usable_cores
from hasten.deploy.ray.config import APPLICATION, fitting, fleet, share_of, with_gpus, write
from hasten.deploy.ray.replica import open_once
from hasten.server.run import Addresses, bundle_paths
from hasten.server.settings import Settings

logger = logging.getLogger("hasten")

_CONNECT_S = 5.0
_POLL_S = 0.1
_LOCAL = ("127.0.0.1", "::1", "localhost")


def run(settings: Settings, on_ready: Callable[[Addresses], None] = lambda _: None) -> None:
    """On a Ray of our own until SIGTERM or SIGINT; on a cluster until the fleet answers, which then stays."""
    if (settings.write is not None or settings.address is not None) and settings.host in _LOCAL:
        logger.warning("every node will listen on %s, where nobody else reaches it: --host 0.0.0.0", settings.host)
    if settings.write is not None:
        write(fleet(settings), settings.write)
        logger.info("written: %s", settings.write)
        return
    is_own = settings.address is None
    if is_own:
        settings = replace(settings, port=_free_port(settings.host, settings.port))
    document = fleet(settings)
    _check(settings)
    if find_spec("ray") is None:
        raise missing_package("ray", "serving on Ray", "ray")
    if settings.host not in _LOCAL and settings.key_file is None and not os.environ.get("HASTEN_API_KEYS"):
        logger.warning("anyone who reaches %s may ask: no API keys are set (--key-file)", settings.host)
    if is_own:
        # Read when Ray is imported. Whoever reaches its own ports may run code: with a token alone, which it makes.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        if is_own:
            # Not for what comes later: the next build may need none.
            _start(with_gpus(settings))
        else:
            _connect(str(settings.address))
        signal.signal(signal.SIGTERM, on_term)  # Ray has set its own
        where = Addresses(deploy(document), None)
        asked = _signals() if is_own else None
        on_ready(where)
        if asked is not None:
            _attend(settings, document, asked)
            logger.info("stopping: what was taken is answered first")
            serve.shutdown()
    finally:
        # Of our own with all its processes; of a cluster our connection.
        ray.shutdown()


def _check(settings: Settings) -> None:
    for path in bundle_paths(settings).values():
        open_bundle(path).check()


def deploy(document: dict[str, Any]) -> str:
    """Have it run on the Ray that this process is connected to; where it listens, as soon as it answers.

    As `serve run FILE` does it: `serve.run` would start the replicas of a bundle that has not changed anew.
    """
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    options = {name: document[name] for name in ("proxy_location", "http_options", "logging_config")}
    serve.start(**options)
    client = _get_global_client()
    running = client.get_serve_details()["applications"]
    kept = others(running)
    if APPLICATION in running:
        _try(document["applications"][0], running[APPLICATION].get("deployed_app_config") or {})
    whole = {**document, "applications": [*kept, *document["applications"]]}
    client.deploy_apps(ServeDeploySchema.model_validate(whole))
    _wait()
    client.wait_for_proxies_serving(wait_for_applications_running=True)
    http = client.http_config
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"{'https' if http.ssl_certfile else 'http'}://{host}:{http.port}"


def _try(wanted: dict[str, Any], running: dict[str, Any]) -> None:
    """Open what is to replace something once beside it: a replica that fails at that is lost."""
    import ray

    (after,), before = wanted["deployments"], running.get("deployments", [{}])
    is_same = wanted["args"] == running.get("args") and after["user_config"] == before[0].get("user_config")
    if is_same or "num_gpus" in after["ray_actor_options"]:  # there may be no other share of a GPU to try it on
        return
    try:
        ray.get(ray.remote(num_cpus=0)(open_once).remote(wanted["args"]))
    except ray.exceptions.RayError as error:
        why = getattr(error, "cause", error)
        raise StageError(f"what runs stays, since this cannot be opened: {_last_line(str(why))}") from error


def others(applications: dict[str, Any]) -> list[dict[str, Any]]:
    """What else the cluster runs: whatever a document does not list is taken away."""
    kept = []
    for name, about in applications.items():
        if name == APPLICATION:
            continue
        if about["route_prefix"] == "/":
            raise PlanError(f"the application '{name}' of this cluster answers at / already", hint="serve status")
        if (config := about.get("deployed_app_config")) is not None:
            kept.append(config)
    return kept


def _wait() -> None:
    from ray import serve

    told = ""
    while True:
        found = serve.status().applications.get(APPLICATION)
        state, message = ("", "") if found is None else (str(found.status.value), found.message)
        if state == "RUNNING":
            return
        if state == "DEPLOY_FAILED":
            raise StageError(
                f"Ray could not start it: {_last_line(message)}", hint="Ray's own log says more, in logs/serve"
            )
        if message != told:
            told = message
            logger.info("%s", message)
        time.sleep(_POLL_S)


def _last_line(message: str) -> str:
    """Of a traceback the line that says what went wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["it does not say why"]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def _signals() -> SimpleQueue[int]:
    asked: SimpleQueue[int] = SimpleQueue()
    for known in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(known, lambda number, _: asked.put(number))
    return asked


def _attend(settings: Settings, document: dict[str, Any], asked: SimpleQueue[int]) -> None:
    """Until asked to stop. On SIGHUP, or as often as is set, bundles that changed are rolled out."""
    while True:
        number = int(signal.SIGHUP)
        with suppress(Empty):
            number = asked.get(timeout=settings.watch)
        if number != signal.SIGHUP:
            # Asked twice: now.
            signal.signal(number, signal.SIG_DFL)
            return
        document = _again(settings, document)


def _again(settings: Settings, document: dict[str, Any]) -> dict[str, Any]:
    try:
        changed = fleet(settings)
        if changed != document:
            _check(settings)
            deploy(changed)
            logger.info("what has changed is served now")
    except HastenError as error:
        logger.error("what has changed is not served: %s", error)
        return document
    return changed


def _start(settings: Settings) -> None:
    import ray

    share, replicas = share_of(settings), settings.replicas
    # More replicas than cores are slow, not forbidden: on one machine that is for its owner to say.
    cores = max(usable_cores(), share.cpus * (replicas.most or replicas.least if replicas is not None else 1))
    try:
        ray.init(
            address="local",
            num_cpus=cores,
            include_dashboard=False,
            logging_level=logging.ERROR,
            # Its lines are for people.
            log_to_driver=settings.log == "text",
        )
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise UnavailableError(f"Ray does not start: {_last_line(str(error))}") from error
    logger.info("Ray is started: its address is %s", ray.get_runtime_context().gcs_address)
    least = replicas.least if replicas is not None else 1
    there = int(ray.cluster_resources().get("GPU", 0))
    # Ray would wait for others to come, and we for Ray.
    if settings.gpus is not None and fitting(there, settings.gpus) < least:
        hint = "fewer --replicas, or a smaller share" if there else "leave --gpus out"
        raise UnsupportedError(
            f"{least} × {settings.gpus:g} of a GPU do not fit on the {there} of this machine", hint=hint
        )


def _connect(address: str) -> None:
    import ray

    where = urlsplit(address if "://" in address else f"//{address}")
    try:
        if where.port is not None:
            # Ray itself tries for minutes.
            socket.create_connection((where.hostname or "", where.port), _CONNECT_S).close()
        elif address != "auto":
            raise ValueError("it is no host:port")
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        why = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UnavailableError(f"no Ray cluster at {address}: {why[0]}", hint="ray start --head begins one") from error


def _free_port(host: str, port: int) -> int:
    """As given, or any that is free where that is 0; Ray does not tell which it took, nor well that it is taken."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            return int(tried.getsockname()[1])
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint="--host and --port take others"
        ) from error
