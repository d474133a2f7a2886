"""Serve with FastAPI and a transformers pipeline, as in transformers' documentation on pipelines in web servers.

Requests go through a queue to one loop that runs the pipeline on a batch of the queued texts. GRAPH is not used.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI
from options import Options, length_buckets, parse_arguments
from pydantic import BaseModel
from transformers import pipeline
from uvicorn_workers import run


class PredictRequest(BaseModel):
    """The body of a request."""

    inputs: str


def create_app() -> FastAPI:
    """Return the application of one worker."""
    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(request: PredictRequest) -> list[dict[str, Any]]:
        future = asyncio.get_running_loop().create_future()
        await app.state.queue.put((request.inputs, future))
        return [await future]

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    return app


@asynccontextmanager
async def lifespan(app: FastAPI):
    """Run the batching loop while the server runs."""
    args = parse_arguments(__doc__)
    options = Options.of(args)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    app.state.queue = asyncio.Queue()
    pipe = pipeline("text-classification", model=args.model, device="cpu")
    task = asyncio.create_task(run_batches(app.state.queue, pipe, options))
    yield
    task.cancel()


async def run_batches(queue: asyncio.Queue, pipe: Any, options: Options) -> None:
    """Run the pipeline on the queued texts, one batch at a time."""
    while True:
        waiting = [await queue.get()]
        while len(waiting) < options.max_batch_size and not queue.empty():
            waiting.append(queue.get_nowait())
        results = await asyncio.to_thread(classify, pipe, [text for text, _ in waiting], options)
        for (_, future), result in zip(waiting, results, strict=True):
            future.set_result(result)


def classify(pipe: Any, texts: list[str], options: Options) -> list[dict[str, Any]]:
    """Return the labels of a batch, which is run in parts of similar length if there are buckets."""
    buckets = [list(range(len(texts)))]
    if options.has_buckets:
        buckets = length_buckets([len(ids) for ids in pipe.tokenizer(texts, truncation=True)["input_ids"]])
    results: dict[int, dict[str, Any]] = {}
    for bucket in buckets:
        answers = pipe([texts[index] for index in bucket], batch_size=len(bucket), truncation=True)
        results |= zip(bucket, answers, strict=True)
    return [results[index] for index in range(len(texts))]


if __name__ == "__main__":
    run("fastapi_transformers:create_app", __doc__)
