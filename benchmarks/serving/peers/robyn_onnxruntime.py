"""Serve with robyn and ONNX Runtime: a plain function that robyn runs in its thread pool. It does not batch."""

from __future__ import annotations

import json

from classifier import Classifier
from options import Options, parse_arguments
from robyn import Request, Response, Robyn

args = parse_arguments(__doc__)
app, classify = Robyn(__file__), Classifier(args.model, args.graph, Options.of(args))
_HEADERS = {"content-type": "application/json"}


@app.post("/predict")
def predict(request: Request) -> Response:
    """Answer one request."""
    return Response(200, _HEADERS, json.dumps(classify([json.loads(request.body)["inputs"]])))


@app.get("/health")
def health() -> str:
    """Return that the server is ready."""
    return "{}"


if __name__ == "__main__":
    app.start(host="127.0.0.1", port=int(args.port))
