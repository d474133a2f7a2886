"""What is to run, as Ray Serve reads it: the document that `serve deploy` takes, made of the server's settings."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hasten.bundle import Bundle, open_bundle
from hasten.core.errors import PlanError, missing_package, translate_os_errors
from hasten.core.hardware import this_machine, usable_cores
from hasten.core.variant import CPU
from hasten.server.run import bundle_paths
from hasten.server.settings import Replicas, Settings, flag

APPLICATION = "hasten"
DEPLOYMENT = "bundles"
_BUILDER = "hasten.deploy.ray:application"
# Of a file that may be written again.
_MARK = "# Written by hasten serve --on ray; deploy it with: serve deploy THIS_FILE"
# As many as Ray's own `auto` allows.
_MOST_REPLICAS = 100
# A batch of which the rate is this near to the best is full: a larger one only makes its requests wait.
_NEARLY = 0.9

# What Ray does in its own way, and why it is not asked for.
_OTHERWISE = {
    "grpc_port": "its proxy speaks HTTP to us",
    "supervise": "it starts again what dies or hangs",
    "max_connections": "connections are its proxy's",
    "read_timeout": "connections are its proxy's",
}
_OURS = ("on", "replicas", "gpus", "address", "write", "host", "port", "grpc", "watch", *_OTHERWISE)


@dataclass(frozen=True, slots=True)
class Share:
    """Of a machine, for one replica."""

    instances: int
    threads: int

    @property
    def cpus(self) -> int:
        return self.instances * self.threads


def fleet(settings: Settings) -> dict[str, Any]:
    """The whole document; a bundle that is missing is seen before anything runs."""
    settings = with_gpus(_absolute(settings))
    _refuse(settings)
    bundles = _bundles(settings)
    share = share_of(settings)
    return {
        "proxy_location": "EveryNode",
        "http_options": _http(settings),
        # Requests are logged by the application, where that is asked for.
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": _BUILDER,
                # What changes here starts every replica anew, one after the other; what changes below does not.
                "args": arguments(replace(settings, instances=share.instances, threads=share.threads)),
                "deployments": [_deployment(settings, bundles, share)],
            }
        ],
    }


def with_gpus(settings: Settings) -> Settings:
    """With one for each replica where a bundle runs on one and nothing else was said: Ray hides all others."""
    variants = [
        bundle.chosen if settings.variant is None else bundle.entry(settings.variant)
        for bundle in _bundles(settings).values()
    ]
    if all(entry.device == CPU for entry in variants):
        if settings.gpus is not None:
            names = ", ".join(dict.fromkeys(entry.name for entry in variants))
            raise PlanError(f"{names} runs on the CPU: it has no use for --gpus", hint="leave --gpus out")
        return settings
    # On a machine without one the graph answers, as it does in `hasten serve`.
    is_there = _is_elsewhere(settings) or bool(this_machine().gpus)
    return settings if settings.gpus is not None or not is_there else replace(settings, gpus=1.0)


def _bundles(settings: Settings) -> dict[str, Bundle]:
    return {name: open_bundle(path) for name, path in bundle_paths(settings).items()}


def _is_elsewhere(settings: Settings) -> bool:
    """On a cluster, of which this machine knows nothing."""
    return settings.address is not None or settings.write is not None


def arguments(settings: Settings) -> dict[str, Any]:
    """What differs from the defaults, as `Settings.read` takes it."""
    found: dict[str, Any] = {"bundles": list(settings.bundles)}
    for field in fields(Settings):
        value = getattr(settings, field.name)
        if field.name != "bundles" and field.name not in _OURS and value != field.default:
            found[field.name] = str(value) if isinstance(value, Path) else value
    return found


def share_of(settings: Settings) -> Share:
    """As given; otherwise this machine's cores shared out among the replicas, or one core where load decides."""
    replicas = settings.replicas or Replicas(1, 1)
    instances = settings.instances or 1
    if settings.threads is not None:
        return Share(instances, settings.threads)
    is_fixed = replicas.least == replicas.most and settings.gpus is None
    return Share(instances, max(1, usable_cores() // (replicas.least * instances)) if is_fixed else 1)


def _deployment(settings: Settings, bundles: dict[str, Bundle], share: Share) -> dict[str, Any]:
    replicas = settings.replicas or Replicas(1, 1)
    resources: dict[str, float] = {"num_cpus": share.cpus}
    if settings.gpus is not None:
        resources["num_gpus"] = settings.gpus
    scaling: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.least != replicas.most:
        # A batch that runs in each session, and one that waits for it.
        ongoing = 2 * share.instances * min(full_batch(bundle, settings.variant) for bundle in bundles.values())
        most = replicas.most or _room(settings, share)
        limits = {"min_replicas": replicas.least, "max_replicas": max(replicas.least, most)}
        scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": ongoing}}
    return {
        "name": DEPLOYMENT,
        **scaling,
        # Our queue decides what is too much, and tells it better than a proxy can.
        "max_ongoing_requests": settings.max_queue,
        "max_queued_requests": settings.max_queue,
        "graceful_shutdown_timeout_s": settings.drain,
        "ray_actor_options": resources,
        # Replicas take another bundle in the place of the one they serve when its hash changes, one after the other.
        "user_config": {"bundles": {name: bundle.manifest.digest for name, bundle in bundles.items()}},
    }


def full_batch(bundle: Bundle, variant: str | None) -> int:
    """The smallest that the build's benchmark found to answer nearly as many rows a second as any."""
    report = bundle.report
    name, usual = variant or bundle.chosen.name, report.plan.shapes.optimal.sequence
    timings = [entry for entry in report.bench.timings if entry.variant == name and entry.shape.sequence == usual]
    best = max((entry.sentences_per_s for entry in timings), default=0.0)
    return min((entry.shape.batch for entry in timings if entry.sentences_per_s >= _NEARLY * best), default=1)


def _room(settings: Settings, share: Share) -> int:
    """On this machine as many as have cores, and their share of a GPU; a cluster may grow."""
    if _is_elsewhere(settings):
        return _MOST_REPLICAS
    room = usable_cores() // share.cpus
    return room if settings.gpus is None else min(room, fitting(len(this_machine().gpus), settings.gpus))


def fitting(gpus: int, share: float) -> int:
    """Replicas with that share of one: what is left of several GPUs adds up to none."""
    return gpus * int(1 / share)


def _http(settings: Settings) -> dict[str, Any]:
    options = {
        "host": settings.host,
        "port": settings.port,
        "keep_alive_timeout_s": max(1, round(settings.idle_timeout)),
    }
    if settings.tls_cert is not None and settings.tls_key is not None:
        options |= {"ssl_certfile": str(settings.tls_cert), "ssl_keyfile": str(settings.tls_key)}
    return options


def _absolute(settings: Settings) -> Settings:
    """Replicas run elsewhere. Links stay: what they lead to may change."""
    files = {name: getattr(settings, name) for name in ("key_file", "tls_cert", "tls_key")}
    bundles = tuple(str(Path(bundle).expanduser().absolute()) for bundle in settings.bundles)
    changed = {name: path.expanduser().absolute() for name, path in files.items() if path is not None}
    return replace(settings, bundles=bundles, **changed)


def _refuse(settings: Settings) -> None:
    defaults = Settings()
    for name, why in _OTHERWISE.items():
        if getattr(settings, name) != getattr(defaults, name):
            raise PlanError(f"{flag(name)} is nothing that Ray Serve can be told: {why}", hint="leave it out")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise PlanError("TLS needs a certificate and its key", hint="--tls-cert FILE --tls-key FILE")
    for file in (settings.key_file, settings.tls_cert, settings.tls_key):
        if file is not None and not file.is_file():
            raise PlanError(f"there is no file {file}")
    is_remote = _is_elsewhere(settings)
    if is_remote and settings.port == 0:
        raise PlanError("a cluster listens where it is told", hint="--port N")
    if is_remote and os.environ.get("HASTEN_API_KEYS"):
        # Left behind here, it would leave the fleet open to all.
        raise PlanError("HASTEN_API_KEYS does not reach a cluster", hint="--key-file FILE, on every node")


def write(document: dict[str, Any], file: Path) -> None:
    """As YAML; never over what somebody else wrote."""
    if find_spec("yaml") is None:
        raise missing_package("pyyaml", "writing YAML", "ray")
    import yaml

    if file.exists() and (not file.is_file() or not file.read_text(errors="replace").startswith(_MARK)):
        raise PlanError(f"{file} is there, and was not written by hasten", hint="choose another place with --write")
    text = f"{_MARK}\n{yaml.safe_dump(document, sort_keys=False, allow_unicode=True)}"
    with translate_os_errors(f"writing {file}"):
        if not file.parent.is_dir():
            raise PlanError(f"there is no directory {file.parent}")
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as stream:
            stream.write(text)
        Path(stream.name).chmod(0o644)
        Path(stream.name).replace(file)
