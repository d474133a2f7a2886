"""Serve with FastAPI and a transformers pipeline, as in transformers' documentation on pipelines in web servers.

Requests go through a queue to one loop that runs the pipeline on a batch of the queued texts.

    fastapi_transformers.py MODEL GRAPH PORT
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline

MAX_BATCH_SIZE = 16


class PredictRequest(BaseModel):
    """The body of a request."""

    inputs: str


@asynccontextmanager
async def lifespan(app: FastAPI):
    """Run the batching loop while the server runs."""
    app.state.queue = asyncio.Queue()
    task = asyncio.create_task(
        run_batches(app.state.queue, pipeline("text-classification", model=sys.argv[1], device="cpu"))
    )
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(request: PredictRequest) -> list[dict[str, Any]]:
    """Queue a text and return its label."""
    future = asyncio.get_running_loop().create_future()
    await app.state.queue.put((request.inputs, future))
    return [await future]


@app.get("/health")
async def health() -> dict[str, str]:
    """Return success."""
    return {}


async def run_batches(queue: asyncio.Queue, pipe: Any) -> None:
    """Run the pipeline on the queued texts, one batch at a time."""
    while True:
        waiting = [await queue.get()]
        while len(waiting) < MAX_BATCH_SIZE and not queue.empty():
            waiting.append(queue.get_nowait())
        texts = [text for text, _ in waiting]
        results = await asyncio.to_thread(pipe, texts, batch_size=len(texts), truncation=True)
        for (_, future), result in zip(waiting, results, strict=True):
            future.set_result(result)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[3]), log_level="warning")
