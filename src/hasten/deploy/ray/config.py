"""Build the configuration of Ray Serve, as read by `serve deploy`, from the server's settings."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import PlanError, missing_package, translate_os_errors
from hasten.core.options import flag
from hasten.core.system.hardware import this_machine, usable_cores
from hasten.core.variant import CPU
from hasten.server.settings import Replicas, Settings
from hasten.server.startup import bundle_paths

APPLICATION = "hasten"
DEPLOYMENT = "bundles"
_BUILDER = "hasten.deploy.ray:application"
# Marks a file that may be overwritten.
_MARKER = "# Written by hasten serve --runner ray; deploy it with: serve deploy THIS_FILE"
# The limit of Ray's own `auto`.
_MAX_REPLICAS = 100
# A batch whose throughput is this share of the best is full: a larger one only adds latency.
_FULL_SHARE = 0.9

# Settings that do not apply to Ray, and the reasons.
_UNSUPPORTED = {
    "tls_client_ca": "its proxies do not ask for client certificates",
    "grpc_port": "its proxy forwards HTTP only",
    "max_connections": "its proxy handles connections",
    "read_timeout": "its proxy handles connections",
}
_NOT_FOR_REPLICAS = (
    *("runner", "replicas", "gpus", "address", "write_config", "host", "port", "grpc", "reload_interval"),
    *_UNSUPPORTED,
)


@dataclass(frozen=True, slots=True)
class Share:
    """The sessions of a replica and the threads of each."""

    instances: int
    threads: int

    @property
    def cpus(self) -> int:
        """Return the number of cores of a replica."""
        return self.instances * self.threads


def serve_config(settings: Settings) -> dict[str, Any]:
    """Return the whole configuration; raise an error for a missing bundle before anything runs."""
    settings = with_gpus(_absolute(settings))
    _check(settings)
    bundles = _bundles(settings)
    share = replica_share(settings)
    tls = {"ssl_certfile": str(settings.tls_cert), "ssl_keyfile": str(settings.tls_key)} if settings.tls_cert else {}
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": settings.host,
            "port": settings.port,
            "keep_alive_timeout_s": max(1, round(settings.idle_timeout)),
            **tls,
        },
        # The application logs requests itself, if enabled.
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": _BUILDER,
                # A change of the arguments restarts the replicas one by one; a change of the deployment does not.
                "args": arguments(replace(settings, instances=share.instances, threads=share.threads)),
                "deployments": [_deployment(settings, bundles, share)],
            }
        ],
    }


def with_gpus(settings: Settings) -> Settings:
    """Set one GPU per replica if a bundle needs one and the user set none: Ray hides other GPUs."""
    variants = [
        bundle.chosen if settings.variant is None else bundle.entry(settings.variant)
        for bundle in _bundles(settings).values()
    ]
    if all(entry.device == CPU for entry in variants):
        if settings.gpus is not None:
            names = ", ".join(dict.fromkeys(entry.name for entry in variants))
            raise PlanError(f"--gpus is not supported: {names} runs on the CPU", hint="leave --gpus out")
        return settings
    # On a machine without a GPU the graph is served, as in `hasten serve`.
    has_gpus = _is_remote(settings) or bool(this_machine().gpus)
    return settings if settings.gpus is not None or not has_gpus else replace(settings, gpus=1.0)


def _bundles(settings: Settings) -> dict[str, Bundle]:
    return {name: open_bundle(path) for name, path in bundle_paths(settings).items()}


def _is_remote(settings: Settings) -> bool:
    """Return whether the replicas run on a cluster instead of this machine."""
    return settings.address is not None or settings.write_config is not None


def arguments(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from the defaults, as `Settings.read` takes them."""
    values: dict[str, Any] = {"bundles": list(settings.bundles)}
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if field.name != "bundles" and field.name not in _NOT_FOR_REPLICAS and value != field.default:
            values[field.name] = str(value) if isinstance(value, Path) else value
    return values


