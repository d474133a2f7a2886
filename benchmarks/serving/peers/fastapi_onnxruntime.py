"""Serve with FastAPI and ONNX Runtime, as commonly done: a plain function that FastAPI runs in its thread pool.

It does not batch; requests run side by side in the threads of the pool.
"""

from __future__ import annotations

from typing import Any

from classifier import Classifier
from fastapi import FastAPI
from options import Options, parse_arguments
from pydantic import BaseModel
from uvicorn_workers import run


class PredictRequest(BaseModel):
    """The body of a request."""

    inputs: str


def create_app() -> FastAPI:
    """Return the application of one worker."""
    args = parse_arguments(__doc__)
    app, classify = FastAPI(), Classifier(args.model, args.graph, Options.of(args))

    @app.post("/predict")
    def predict(request: PredictRequest) -> list[dict[str, Any]]:
        return classify([request.inputs])

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    return app


if __name__ == "__main__":
    run("fastapi_onnxruntime:create_app", __doc__)
