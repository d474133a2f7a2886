"""The messages of the control channel between the parent and its child processes, and settings as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hasten.server.settings import Settings


class Message(msgspec.Struct, tag=True, frozen=True):
    """The base of all requests and replies."""


class ModelVersion(msgspec.Struct, frozen=True):
    """One generation of a model: a hot reload serves the next one beside it until it is drained."""

    name: str
    generation: int
    path: str
    # The digest of its manifest, which must be unchanged when a process that was started again opens it.
    digest: str


class Configure(Message, frozen=True):
    """Start a child process. The reply is Done for an engine, which then loads models, and for a worker, which listens.

    File descriptors are inherited ones.
    """

    settings: bytes
    # Among the children of its kind.
    index: int
    workers: int
    engines: int
    # Of the Unix sockets of the engines; private to this server.
    directory: str
    # For workers: the listening sockets, the shared counters, the address of gRPC, and the paths of models by name, of
    # which those in `expected` will be loaded.
    listeners: tuple[int, ...] = ()
    counters: int = -1
    grpc_address: str = ""
    known: dict[str, str] = {}
    expected: tuple[str, ...] = ()


class LoadModel(Message, frozen=True):
    """Have an engine load a model. Replied by Done."""

    version: ModelVersion


class UnloadModel(Message, frozen=True):
    """Have an engine unload a model that no worker uses. Replied by Done."""

    version: ModelVersion


class PrepareModel(Message, frozen=True):
    """Have a worker open a model without serving it. `column` is that of its open requests. Replied by ModelLoaded."""

    version: ModelVersion
    column: int


class SwapModel(Message, frozen=True):
    """Have a worker serve a prepared model instead of the one of that name. Replied by Done."""

    version: ModelVersion


class RetireModel(Message, frozen=True):
    """Have a worker serve a model no longer, and drain it. Replied by Done; unknown models are ignored."""

    version: ModelVersion
    drain_s: float


class ReadStatus(Message, frozen=True):
    """Ask a child for its Status."""


class ReadMetrics(Message, frozen=True):
    """Ask a child for its metrics, or the parent for those of all processes. Replied by MetricsText."""


class SetHealth(Message, frozen=True):
    """Tell a worker what to report. Replied by Done."""

    is_alive: bool
    is_ready: bool


class ReloadCredentials(Message, frozen=True):
    """Have a worker read API keys and certificates again. Replied by Done."""


class ChangeModel(Message, frozen=True):
    """Ask the parent to load, refresh (if it has changed) or unload a model for a client. Replied by Done."""

    action: str
    name: str


class Drain(Message, frozen=True):
    """Have a child accept nothing more and answer what it has. Replied by Done."""

    timeout_s: float


class Done(Message, frozen=True):
    """The request succeeded."""


class ModelLoaded(Message, frozen=True):
    """The model was opened, and runs this variant."""

    variant: str


class Status(Message, frozen=True):
    """The state of a child: why only a new process would serve again, and whether it can serve now."""

    fault: str | None
    can_serve: bool


class MetricsText(Message, frozen=True):
    """Metrics in Prometheus text format."""

    text: bytes


class Failed(Message, frozen=True):
    """The request failed with an error of this class."""

    kind: str
    message: str
    hint: str | None = None


Request = (
    Configure
    | LoadModel
    | UnloadModel
    | PrepareModel
    | SwapModel
    | RetireModel
    | ReadStatus
    | ReadMetrics
    | SetHealth
    | ReloadCredentials
    | ChangeModel
    | Drain
)
Reply = Done | ModelLoaded | Status | MetricsText | Failed


def encode_settings(settings: Settings) -> bytes:
    """Encode settings for another process."""
    return msgspec.json.encode(settings, enc_hook=_encode_path)


def decode_settings(data: bytes) -> Settings:
    """Decode settings from another process."""
    return msgspec.json.decode(data, type=Settings, dec_hook=_decode_path)


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_path(kind: type, value: Any) -> object:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"cannot decode {kind.__name__}")
