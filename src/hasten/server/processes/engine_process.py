"""The engine process: it owns the sessions of the models of one device and runs the batches of all API workers."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from hasten.bundle import open_bundle
from hasten.core.errors import PlanError
from hasten.core.system.hardware import usable_cores
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.models.registry import fault_of
from hasten.server.processes.batch_receiver import BatchReceiver, ServedModel
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.settings import Settings
from hasten.server.telemetry.metrics import Metrics

# Decoding an answer is a copy into shared memory here, which one thread does while sessions run.
_COPY_THREADS = 1
# How often batches that have run are counted.
_TICK_S = 0.05


class EngineHost:
    """The models of an engine process, and the Unix socket on which API workers send batches. Thread-safe.

    Several generations of a model serve side by side during a hot reload.
    """

    def __init__(self, settings: Settings, directory: Path, index: int) -> None:
        """Listen on a socket of `directory`, which must be private (0700)."""
        self._settings = settings
        self._metrics = Metrics()
        threads = (settings.instances or 1) * (settings.threads or 1)
        self._scheduler = CoreScheduler(max(usable_cores(), threads))
        self._models: dict[tuple[str, int], ServedModel] = {}
        self._metrics.follow(lambda: [served.model for served in self._models.values()])
        # The number of sessions of each model, which is measured once: measuring it under load would be wrong.
        self._instances: dict[str, int] = {}
        self._change = threading.Lock()
        self._is_closed = threading.Event()
        self._receiver = BatchReceiver(directory, index, lambda name, generation: self._models.get((name, generation)))
        self._recorder = threading.Thread(target=self._record, daemon=True)
        self._recorder.start()

    def load(self, path: Path, name: str, generation: int) -> None:
        """Open, warm up and test a bundle; raise a HastenError if that fails. API workers may then connect to it."""
        with self._change:
            if self._is_closed.is_set():
                raise PlanError("the engine process is shutting down")
            if (name, generation) in self._models:
                raise PlanError(f"generation {generation} of '{name}' is loaded already")
            settings = replace(self._settings, instances=self._instances.get(name, self._settings.instances))
            bundle = open_bundle(path)
            observer = self._metrics.of_encoder(name)
            model = EncoderModel(name, bundle, settings, self._scheduler, observer, encoders=_COPY_THREADS)
            self._instances[name] = model.instances
            self._models = {**self._models, (name, generation): ServedModel(model)}

    def unload(self, name: str, generation: int, drain_s: float = 0.0) -> bool:
        """Drain and close a model, and the connections to it; return whether all batches were answered."""
        with self._change:
            served = self._models.get((name, generation))
            if served is None:
                raise PlanError(f"generation {generation} of '{name}' is not loaded")
            self._models = {key: other for key, other in self._models.items() if other is not served}
        is_done = served.model.close(drain_s)
        self._receiver.disconnect(served)
        return is_done

    def fault(self) -> str | None:
        """Return why only a new process would serve again, or None: a stalled or broken session, an ended thread."""
        if self._is_closed.is_set():
            return None
        if not (self._receiver.is_alive() and self._recorder.is_alive()):
            return "a thread of the engine process has ended"
        return fault_of([served.model for served in self._models.values()], self._settings.stall_timeout)

    def can_serve(self) -> bool:
        """Return whether batches run: there is no fault and no session is being tried again."""
        is_recovering = any(served.model.engine.is_recovering for served in self._models.values())
        return not self._is_closed.is_set() and not is_recovering and self.fault() is None

    def metrics(self) -> bytes:
        """Return the metrics of batches, and of this process, in Prometheus text format.

        Those of requests are the workers'. Batches in the queue wait for a session, as requests in theirs do.
        """
        return self._metrics.render()

    def close(self, drain_s: float) -> bool:
        """Drain and close all models and connections; return whether all batches were answered. May be called twice."""
        with self._change:
            self._is_closed.set()
            models, self._models = self._models, {}
        until = time.monotonic() + drain_s
        are_done = [served.model.close(max(0.0, until - time.monotonic())) for served in models.values()]
        self._receiver.close()
        return all(are_done)

    def _record(self) -> None:
        while not self._is_closed.wait(_TICK_S):
            self._metrics.deferred.run()
