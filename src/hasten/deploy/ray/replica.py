"""What runs in the processes of the fleet: the server's application, behind Ray's proxy instead of our own sockets."""

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
from hasten.server import logs, tei
from hasten.server.app import App, State
from hasten.server.asgi import Asgi
from hasten.server.exchange import Exchange
from hasten.server.routes import NotFoundError, Router
from hasten.server.run import bundle_paths, http_limits, load_models, make_app
from hasten.server.settings import Settings

logger = logging.getLogger("hasten")

Load = Callable[[str], Awaitable[object]]
_REPOSITORY = "/v2/repository/"


def application(arguments: dict[str, Any]) -> Any:
    """What `serve deploy` and `serve run` import and call with the document's `args`."""
    from ray import serve

    settings = Settings.read(arguments, environment={})
    # Pickled as one with the class: what opens it in the replica and what answers from it is the same object there.
    replica = Replica(settings)

    async def load(_: object, model_id: str) -> Held:
        return await asyncio.to_thread(replica.hold, model_id)

    class Bundles:
        load: Load | None = None

        def __init__(self) -> None:
            replica.open(self.load)

        async def reconfigure(self, config: Mapping[str, Any]) -> None:
            await asyncio.to_thread(replica.update, config["bundles"])

        async def check_health(self) -> None:
            replica.check()

    chosen: type = Bundles
    if settings.max_models is not None:
        multiplexed = serve.multiplexed(load, max_num_models_per_replica=settings.max_models)
        chosen = type(Bundles.__name__, (Bundles,), {"load": multiplexed})
    # A function, called in the replica: anything else would be taken for the application itself, and copied.
    ingress = serve.ingress(lambda: replica.asgi())
    return serve.deployment(ingress(chosen), name=DEPLOYMENT).bind()


def open_once(arguments: dict[str, Any]) -> None:
    """Each bundle, as a replica would, and close it."""
    settings = Settings.read(arguments, environment={})
    app = make_app(settings)
    for name, path in bundle_paths(settings).items():
        app.models.load(path, name)
        app.models.unload(name)


class Replica:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def open(self, load: Load | None) -> None:
        """In the process that answers; `load` is for models that are loaded when they are asked for."""
        settings = self._settings
        logs.set_up(settings.log)
        app = self._app = make_app(settings)
        answer: Callable[[Exchange], None] = app
        if load is None:
            load_models(app, settings)
        else:
            for name, path in bundle_paths(settings).items():
                app.models.know(path, name)
            answer = OnDemand(app, load)
            app.state = State.READY
        self._asgi = Asgi(answer, http_limits(settings), self._close, app, names_requests=False)

    def asgi(self) -> Asgi:
        return self._asgi

    def _close(self) -> None:
        self._app.state = State.DRAINING
        self._app.close(self._settings.drain)

    def update(self, digests: Mapping[str, str]) -> None:
        """Put what lies on the disk now in the place of what is served, where that is something else."""
        models, paths = self._app.models, bundle_paths(self._settings)
        there = {served.name: served.bundle.manifest.digest for served in models}
        for name, digest in digests.items():
            if self._settings.max_models is not None and name not in there:
                models.know(paths[name], name)
            elif there.get(name) != digest and models.load(paths[name], name).bundle.manifest.digest != digest:
                logger.warning("%s on this node is not what was deployed: deploy again", name)

    def check(self) -> None:
        if not self._app.is_alive():
            raise UnavailableError("a session hangs")

    def hold(self, name: str) -> Held:
        self._app.models.load_again(name)
        return Held(self._app, name)


class Held:
    """A model that is there until Ray, which counts them, calls `__del__`."""

    def __init__(self, app: App, name: str) -> None:
        self._app, self._name = app, name
        self._is_held = True

    def __del__(self) -> None:
        # Ray calls it, and then Python does; at the end all are closed already.
        if self._is_held and self._app.is_ready:
            self._is_held = False
            with suppress(HastenError):  # somebody has unloaded it
                self._app.models.unload(self._name)


class OnDemand:
    """An application whose models are loaded when they are asked for."""

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
            # Not in the event loop: a body may be large.
            name = await asyncio.to_thread(asked_model, self._router, exchange)
            if name in (known := self._app.models.paths):
                self._app.keys.check(exchange.headers.get("authorization", ""))
                await self._load(name)
            elif name == "":
                raise InputError("several models are served here", hint=f'name one with "model": {", ".join(known)}')
        except HastenError as error:
            exchange.fail(error)
        except Exception:
            logger.exception("a model could not be loaded")
            exchange.fail(UnavailableError("the model could not be loaded; the replica's log says why"))
        else:
            self._app(exchange)


class _Named(msgspec.Struct):
    model: str = ""


def asked_model(router: Router, exchange: Exchange) -> str | None:
    """The model that a request names in its path, its query or its body; None where it is about none."""
    try:
        route, names = router.find(exchange.method, exchange.path)
    except NotFoundError:
        return None
    if route.path.startswith(_REPOSITORY):
        return None  # these load and unload by themselves
    if "model" in names:
        return names["model"]
    if route.handle is tei.info:
        return parse_qs(exchange.query).get("model", [""])[0]
    if "model" not in getattr(route.body, "__struct_fields__", ()):
        return None
    try:
        return msgspec.json.decode(exchange.content(), type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # whoever reads it says what is wrong with it
