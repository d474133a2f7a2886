"""Serve with LitServe and ONNX Runtime, with batching: `litserve_onnxruntime.py MODEL GRAPH PORT`.

LitServe reads the annotations of the methods, so their evaluation is not postponed here.
"""

import sys
from typing import Any

import litserve
from classifier import Classifier


class Api(litserve.LitAPI):
    """The classifier; its methods are LitServe's."""

    def setup(self, device: str) -> None:
        self.classify = Classifier(sys.argv[1], sys.argv[2])

    def decode_request(self, request: dict[str, Any]) -> str:
        return request["inputs"]

    def batch(self, inputs: list[str]) -> list[str]:
        return list(inputs)

    def predict(self, texts: list[str]) -> list[dict[str, Any]]:
        return self.classify(texts)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output

    def encode_response(self, output: dict[str, Any]) -> list[dict[str, Any]]:
        return [output]


if __name__ == "__main__":
    # With the default timeout of 0 LitServe never batches.
    server = litserve.LitServer(Api(max_batch_size=16, batch_timeout=0.001), accelerator="cpu", track_requests=False)
    server.run(host="127.0.0.1", port=int(sys.argv[3]), log_level="warning", generate_client_file=False)
