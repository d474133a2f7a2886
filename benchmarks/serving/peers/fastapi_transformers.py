"""FastAPI over a transformers pipeline, as transformers' page on pipelines in web servers builds it.

Requests go through a queue to one loop that runs the pipeline, which batches what is waiting.
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

MOST_ROWS = 16


class Asked(BaseModel):
    inputs: str


@asynccontextmanager
async def lifespan(app: FastAPI):
    app.state.queue = asyncio.Queue()
    task = asyncio.create_task(
        answer(app.state.queue, pipeline("text-classification", model=sys.argv[1], device="cpu"))
    )
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/predict")
async def predict(asked: Asked) -> list[dict[str, Any]]:
    future = asyncio.get_running_loop().create_future()
    await app.state.queue.put((asked.inputs, future))
    return [await future]


@app.get("/health")
async def health() -> dict[str, str]:
    return {}


async def answer(queue: asyncio.Queue, pipe: Any) -> None:
    while True:
        waiting = [await queue.get()]
        while len(waiting) < MOST_ROWS and not queue.empty():
            waiting.append(queue.get_nowait())
        texts = [text for text, _ in waiting]
        found = await asyncio.to_thread(pipe, texts, batch_size=len(texts), truncation=True)
        for (_, future), one in zip(waiting, found, strict=True):
            future.set_result(one)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[3]), log_level="warning")
