"""Serve with Ray Serve and ONNX Runtime, with @serve.batch: `ray_onnxruntime.py MODEL GRAPH PORT`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse


@serve.deployment(max_ongoing_requests=128, ray_actor_options={"num_cpus": 1})
class Service:
    """The classifier as a deployment."""

    def __init__(self, model: str, graph: str) -> None:
        from classifier import Classifier

        self.classify = Classifier(model, graph)

    @serve.batch(max_batch_size=16, batch_wait_timeout_s=0.001)
    async def answer(self, texts: list[str]) -> list[dict[str, Any]]:
        """Return the labels of a batch."""
        return self.classify(texts)

    async def __call__(self, request: Request) -> JSONResponse:
        if request.url.path == "/health":
            return JSONResponse([])
        return JSONResponse([await self.answer((await request.json())["inputs"])])


if __name__ == "__main__":
    model, graph, port = sys.argv[1:]
    here = str(Path(__file__).parent)
    ray.init(
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": here}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, logging_config={"enable_access_log": False})
    serve.run(Service.bind(model, graph), route_prefix="/")
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
