"""Serve with FastAPI and ONNX Runtime, as commonly done: a plain function that FastAPI runs in its thread pool.

fastapi_onnxruntime.py MODEL GRAPH PORT
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from classifier import Classifier
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
classify = Classifier(sys.argv[1], sys.argv[2])


class PredictRequest(BaseModel):
    """The body of a request."""

    inputs: str


@app.post("/predict")
def predict(request: PredictRequest) -> list[dict[str, Any]]:
    """Return the label of a text."""
    return classify([request.inputs])


@app.get("/health")
def health() -> dict[str, str]:
    """Return success."""
    return {}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[3]), log_level="warning")
