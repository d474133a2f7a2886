"""Registry of the loaded models by name; models are loaded, replaced and unloaded while others answer."""

from __future__ import annotations

import threading
import time
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hasten.backends import Artifact
from hasten.bundle import Bundle
from hasten.bundle.manifest import FILE
from hasten.core.errors import InputError, PlanError, TooLargeError, UnavailableError
from hasten.predictor import first_runnable_variant, require_variant
from hasten.server.scheduling.engine_lifecycle import EngineLifecycle
from hasten.server.scheduling.queue import Limits
from hasten.server.settings import Settings

# The number of tokens is known only after tokenizing the whole text, before truncation, which takes seconds and
# hundreds of megabytes for a few million characters. No language needs this many characters per token.
_CHARACTERS_PER_TOKEN = 8


class Model(ABC):
    """A bundle that is served. Subclasses open its variant, warm it up, check it and start the engine."""

    engine: EngineLifecycle[Any]
    # The number of sessions or decoders.
    instances: int
    # The Unix time at which the model was loaded.
    since: float

    def __init__(self, name: str, bundle: Bundle, settings: Settings, artifact: Artifact | None = None) -> None:
        """Open the tokenizer, and choose the variant unless it was chosen."""
        self.name = name
        self.bundle = bundle
        self.settings = settings
        self.tokenizer = bundle.tokenizer()
        if artifact is None:
            artifact = (
                require_variant(bundle, bundle.entry(settings.variant))
                if settings.variant
                else first_runnable_variant(bundle)
            )
        self.artifact = artifact
        self.variant = self.artifact.variant

    @property
    def running_sequences(self) -> int | None:
        """Return the number of sequences being generated; None for an encoder, which holds none between batches."""
        return None

    @property
    def built_agreement(self) -> float:
        """Return the agreement of the variant with the reference, as its build has measured it."""
        entries = (entry for entry in self.bundle.manifest.variants if entry.name == self.variant.name)
        return next((entry.agreement.value for entry in entries), 1.0)

    def deadline(self, timeout_s: float | None) -> float:
        """Return the deadline of a request: after its own timeout or, without one, after the server's."""
        return time.monotonic() + (self.settings.timeout if timeout_s is None else timeout_s)

    def check_items(self, count: int) -> None:
        """Raise an error if a request has too many items; called before they are walked."""
        if count > (limit := self.settings.max_client_batch_size):
            raise TooLargeError(f"the request has {count} items; the limit is {limit} (--max-client-batch-size)")

    def check_characters(self, content: object, max_entries: int) -> None:
        """Raise an error if the texts of a payload are too long to be tokenized, or a list in it is too long."""
        limit = _CHARACTERS_PER_TOKEN * self.settings.max_request_tokens
        size = _count_characters(content, max_entries)
        if size > limit:
            raise TooLargeError(f"the request has {size} characters; the limit is {limit} (--max-request-tokens)")

    def check_tokens(self, tokens: int) -> None:
        """Raise an error if the texts of a request have too many tokens."""
        if tokens > (limit := self.settings.max_request_tokens):
            raise TooLargeError(f"the request has {tokens} tokens; the limit is {limit} (--max-request-tokens)")

    def close(self, drain_s: float = 0.0) -> bool:
        """Drain and close the engine; return whether all requests were answered."""
        is_done = self.engine.drain(drain_s)
        self.engine.close()
        return is_done


class Closeable(Protocol):
    """A model that a registry holds under a name."""

    @property
    def name(self) -> str:
        """Return the name of the model."""

    def close(self, drain_s: float) -> bool:
        """Drain and close the model; return whether all requests were answered."""


Loaded = TypeVar("Loaded", bound=Closeable)
# The name, inode, modification time and size of every file of a bundle.
Stamp = frozenset[tuple[str, int, int, int]]