def replica_share(settings: Settings) -> Share:
    """Return the configured threads; by default the replicas share the cores, or get one each if autoscaled."""
    replicas = settings.replicas or Replicas(1, 1)
    instances = settings.instances or 1
    if settings.threads is not None:
        return Share(instances, settings.threads)
    is_fixed = replicas.min_count == replicas.max_count and settings.gpus is None
    return Share(instances, max(1, usable_cores() // (replicas.min_count * instances)) if is_fixed else 1)


def _deployment(settings: Settings, bundles: dict[str, Bundle], share: Share) -> dict[str, Any]:
    replicas = settings.replicas or Replicas(1, 1)
    resources: dict[str, float] = {"num_cpus": share.cpus}
    if settings.gpus is not None:
        resources["num_gpus"] = settings.gpus
    scaling: dict[str, Any] = {"num_replicas": replicas.min_count}
    if replicas.min_count != replicas.max_count:
        # One batch runs in each session, and one waits.
        ongoing = 2 * share.instances * min(full_batch(bundle, settings.variant) for bundle in bundles.values())
        max_replicas = replicas.max_count or _max_replicas(settings, share)
        limits = {"min_replicas": replicas.min_count, "max_replicas": max(replicas.min_count, max_replicas)}
        scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": ongoing}}
    return {
        "name": DEPLOYMENT,
        **scaling,
        # The server's own queue limits apply first, with better error messages than the proxy's.
        "max_ongoing_requests": settings.max_queue,
        "max_queued_requests": settings.max_queue,
        "graceful_shutdown_timeout_s": settings.drain_timeout,
        "ray_actor_options": resources,
        # When a hash changes, the replicas reload that bundle one by one.
        "user_config": {"bundles": {name: bundle.manifest.digest for name, bundle in bundles.items()}},
    }


def full_batch(bundle: Bundle, variant: str | None) -> int:
    """Return the smallest batch size whose throughput in the benchmark is close to the best."""
    report = bundle.report
    name, length = variant or bundle.chosen.name, report.plan.shapes.optimal.sequence
    timings = [entry for entry in report.bench.timings if entry.variant == name and entry.shape.sequence == length]
    best = max((entry.rows_per_s for entry in timings), default=0.0)
    return min((entry.shape.batch for entry in timings if entry.rows_per_s >= _FULL_SHARE * best), default=1)


def _max_replicas(settings: Settings, share: Share) -> int:
    """Return the number of replicas that fit on this machine; a cluster may grow."""
    if _is_remote(settings):
        return _MAX_REPLICAS
    count = usable_cores() // share.cpus
    return count if settings.gpus is None else min(count, max_gpu_replicas(len(this_machine().gpus), settings.gpus))


def max_gpu_replicas(gpus: int, share: float) -> int:
    """Return the number of replicas with this share of a GPU; remainders of several GPUs cannot be combined."""
    return gpus * int(1 / share)


def _absolute(settings: Settings) -> Settings:
    """Make paths absolute for replicas on other nodes; links are kept, since their targets may change."""
    files = {name: getattr(settings, name) for name in ("api_key_file", "tls_cert", "tls_key")}
    bundles = tuple(str(Path(bundle).expanduser().absolute()) for bundle in settings.bundles)
    changed = {name: path.expanduser().absolute() for name, path in files.items() if path is not None}
    return replace(settings, bundles=bundles, **changed)


def _check(settings: Settings) -> None:
    defaults = Settings()
    for name, reason in _UNSUPPORTED.items():
        if getattr(settings, name) != getattr(defaults, name):
            raise PlanError(f"{flag(name)} is not supported by Ray Serve: {reason}", hint="leave it out")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise PlanError("TLS needs a certificate and its key", hint="set --tls-cert FILE and --tls-key FILE")
    for file in (settings.api_key_file, settings.tls_cert, settings.tls_key):
        if file is not None and not file.is_file():
            raise PlanError(f"there is no file {file}")
    is_remote = _is_remote(settings)
    if is_remote and settings.port == 0:
        raise PlanError("--port 0 is not supported on a cluster", hint="set --port N")
    if is_remote and os.environ.get("HASTEN_API_KEYS"):
        # Without the variable, the cluster would accept requests without keys.
        raise PlanError("HASTEN_API_KEYS is not passed to a cluster", hint="--api-key-file FILE, on every node")


def write(document: dict[str, Any], file: Path) -> None:
    """Write the configuration as YAML; never overwrite a file that hasten did not write."""
    if find_spec("yaml") is None:
        raise missing_package("pyyaml", "writing YAML", "ray")
    import yaml

    if file.exists() and (not file.is_file() or not file.read_text(errors="replace").startswith(_MARKER)):
        raise PlanError(f"{file} exists and was not written by hasten", hint="choose another file with --write-config")
    text = f"{_MARKER}\n{yaml.safe_dump(document, sort_keys=False, allow_unicode=True)}"
    with translate_os_errors(f"writing {file}"):
        if not file.parent.is_dir():
            raise PlanError(f"cannot write {file}: there is no directory {file.parent}")
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
            stream.write(text)
        Path(stream.name).chmod(0o644)
        Path(stream.name).replace(file)
