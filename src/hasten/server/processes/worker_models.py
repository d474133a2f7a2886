"""The models of an API worker. The parent decides which they are; the sessions are those of engine processes."""

from __future__ import annotations

from pathlib import Path

from hasten.bundle import open_bundle
from hasten.core.errors import BundleError, StageError
from hasten.core.system.hardware import usable_cores
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.models.registry import Model, ModelRegistry
from hasten.server.processes.control import ControlChannel
from hasten.server.processes.messages import ChangeModel, Configure, Done, ModelVersion
from hasten.server.processes.remote_session import connect
from hasten.server.processes.shared_counters import SharedCounters
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.encoder_engine import EngineObserver
from hasten.server.settings import Settings
from hasten.server.startup import unload_timeout_s

# Batches of remote sessions take no cores of this process, so that they never wait for any.
_UNLIMITED_CORES = 2**20
# Models are opened after all engine processes have loaded them.
_CONNECT_S = 10.0


class WorkerModels(ModelRegistry):
    """The models of an API worker. Clients that load or unload one ask the parent, which changes all workers."""

    def __init__(self, settings: Settings, request: Configure, counters: SharedCounters) -> None:
        super().__init__(self._refuse, unload_timeout_s(settings))
        self._settings = settings
        self._directory, self._engines = Path(request.directory), range(request.engines)
        self._worker = request.index
        # The word cache and the library of the tokenizer use one thread each; the workers share the cores.
        self._encoders = max(1, usable_cores() // (2 * request.workers))
        self._counters = counters
        self._scheduler = CoreScheduler(_UNLIMITED_CORES)
        self._opened: dict[tuple[str, int], Model] = {}
        self.channel: ControlChannel | None = None
        self.expect(request.expected)
        for name, path in request.known.items():
            self.register(Path(path), name)

    def prepare(self, version: ModelVersion, column: int) -> str:
        """Open a model that the engine processes have loaded, and return its variant."""
        bundle = open_bundle(Path(version.path))
        if bundle.manifest.digest != version.digest:
            raise BundleError(f"{version.name} has changed on disk since it was loaded")
        remote = connect(
            *(self._directory, self._engines, version.name, version.generation),
            encoders=self._encoders,
            timeout_s=_CONNECT_S,
        )
        # The engine process observes the batches.
        observer = EngineObserver()
        model = EncoderModel(version.name, bundle, self._settings, self._scheduler, observer, remote)
        model.engine.count_with(self._counters.requests(self._worker, column))
        self._opened[version.name, version.generation] = model
        return model.variant.name

    def swap(self, version: ModelVersion) -> None:
        """Serve a prepared model instead of the one of that name, which stays open until it is retired."""
        model = self._opened[version.name, version.generation]
        with self._change:
            self._models = {**self._models, version.name: model}
            self._expected -= {version.name}
            self._paths.setdefault(version.name, Path(version.path))

    def retire(self, version: ModelVersion, drain_s: float) -> None:
        """Serve a model no longer, drain and close it. Does nothing if this worker has not opened it."""
        model = self._opened.pop((version.name, version.generation), None)
        if model is None:
            return
        with self._change:
            self._models = {name: other for name, other in self._models.items() if other is not model}
        model.close(drain_s)

    # What clients ask for

    def load(self, path: Path, name: str) -> Model:
        self._ask("load", name)
        return self.named(name)

    def refresh(self, path: Path, name: str) -> Model | None:
        self._ask("refresh", name)
        return self.named(name)

    def unload(self, name: str) -> None:
        self.named(name)
        self._ask("unload", name)

    def _ask(self, action: str, name: str) -> None:
        assert self.channel is not None
        self.channel.call_from_thread(ChangeModel(action, name), Done)

    def _refuse(self, path: Path, name: str, old: Model | None) -> Model:
        raise StageError(f"'{name}' cannot be opened without the parent")
