"""Load and unload models for clients: off unless the operator allows it, coalesced, in a bounded number of threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hasten.core.errors import AccuracyError, BundleError, ForbiddenError, HastenError, InputError, StageError
from hasten.server.models.registry import ModelRegistry

logger = logging.getLogger("hasten")

# Models open one at a time (`ModelRegistry`); the other threads wait for replaced and unloaded models to drain.
_THREADS = 4

# Receives the error of a finished operation, or None, on one of the threads.
OnDone = Callable[[HastenError | None], None]


@dataclass(slots=True, eq=False)
class _Operation:
    """One load or unload, and the requests that wait for it."""

    waiting: list[OnDone] = field(default_factory=list)
    future: Future[None] = field(init=False)


class ModelControl:
    """Loads and unloads models. Thread-safe; both methods return a function that withdraws the request."""

    def __init__(self, models: ModelRegistry, *, is_enabled: bool = False) -> None:
        self._models = models
        self._is_enabled = is_enabled
        self._threads = ThreadPoolExecutor(_THREADS, "control")
        self._lock = threading.Lock()
        # The operations that a further request joins, by action and model: never more than twice the known models.
        self._operations: dict[tuple[str, str], _Operation] = {}

    def load(self, name: str, parameters: Mapping[str, Any], on_done: OnDone) -> Callable[[], None]:
        """Load or reload a model. If its bundle is damaged, the loaded model stays.

        Load parameters, which tritonserver's clients may send, are not supported.
        """
        self._check_enabled()
        if parameters:
            raise InputError("load parameters are not supported", hint=f"leave out {', '.join(parameters)}")
        path = self._models.known_path(name)
        # Requests that joined during the load may refer to files that changed after it had read them.
        steps = (lambda: self._models.load(path, name), lambda: self._models.refresh(path, name))
        return self._join(("load", name), steps, on_done)

    def unload(self, name: str, on_done: OnDone) -> Callable[[], None]:
        """Unload a model; it answers its open requests first."""
        self._check_enabled()
        self._models.named(name)
        return self._join(("unload", name), (lambda: self._models.unload(name),), on_done)

    def close(self) -> bool:
        """Drop all requests that have not begun; return whether no other was in progress."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            return not self._operations

    def _check_enabled(self) -> None:
        if not self._is_enabled:
            raise ForbiddenError("clients must not load or unload models", hint="start the server with --model-control")

    def _join(
        self, key: tuple[str, str], steps: tuple[Callable[[], object], ...], on_done: OnDone
    ) -> Callable[[], None]:
        with self._lock:
            operation = self._operations.get(key)
            if operation is None:
                operation = self._operations[key] = _Operation()
                operation.future = self._threads.submit(self._run, key, operation, steps)
            operation.waiting.append(on_done)
        return partial(self._withdraw, key, operation, on_done)

    def _withdraw(self, key: tuple[str, str], operation: _Operation, on_done: OnDone) -> None:
        """Drop a request, and the operation if it has not begun and no other request waits for it."""
        with self._lock:
            if on_done in operation.waiting:
                operation.waiting.remove(on_done)
            if not operation.waiting and operation.future.cancel():
                self._operations.pop(key, None)

    def _run(self, key: tuple[str, str], operation: _Operation, steps: tuple[Callable[[], object], ...]) -> None:
        error: HastenError | None = None
        first, *others = steps
        try:
            try:
                first()
            finally:
                with self._lock:
                    del self._operations[key]
            for step in others:
                step()
        except (BundleError, AccuracyError) as damage:
            error = InputError(damage.message, hint=damage.hint)
        except HastenError as known:
            error = known
        except Exception:
            logger.exception("failed to %s '%s'", *key)
            error = StageError("internal server error: see the server's log")
        with self._lock:
            waiting, operation.waiting = operation.waiting, []
        for on_done in waiting:
            on_done(error)
