"""Server settings: each option is a flag, an environment variable and a key of a TOML file, in order of precedence.

--max-queue 100        HASTEN_MAX_QUEUE=100        max_queue = 100
"""

from __future__ import annotations

import math
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from hasten.bundle.manifest import FILE, is_bundle
from hasten.core.errors import HastenError, PlanError
from hasten.core.options import Option, flag
from hasten.core.plan import parse_duration
from hasten.core.registry import did_you_mean

_MAX_PORT = 65535
# Other variables that begin with HASTEN_: read elsewhere, read by the tests, or set by Kubernetes for a service that is
# named hasten.
_OTHER_VARIABLES = (
    *("BUNDLES", "CONFIG", "API_KEYS", "CACHE"),
    *("REAL_MODELS", "REAL_DATA", "TRITON_ENV", "RAY_ENV", "KSERVE_ENV"),
)
_KUBERNETES_PREFIXES = ("SERVICE_", "PORT_")
_BYTES = {"": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


def _parse_int(text: str) -> int:
    if not text.isdecimal():
        raise PlanError(f"'{text}' is not a whole number")
    return int(text)


def _parse_count(text: str) -> int:
    if (number := _parse_int(text)) < 1:
        raise PlanError("the value must be at least 1")
    return number


def _parse_port(text: str) -> int:
    if (number := _parse_int(text)) > _MAX_PORT:
        raise PlanError(f"{number} is not a port: the highest is {_MAX_PORT}")
    return number


def _parse_size(text: str) -> int:
    number = text.rstrip("BGKMbgkm")
    unit = text[len(number) :].upper()
    if not number.strip().isdecimal() or unit not in _BYTES:
        raise PlanError(f"'{text}' is not a size", hint="write 512KB, 32MB or 1GB")
    return _parse_count(number.strip()) * _BYTES[unit]


def _float(text: str) -> float:
    """Return a number, or NaN, which is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _parse_factor(text: str) -> float:
    if not 1 < (number := _float(text)) < math.inf:
        raise PlanError(f"'{text}' is not a number above 1", hint="write 3 or 2.5")
    return number


def _parse_fraction(text: str) -> float:
    if not 0 < (number := _float(text)) <= 1:
        hint = "write 1 or 0.5; use --replicas for more GPUs"
        raise PlanError(f"'{text}' is not a fraction of a GPU: a replica uses at most one", hint=hint)
    return number


@dataclass(frozen=True, slots=True)
class Replicas:
    """The number of replicas of a Ray deployment; between the two counts it is autoscaled."""

    min_count: int
    # None: as many as there is room for.
    max_count: int | None


def _parse_replicas(text: str) -> Replicas:
    if text == "auto":
        return Replicas(1, None)
    first, is_range, last = text.partition("-")
    try:
        replicas = Replicas(_parse_count(first), _parse_count(last if is_range else first))
        if replicas.max_count is not None and replicas.max_count < replicas.min_count:
            raise PlanError(f"'{text}' is not a range: the maximum is less than the minimum")
    except PlanError as error:
        raise PlanError(error.message, hint="write 2, 1-8 or auto") from error
    return replicas


def _parse_workers(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return _parse_count(text)
    except PlanError as error:
        raise PlanError(error.message, hint="write 4 or auto") from error


def _parse_bool(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise PlanError(f"'{text}' is neither yes nor no")
    return known[text.lower()]


def _parse_microseconds(text: str) -> int:
    return 0 if text == "0" else round(parse_duration(text, "us") * 1e6)


def _parse_choice(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise PlanError(f"'{text}' is not one of {', '.join(choices)}")
        return text

    return read


_ADDRESS, _PROCESSES, _MODELS, _LIMITS = "address", "processes", "models", "limits"
_SECURITY, _OPERATION, _RAY = "security", "operation", "Ray Serve"
_bool, _text = partial(Option, _parse_bool, ""), partial(Option, str)
_count, _port = partial(Option, _parse_count, "N"), partial(Option, _parse_port, "N")
_duration, _file = partial(Option, parse_duration, "TIME"), partial(Option, Path, "FILE")


@dataclass(frozen=True, slots=True)
class Settings:
    """All options of the server."""

    bundles: tuple[str, ...] = ()

    host: Annotated[str, _text("ADDRESS", "address to listen on", _ADDRESS)] = "127.0.0.1"
    port: Annotated[int, _port("HTTP port; 0 picks a free one", _ADDRESS)] = 8000
    grpc: Annotated[bool, _bool("serve gRPC as well", _ADDRESS)] = True
    grpc_port: Annotated[int | None, _port("gRPC port (default: HTTP port + 1)", _ADDRESS)] = None

    workers: Annotated[
        int | None,
        Option(
            *(_parse_workers, "N|auto"),
            "processes that answer clients (default: several if a model runs on a GPU)",
            _PROCESSES,
        ),
    ] = None
    engines: Annotated[
        int, _count("processes that run models, if several answer clients; each loads all models", _PROCESSES)
    ] = 1

    variant: Annotated[str | None, _text("NAME", "variant to run (default: the fastest that runs here)", _MODELS)] = (
        None
    )
    instances: Annotated[int | None, _count("sessions per model (default: measured; on a GPU up to 2)", _MODELS)] = None
    threads: Annotated[int | None, _count("threads per session (default: cores divided by sessions)", _MODELS)] = None
    max_batch_delay: Annotated[
        int,
        Option(
            _parse_microseconds,
            "US",
            "maximum wait for further requests to batch with, as 2ms; a bare number is microseconds",
            _MODELS,
        ),
    ] = 0
    max_batch_tokens: Annotated[
        int | None, _count("token budget of a batch (default: 512 per thread, 8192 on a GPU)", _MODELS)
    ] = None
    slots: Annotated[int, _count("sequences that a generative model decodes at once", _MODELS)] = 8

    max_queue: Annotated[int, _count("reject requests (429) while N are open, queued or running", _LIMITS)] = 2048
    max_queue_time: Annotated[float, _duration("reject requests (429) whose estimated wait exceeds TIME", _LIMITS)] = (
        5.0
    )
    max_slowdown: Annotated[
        float | None,
        Option(
            _parse_factor, "N", "reject requests (429) estimated to take more than N× their unloaded latency", _LIMITS
        ),
    ] = None
    max_body: Annotated[int, Option(_parse_size, "SIZE", "reject larger request bodies (413)", _LIMITS)] = 4 * 2**20
    max_memory: Annotated[
        int | None,
        Option(
            _parse_size, "SIZE", "keep resident memory below SIZE: split batches, reject texts (CPU variants)", _LIMITS
        ),
    ] = None
    max_client_batch_size: Annotated[int, _count("reject requests (413) with more than N texts", _LIMITS)] = 1024
    max_request_tokens: Annotated[int, _count("reject requests (413) with more than N input tokens", _LIMITS)] = 2**18
    max_new_tokens: Annotated[int, _count("maximum number of tokens to generate per text", _LIMITS)] = 2048
    max_connections: Annotated[int, _count("reject connections (503) while N are open", _LIMITS)] = 4096
    read_timeout: Annotated[float, _duration("time to receive a request, from its first byte", _LIMITS)] = 30.0
    idle_timeout: Annotated[float, _duration("close keep-alive connections that are idle for longer", _LIMITS)] = 75.0
    timeout: Annotated[
        float, _duration("time to answer, or to start a stream, if the request sets no timeout", _LIMITS)
    ] = 60.0

    model_control: Annotated[bool, _bool("let clients load and unload models", _SECURITY)] = False
    api_key_file: Annotated[Path | None, _file("file of API keys, one per line (or HASTEN_API_KEYS)", _SECURITY)] = None
    tls_cert: Annotated[Path | None, _file("TLS certificate for HTTPS and gRPC, as PEM", _SECURITY)] = None
    tls_key: Annotated[Path | None, _file("private key of the TLS certificate, as PEM", _SECURITY)] = None
    tls_client_ca: Annotated[
        Path | None, _file("require client certificates that are signed by these, as PEM", _SECURITY)
    ] = None

    drain_timeout: Annotated[float, _duration("time to answer open requests on shutdown", _OPERATION)] = 30.0
    reload_interval: Annotated[
        float | None, _duration("check for changed bundles every TIME (SIGHUP checks at once)", _OPERATION)
    ] = None
    stall_timeout: Annotated[float, _duration("exit with code 70 if a batch is overdue for longer", _OPERATION)] = 60.0
    log_format: Annotated[
        str, Option(_parse_choice("text", "json"), "FORMAT", "log format on stderr: text or json", _OPERATION)
    ] = "text"
    log_requests: Annotated[bool | None, _bool("log each request (default: in json)", _OPERATION)] = None

    runner: Annotated[
        str, Option(_parse_choice("local", "ray"), "RUNNER", "local (this process) or ray (Ray Serve)", _RAY)
    ] = "local"
    replicas: Annotated[
        Replicas | None,
        Option(_parse_replicas, "COUNT", "replicas: N, MIN-MAX (autoscaled) or auto (default: 1)", _RAY),
    ] = None
    gpus: Annotated[
        float | None,
        Option(
            *(_parse_fraction, "FRACTION"),
            "fraction of a GPU per replica: 0.5 puts two on one (default: 1 if the variant needs a GPU)",
            _RAY,
        ),
    ] = None
    max_models: Annotated[
        int | None, _count("models that a replica holds; others are loaded on demand (default: all)", _RAY)
    ] = None
    address: Annotated[
        str | None, _text("ADDRESS", "address of a running Ray cluster (default: start a local one)", _RAY)
    ] = None
    write_config: Annotated[Path | None, _file("write the YAML for `serve deploy` instead of running it", _RAY)] = None

    @property
    def logs_requests(self) -> bool:
        """Return whether each request is logged."""
        return self.log_format == "json" if self.log_requests is None else self.log_requests

    @classmethod
    def read(
        cls, arguments: Mapping[str, object], environment: Mapping[str, str] = os.environ, file: Path | None = None
    ) -> Settings:
        """Read the settings from command-line arguments, the environment and a file, in this order of precedence."""
        if file is None and environment.get("HASTEN_CONFIG"):
            file = Path(environment["HASTEN_CONFIG"])
        from_file = _read_file(file) if file is not None else {}
        values: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            variable = f"HASTEN_{name.upper()}"
            sources = (
                (flag(name), arguments.get(name)),
                (variable, environment.get(variable) or None),
                (f"{name} in {file}", from_file.get(name)),
            )
            source, value = next((pair for pair in sources if pair[1] is not None), ("", None))
            if value is not None:
                values[name] = _read_value(option, value, source)
        bundles = arguments.get("bundles") or _bundles_from(environment) or from_file.get("bundles", [])
        if not isinstance(bundles, list | tuple) or not all(isinstance(bundle, str) for bundle in bundles):
            raise PlanError(f"bundles in {file} is not a list of paths")
        if not bundles:
            raise PlanError("nothing to serve", hint="hasten serve BUNDLE …, HASTEN_BUNDLES, or bundles in a file")
        settings = cls(bundles=tuple(bundles), **values)
        if settings.grpc and settings.grpc_port is None and settings.port == _MAX_PORT:
            raise PlanError(f"there is no port after {_MAX_PORT} for gRPC", hint="use --grpc-port N or --no-grpc")
        if settings.grpc and settings.grpc_port == settings.port != 0:
            raise PlanError(f"HTTP and gRPC cannot share port {settings.port}", hint="choose another --grpc-port")
        return settings


OPTIONS: dict[str, Option] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(Settings, include_extras=True).items()
    if get_origin(kind) is Annotated
}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a message for each environment variable that begins with HASTEN_ and is not read."""
    known = [f"HASTEN_{name.upper()}" for name in (*OPTIONS, *_OTHER_VARIABLES)]
    ignored = tuple(f"HASTEN_{prefix}" for prefix in _KUBERNETES_PREFIXES)
    return [
        f"{name} is set but is not an option{did_you_mean(name, known)}"
        for name in environment
        if name.startswith("HASTEN_") and name not in known and not name.startswith(ignored)
    ]


def find_bundles(path: Path) -> list[Path]:
    """Return the bundles in a directory of bundles, or any other path itself."""
    if not path.is_dir() or is_bundle(path):
        return [path]
    # Damaged bundles are included: opening them reports the error.
    bundles = [entry for entry in path.iterdir() if (entry / FILE).is_file() and not entry.name.startswith(".")]
    return sorted(bundles) or [path]


def _read_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "--config, or HASTEN_CONFIG, names a TOML file"
        raise PlanError(f"cannot read settings from {file}: {error.strerror or error}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file} is not TOML: {error}") from error
    known = ["bundles", *OPTIONS]
    for name in document:
        if name not in known:
            raise PlanError(f"{file} sets '{name}', which is not an option{did_you_mean(name, known)}")
    return document


def _bundles_from(environment: Mapping[str, str]) -> list[str]:
    """Split HASTEN_BUNDLES as a shell does, so that quoted paths may contain spaces."""
    try:
        return shlex.split(environment.get("HASTEN_BUNDLES", ""))
    except ValueError as error:
        raise PlanError(f"HASTEN_BUNDLES: {error}") from error


def _read_value(option: Option, value: object, source: str) -> object:
    if not isinstance(value, str | int | float):
        raise PlanError(f"{source}: expected a single value, not {type(value).__name__}")
    try:
        return option.read(str(value))
    except HastenError as error:
        raise PlanError(f"{source}: {error.message}", hint=error.hint) from error
