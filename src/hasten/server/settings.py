"""How to serve. Every option is a flag, an environment variable and a key of a TOML file; the first that is set counts.

--max-queue 100        HASTEN_MAX_QUEUE=100        max_queue = 100
"""

from __future__ import annotations

import math
import os
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from hasten.bundle.manifest import FILE, is_bundle
from hasten.core.errors import HastenError, PlanError
from hasten.core.plan import parse_duration
from hasten.core.registry import did_you_mean

_LAST_PORT = 65535
# Variables that are no options: ours, those of the tests, and what Kubernetes tells of a service that is called hasten.
_OTHERS = (
    *("BUNDLES", "CONFIG", "API_KEYS", "CACHE", "HEARTBEAT"),
    *("REAL_MODELS", "REAL_DATA", "TRITON_ENV", "RAY_ENV", "KSERVE_ENV"),
)
_KUBERNETES = ("SERVICE_", "PORT_")
_BYTES = {"": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise PlanError(f"'{text}' is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if (number := _whole(text)) < 1:
        raise PlanError("it must be at least 1")
    return number


def _port(text: str) -> int:
    if (number := _whole(text)) > _LAST_PORT:
        raise PlanError(f"there is no port {number}")
    return number


def _size(text: str) -> int:
    number = text.rstrip("BGKMbgkm")
    unit = text[len(number) :].upper()
    if not number.strip().isdecimal() or unit not in _BYTES:
        raise PlanError(f"'{text}' is not a size", hint="write 512KB, 32MB or 1GB")
    return _count(number.strip()) * _BYTES[unit]


def _factor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 < number < math.inf:
        raise PlanError(f"'{text}' is not a number above 1", hint="write 3, or 2.5")
    return number


def _share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise PlanError(
            f"'{text}' is not a share of a GPU, and a replica computes on one",
            hint="write 1, or 0.5; --replicas for more",
        )
    return number


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many processes of a fleet; between the two, load decides."""

    least: int
    # None: as many as there is room for.
    most: int | None


def _replicas(text: str) -> Replicas:
    if text == "auto":
        return Replicas(1, None)
    least, is_range, most = text.partition("-")
    try:
        found = Replicas(_count(least), _count(most if is_range else least))
        if found.most is not None and found.most < found.least:
            raise PlanError(f"'{text}' ends before it begins")
    except PlanError as error:
        raise PlanError(error.message, hint="write 2, 1-8 or auto") from error
    return found


def _flag(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise PlanError(f"'{text}' is neither yes nor no")
    return known[text.lower()]


def _time(text: str) -> float:
    return parse_duration(text)


def _microseconds(text: str) -> int:
    return 0 if text == "0" else round(parse_duration(text, "us") * 1e6)


def _one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise PlanError(f"'{text}' is none of {', '.join(known)}")
        return text

    return read


@dataclass(frozen=True, slots=True)
class Option:
    """How a setting is read, and how `--help` tells of it."""

    read: Callable[[str], Any]
    metavar: str
    what: str
    group: str

    @property
    def is_flag(self) -> bool:
        return self.read is _flag

    def help(self, default: object) -> str:
        if default is None or self.is_flag:
            return self.what
        units = {"TIME": lambda: f"{default:g}s", "SIZE": lambda: f"{int(str(default)) // 2**20}MB"}
        return f"{self.what} (default: {units.get(self.metavar, lambda: default)()})"


_WHERE, _MODELS, _LIMITS, _SAFETY, _LIFE = "where", "models", "limits", "who may ask", "operation"
_FLEET = "on Ray"


@dataclass(frozen=True, slots=True)
class Settings:
    bundles: tuple[str, ...] = ()

    host: Annotated[str, Option(str, "ADDRESS", "listen here", _WHERE)] = "127.0.0.1"
    port: Annotated[int, Option(_port, "N", "for HTTP; 0: any that is free", _WHERE)] = 8000
    grpc: Annotated[bool, Option(_flag, "", "whether to serve gRPC too", _WHERE)] = True
    grpc_port: Annotated[int | None, Option(_port, "N", "for gRPC (default: the one after HTTP's)", _WHERE)] = None

    variant: Annotated[str | None, Option(str, "NAME", "which to run (default: the fastest here)", _MODELS)] = None
    instances: Annotated[int | None, Option(_count, "N", "sessions of each model (default: measured)", _MODELS)] = None
    threads: Annotated[int | None, Option(_count, "N", "of each session (default: the cores shared out)", _MODELS)] = (
        None
    )
    max_wait: Annotated[
        int, Option(_microseconds, "US", "wait so many microseconds, or 2ms, for more to batch", _MODELS)
    ] = 0
    batch_tokens: Annotated[
        int | None, Option(_count, "N", "of a batch (default: 512 a thread, 8192 on a GPU)", _MODELS)
    ] = None

    slots: Annotated[int, Option(_count, "N", "texts that a model writes at once", _MODELS)] = 8

    max_queue: Annotated[int, Option(_count, "N", "more requests than this get 429", _LIMITS)] = 2048
    max_queue_time: Annotated[float, Option(_time, "TIME", "so do those that would wait longer", _LIMITS)] = 5.0
    max_slowdown: Annotated[
        float | None, Option(_factor, "N", "and those that would take N times as long as alone", _LIMITS)
    ] = None
    max_body: Annotated[int, Option(_size, "SIZE", "larger bodies get 413", _LIMITS)] = 32 * 2**20
    max_items: Annotated[int, Option(_count, "N", "texts of one request, at most", _LIMITS)] = 1024
    max_tokens: Annotated[int, Option(_count, "N", "tokens of one request, at most", _LIMITS)] = 2**18
    max_new_tokens: Annotated[int, Option(_count, "N", "tokens of one text that is written, at most", _LIMITS)] = 2048
    max_connections: Annotated[int, Option(_count, "N", "at once, at most; others get 503", _LIMITS)] = 4096
    read_timeout: Annotated[float, Option(_time, "TIME", "to receive a request, from its first byte", _LIMITS)] = 30.0
    idle_timeout: Annotated[float, Option(_time, "TIME", "between two requests of a connection", _LIMITS)] = 75.0
    timeout: Annotated[
        float, Option(_time, "TIME", "to answer, or to begin a stream, where a request does not say", _LIMITS)
    ] = 60.0

    key_file: Annotated[Path | None, Option(Path, "FILE", "API keys, one a line (or HASTEN_API_KEYS)", _SAFETY)] = None

    tls_cert: Annotated[Path | None, Option(Path, "FILE", "a certificate: HTTPS and gRPC over TLS", _SAFETY)] = None
    tls_key: Annotated[Path | None, Option(Path, "FILE", "the certificate's key", _SAFETY)] = None

    drain: Annotated[float, Option(_time, "TIME", "to answer what was taken, when stopped", _LIFE)] = 30.0
    watch: Annotated[float | None, Option(_time, "TIME", "look so often for changed bundles (SIGHUP: now)", _LIFE)] = (
        None
    )
    hang: Annotated[float, Option(_time, "TIME", "a batch that takes longer ends the process", _LIFE)] = 60.0
    supervise: Annotated[bool, Option(_flag, "", "start it again when it dies or hangs", _LIFE)] = False
    log: Annotated[str, Option(_one_of("text", "json"), "FORM", "text or json, to stderr", _LIFE)] = "text"
    log_requests: Annotated[bool | None, Option(_flag, "", "a line for each request (default: in json)", _LIFE)] = None

    on: Annotated[str, Option(_one_of("here", "ray"), "ENGINE", "what runs it: this process, or Ray Serve", _FLEET)] = (
        "here"
    )
    replicas: Annotated[
        Replicas | None, Option(_replicas, "COUNT", "N, MIN-MAX as load asks for, or auto (default: 1)", _FLEET)
    ] = None
    gpus: Annotated[
        float | None,
        Option(
            _share, "SHARE", "of a GPU for each replica: 0.5 puts two on one (default: 1 where it needs one)", _FLEET
        ),
    ] = None
    max_models: Annotated[
        int | None, Option(_count, "N", "a replica holds so many, and loads others when asked (default: all)", _FLEET)
    ] = None
    address: Annotated[str | None, Option(str, "ADDRESS", "a running cluster's (default: Ray is started)", _FLEET)] = (
        None
    )
    write: Annotated[Path | None, Option(Path, "FILE", "do not run it: write the YAML for `serve deploy`", _FLEET)] = (
        None
    )

    @property
    def logs_requests(self) -> bool:
        return self.log == "json" if self.log_requests is None else self.log_requests

    @classmethod
    def read(
        cls, given: Mapping[str, object], environment: Mapping[str, str] = os.environ, file: Path | None = None
    ) -> Settings:
        """From what was given on the command line, the environment, and a file, in that order."""
        if file is None and environment.get("HASTEN_CONFIG"):
            file = Path(environment["HASTEN_CONFIG"])
        from_file = read_file(file) if file is not None else {}
        found: dict[str, Any] = {}
        for name, option in OPTIONS.items():
            variable = f"HASTEN_{name.upper()}"
            sources = (
                (flag(name), given.get(name)),
                (variable, environment.get(variable) or None),
                (f"{name} in {file}", from_file.get(name)),
            )
            source, value = next((pair for pair in sources if pair[1] is not None), ("", None))
            if value is not None:
                found[name] = _read(option, value, source)
        bundles = given.get("bundles") or _listed(environment) or from_file.get("bundles", [])
        if not isinstance(bundles, list | tuple) or not all(isinstance(one, str) for one in bundles):
            raise PlanError(f"bundles in {file} is not a list of paths")
        if not bundles:
            raise PlanError("nothing to serve", hint="hasten serve BUNDLE …, HASTEN_BUNDLES, or bundles in a file")
        settings = cls(bundles=tuple(bundles), **found)
        if settings.grpc and settings.grpc_port is None and settings.port == _LAST_PORT:
            raise PlanError(f"there is no port after {_LAST_PORT} for gRPC", hint="--grpc-port N, or --no-grpc")
        if settings.grpc and settings.grpc_port == settings.port != 0:
            raise PlanError(f"HTTP and gRPC cannot share port {settings.port}", hint="--grpc-port takes another")
        return settings


OPTIONS: dict[str, Option] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(Settings, include_extras=True).items()
    if get_origin(kind) is Annotated
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """What is wrong with each that looks as if it were meant for us, and is not read."""
    known = [f"HASTEN_{name.upper()}" for name in (*OPTIONS, *_OTHERS)]
    ours = (name for name in environment if name.startswith("HASTEN_") and name not in known)
    others = tuple(f"HASTEN_{prefix}" for prefix in _KUBERNETES)
    return [
        f"{name} is set, and is no option{did_you_mean(name, known)}" for name in ours if not name.startswith(others)
    ]


def bundles_in(path: Path) -> list[Path]:
    """A directory of bundles as the bundles in it; anything else as it is."""
    if not path.is_dir() or is_bundle(path):
        return [path]
    # One that is damaged too: it is not left out without a word.
    found = [entry for entry in path.iterdir() if (entry / FILE).is_file() and not entry.name.startswith(".")]
    return sorted(found) or [path]


def read_file(file: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "--config, or HASTEN_CONFIG, names a TOML file"
        raise PlanError(f"no settings at {file}: {error.strerror or error}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{file} is not TOML: {error}") from error
    known = ["bundles", *OPTIONS]
    for name in document:
        if name not in known:
            raise PlanError(f"{file} sets '{name}', which is no option{did_you_mean(name, known)}")
    return document


def _listed(environment: Mapping[str, str]) -> list[str]:
    """As a shell would read them: with quotes around a space."""
    try:
        return shlex.split(environment.get("HASTEN_BUNDLES", ""))
    except ValueError as error:
        raise PlanError(f"HASTEN_BUNDLES: {error}") from error


def _read(option: Option, value: object, source: str) -> object:
    if not isinstance(value, str | int | float):
        raise PlanError(f"{source}: it is one value, not {type(value).__name__}")
    try:
        return option.read(str(value))
    except HastenError as error:
        raise PlanError(f"{source}: {error.message}", hint=error.hint) from error
