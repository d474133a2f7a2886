"""Serve a bundle of hasten with FastAPI: `hasten.load` behind a queue, with one loop that batches, in each worker.

fastapi_bundle.py BUNDLE VARIANT PORT [--instances N] [--max-batch-size N]
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from options import Options, parse_arguments
from pydantic import BaseModel
from uvicorn_workers import run

import hasten


class PredictRequest(BaseModel):
    """The body of a request."""

    inputs: str | list[str]


def create_app() -> FastAPI:
    """Return the application of one worker."""
    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(request: PredictRequest) -> list[dict[str, Any]]:
        texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
        future = asyncio.get_running_loop().create_future()
        await app.state.queue.put((texts, future))
        return await future

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    return app


@asynccontextmanager
async def lifespan(app: FastAPI):
    """Run the batching loop while the server runs."""
    args = parse_arguments(__doc__)
    app.state.queue = asyncio.Queue()
    classify = hasten.load(args.model, variant=args.graph)
    classify(["warm up"])
    task = asyncio.create_task(run_batches(app.state.queue, classify, Options.of(args).max_batch_size))
    yield
    task.cancel()


async def run_batches(queue: asyncio.Queue, classify: Any, max_texts: int) -> None:
    """Run the model on the queued texts, one batch at a time."""
    while True:
        waiting = [await queue.get()]
        while sum(len(texts) for texts, _ in waiting) < max_texts and not queue.empty():
            waiting.append(queue.get_nowait())
        texts = [text for texts, _ in waiting for text in texts]
        answers = await asyncio.to_thread(classify, texts)
        for part, future in waiting:
            future.set_result(answers[: len(part)])
            answers = answers[len(part) :]


if __name__ == "__main__":
    run("fastapi_bundle:create_app", __doc__)
