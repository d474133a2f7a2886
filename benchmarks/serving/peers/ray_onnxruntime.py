"""Serve with Ray Serve and ONNX Runtime, with @serve.batch if there is batching."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import ray
from options import BATCH_WAIT_S, Options, parse_arguments
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse


@serve.deployment(max_ongoing_requests=128, ray_actor_options={"num_cpus": 1})
class Service:
    """The classifier as a deployment."""

    def __init__(self, model: str, graph: str, options: Options) -> None:
        from classifier import Classifier

        self.classify = Classifier(model, graph, options)
        self.is_batching = options.max_batch_size > 1
        self.answer_batch.set_max_batch_size(options.max_batch_size)

    @serve.batch(batch_wait_timeout_s=BATCH_WAIT_S)
    async def answer_batch(self, texts: list[str]) -> list[dict[str, Any]]:
        """Return the labels of a batch."""
        return await asyncio.to_thread(self.classify, texts)

    async def __call__(self, request: Request) -> JSONResponse:
        if request.url.path == "/health":
            return JSONResponse([])
        text = (await request.json())["inputs"]
        if self.is_batching:
            return JSONResponse([await self.answer_batch(text)])
        return JSONResponse(await asyncio.to_thread(self.classify, [text]))


if __name__ == "__main__":
    arguments = parse_arguments(__doc__)
    chosen = Options.of(arguments)
    here = str(Path(__file__).parent)
    ray.init(
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    http_options = {"host": "127.0.0.1", "port": int(arguments.port)}
    serve.start(http_options=http_options, logging_config={"enable_access_log": False})
    service = Service.options(num_replicas=chosen.instances)
    serve.run(service.bind(arguments.model, arguments.graph, chosen), route_prefix="/")
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