class Registry(Generic[Loaded]):
    """Models by name. Thread-safe; readers take no lock, since the mappings are replaced, never changed."""

    def __init__(self, open_model: Callable[[Path, str, Loaded | None], Loaded], drain_s: float = 60.0) -> None:
        """`open_model` opens a bundle under a name; its third argument is the model that it will replace, if any."""
        self._open = open_model
        # Time for a replaced or unloaded model to answer its open requests.
        self._drain_s = drain_s
        self._models: dict[str, Loaded] = {}
        # Names of the models that have yet to be loaded for the first time.
        self._expected: frozenset[str] = frozenset()
        self._paths: dict[str, Path] = {}
        # The files at the latest attempt to load each model.
        self._stamps: dict[str, Stamp | None] = {}
        self._change = threading.Lock()

    def __iter__(self) -> Iterator[Loaded]:
        return iter(self._models.values())

    def named(self, name: str) -> Loaded:
        """Return a loaded model."""
        model = self._models.get(name)
        if model is None and name in self._expected:
            raise UnavailableError(f"'{name}' is not loaded yet")
        if model is None:
            known = ", ".join(self._models) or "none"
            raise PlanError(f"model '{name}' not found", hint=f"models: {known}")
        return model

    def only(self, name: str = "", is_fitting: Callable[[Loaded], bool] = lambda _: True) -> Loaded:
        """Return the model of that name or, if the name is empty, the only one that fits."""
        if name:
            return self.named(name)
        if self._expected:
            # Which model fits is known only when all are loaded.
            raise UnavailableError("the models are not loaded yet")
        fitting = [model for model in self if is_fitting(model)]
        if len(fitting) != 1:
            names = ", ".join(model.name for model in fitting)
            problem = f"more than one model fits: {names}" if fitting else "no loaded model supports this request"
            raise InputError(problem, hint='name one with "model"' if fitting else None)
        return fitting[0]

    @property
    def is_complete(self) -> bool:
        """Return whether all expected models are loaded."""
        return not self._expected

    @property
    def expected(self) -> frozenset[str]:
        """Return the names of the models that have yet to be loaded for the first time."""
        return self._expected

    def expect(self, names: Iterable[str]) -> None:
        """Announce models that will be loaded: requests for them fail with 503 until then."""
        self._expected = frozenset(names)

    def load(self, path: Path, name: str) -> Loaded:
        """Load a bundle, swap it in for the model of that name, and drain the old one.

        If the new one cannot be opened, the old one stays.
        """
        with self._change:
            old, new = self._replace(path, name)
        if old is not None:
            old.close(self._drain_s)
        return new

    def refresh(self, path: Path, name: str) -> Loaded | None:
        """Load a bundle if its files differ from the latest attempt; return None if not, or if it is incomplete."""
        with self._change:
            stamp = stamp_of(path)
            if stamp is None or stamp == self._stamps.get(name):
                return None
            old, new = self._replace(path, name)
        if old is not None:
            old.close(self._drain_s)
        return new

    def _replace(self, path: Path, name: str) -> tuple[Loaded | None, Loaded]:
        # Taken before the bundle is read, so that no change in between is missed.
        self._stamps[name] = stamp_of(path)
        old = self._models.get(name)
        new = self._open(path, name, old)
        self._models = {**self._models, name: new}
        self._expected -= {name}
        self._paths[name] = path
        return old, new

    def unload(self, name: str) -> None:
        """Remove a model and drain it."""
        with self._change:
            model = self.named(name)
            self._models = {other: loaded for other, loaded in self._models.items() if other != name}
        model.close(self._drain_s)

    def register(self, path: Path, name: str) -> None:
        """Register a path without loading it; it is loaded on demand."""
        self._paths[name] = path

    def known_path(self, name: str) -> Path:
        """Return the path under which a model was loaded or registered before."""
        if name in self._expected:
            raise UnavailableError(f"'{name}' is not loaded yet")
        path = self._paths.get(name)
        if path is None:
            raise PlanError(f"'{name}' is not one of this server's models", hint=f"known: {', '.join(self._paths)}")
        return path

    def load_known(self, name: str) -> Loaded:
        """Load a model from the path under which it was loaded or registered before."""
        return self.load(self.known_path(name), name)

    @property
    def paths(self) -> dict[str, Path]:
        """Return the paths of all models that were loaded or registered."""
        return dict(self._paths)

    def close(self, drain_s: float) -> bool:
        """Drain and close all models; return whether all requests were answered in time."""
        done: list[bool] = []
        threads = [threading.Thread(target=lambda model=model: done.append(model.close(drain_s))) for model in self]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return all(done)


# The models of a process that answers requests.
ModelRegistry = Registry[Model]


def fault_of(models: Iterable[Model], stall_timeout_s: float) -> str | None:
    """Return why only a new process would serve one of these models again, or None."""
    now = time.monotonic()
    for model in models:
        if model.engine.stalled_for_s(now) >= stall_timeout_s:
            return f"a session of {model.name} has stalled"
        if (fault := model.engine.fault()) is not None:
            return f"{model.name}: {fault}"
    return None


def queue_limits(settings: Settings) -> Limits:
    """Return the limits of a model's queue, with the defaults for a batch."""
    return Limits(settings.max_queue, settings.max_queue_time, settings.max_slowdown)


def _count_characters(content: object, max_entries: int) -> int:
    """Return the number of characters of all texts in a payload; a short text counts as one token."""
    if isinstance(content, str):
        return max(len(content), _CHARACTERS_PER_TOKEN)
    if isinstance(content, Mapping):
        content = list(content.values())
    if not isinstance(content, list | tuple):
        return 0
    if len(content) > max_entries:
        raise TooLargeError(f"a list of {len(content)} entries is longer than {max_entries}")
    return sum(_count_characters(entry, max_entries) for entry in content)


def stamp_of(path: Path) -> Stamp | None:
    """Return the state of all files, since copies arrive file by file; None while the bundle is being replaced."""
    try:
        if not (path / FILE).is_file():
            return None
        files = ((file, file.stat()) for file in path.rglob("*") if file.is_file())
        return frozenset((str(file.relative_to(path)), s.st_ino, s.st_mtime_ns, s.st_size) for file, s in files)
    except OSError:
        return None


def repository(models: ModelRegistry, *, only_ready: bool) -> list[dict[str, str]]:
    """Return the repository index of the Open Inference Protocol: known models, loaded or not, and their states."""
    loaded = {model.name for model in models}
    states = {True: {"state": "READY"}, False: {"state": "UNAVAILABLE", "reason": "unloaded"}}
    names = [name for name in models.paths if name in loaded or not only_ready]
    return [{"name": name, "version": "1", **states[name in loaded]} for name in names]
