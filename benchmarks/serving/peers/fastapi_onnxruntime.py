"""FastAPI over ONNX Runtime, as people write it: a plain function, which FastAPI runs on its threads.

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


class Asked(BaseModel):
    inputs: str


@app.post("/predict")
def predict(asked: Asked) -> list[dict[str, Any]]:
    return classify([asked.inputs])


@app.get("/health")
def health() -> dict[str, str]:
    return {}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[3]), log_level="warning")
