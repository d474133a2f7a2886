"""The code of a replica: the server's application behind Ray's proxy instead of hasten's own sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

import msgspec

from hasten.core.errors import HastenError, InputError, UnavailableError
from hasten.deploy.ray.config import DEPLOYMENT
from hasten.server.app import App
from hasten.server.asgi import Asgi
from hasten.server.http.exchange import Exchange
from hasten.server.protocols import tei
from hasten.server.protocols.routes import NotFoundError, Router
from hasten.server.settings import Settings
from hasten.server.startup import bundle_paths, http_limits, load_models, make_app
from hasten.server.telemetry import logs

logger = logging.getLogger("hasten")

Load = Callable[[str], Awaitable[object]]
_REPOSITORY = "/v2/repository/"


def application(arguments: dict[str, Any]) -> Any:
    """Build the application; `serve deploy` and `serve run` call this with the configuration's `args`."""
    from ray import serve

    settings = Settings.read(arguments, environment={})
    # Pickled together with the class, so that all methods in a replica share this object.
    replica = Replica(settings)

    async def load(_: object, model_id: str) -> ModelHandle:
        return await asyncio.to_thread(replica.hold, model_id)

    class Bundles:
        load: Load | None = None

        def __init__(self) -> None:
            replica.open(self.load)

        async def reconfigure(self, config: Mapping[str, Any]) -> None:
            await asyncio.to_thread(replica.update, config["bundles"])

        async def check_health(self) -> None:
            replica.check()

    deployment: type = Bundles
    if settings.max_models is not None:
        multiplexed = serve.multiplexed(load, max_num_models_per_replica=settings.max_models)
        deployment = type(Bundles.__name__, (Bundles,), {"load": multiplexed})
    # A function, which is called in the replica: anything else would be treated as the application and pickled.
    ingress = serve.ingress(lambda: replica.asgi)
    return serve.deployment(ingress(deployment), name=DEPLOYMENT).bind()


def open_shared(arguments: dict[str, Any]) -> None:
    """Open and close each bundle as a replica would."""
    settings = Settings.read(arguments, environment={})
    app = make_app(settings)
    for name, path in bundle_paths(settings).items():
        app.models.load(path, name)
        app.models.unload(name)


class Replica:
    """The server's application in one replica."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def open(self, load: Load | None) -> None:
        """Open the application in the replica's process; with `load`, models are loaded on demand."""
        settings = self._settings
        logs.set_up(settings.log_format)
        app = self._app = make_app(settings)
        answer: Callable[[Exchange], None] = app
        if load is None:
            load_models(app, settings)
        else:
            for name, path in bundle_paths(settings).items():
                app.models.register(path, name)
            answer = OnDemandApp(app, load)
            app.is_ready = True
        self.asgi = Asgi(answer, http_limits(settings), self._close, app, adds_request_id=False)

    def _close(self) -> None:
        self._app.is_ready = False
        self._app.close(self._settings.drain_timeout)

    def update(self, digests: Mapping[str, str]) -> None:
        """Reload the bundles whose hash differs from the loaded one."""
        models, paths = self._app.models, bundle_paths(self._settings)
        loaded = {served.name: served.bundle.manifest.digest for served in models}
        for name, digest in digests.items():
            if self._settings.max_models is not None and name not in loaded:
                models.register(paths[name], name)
            elif loaded.get(name) != digest and models.load(paths[name], name).bundle.manifest.digest != digest:
                logger.warning("the bundle %s on this node differs from the deployed one: deploy again", name)

    def check(self) -> None:
        """Raise an UnavailableError if only a restart of this replica helps."""
        if (fault := self._app.fault()) is not None:
            raise UnavailableError(fault)

    def hold(self, name: str) -> ModelHandle:
        """Load a model, which stays loaded until the handle is deleted."""
        self._app.models.load_known(name)
        return ModelHandle(self._app, name)


class ModelHandle:
    """A model that stays loaded until Ray, which limits their number, calls `__del__`."""

    def __init__(self, app: App, name: str) -> None:
        self._app, self._name = app, name
        self._is_held = True

    def __del__(self) -> None:
        # Ray calls it before Python does; at shutdown, all models are closed already.
        if self._is_held and self._app.is_ready:
            self._is_held = False
            with suppress(HastenError):  # it was unloaded by a request
                self._app.models.unload(self._name)


class OnDemandApp:
    """An application that loads a model at its first request."""

    def __init__(self, app: App, load: Load) -> None:
        self._app, self._load = app, load
        self._router = Router(app.routes)
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, exchange: Exchange) -> None:
        task = asyncio.ensure_future(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            # In a thread, since a large body would block the event loop.
            name = await asyncio.to_thread(requested_model, self._router, exchange)
            if name in (known := self._app.models.paths):
                self._app.keys.check(exchange.headers.get("authorization", ""))
                await self._load(name)
            elif name == "":
                raise InputError(
                    "the request names no model, and several are served",
                    hint=f'set "model" to one of {", ".join(known)}',
                )
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("the model could not be loaded")
            exchange.fail(UnavailableError("the model could not be loaded; see the replica's log"))
        else:
            self._app(exchange)


class _ModelField(msgspec.Struct):
    model: str = ""


def requested_model(router: Router, exchange: Exchange) -> str | None:
    """Return the model that a request names in its path, query or body; None if the route needs no model."""
    try:
        route, names = router.find(exchange.method, exchange.path)
    except NotFoundError:
        return None
    if route.path.startswith(_REPOSITORY):
        return None  # these routes load and unload models themselves
    if "model" in names:
        return names["model"]
    if route.handle is tei.info:
        return parse_qs(exchange.query).get("model", [""])[0]
    if "model" not in getattr(route.body, "__struct_fields__", ()):
        return None
    try:
        return msgspec.json.decode(exchange.content(), type=_ModelField).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the route's handler reports the error
