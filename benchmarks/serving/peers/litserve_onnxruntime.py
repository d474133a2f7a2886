"""Serve with LitServe and ONNX Runtime.

LitServe reads the annotations of the methods, so their evaluation is not postponed here.
"""

from typing import Any

import litserve
from classifier import Classifier
from options import BATCH_WAIT_S, Options, parse_arguments


class Api(litserve.LitAPI):
    """The classifier; its methods are LitServe's."""

    def setup(self, device: str) -> None:
        args = parse_arguments(__doc__)
        self.classify = Classifier(args.model, args.graph, Options.of(args))

    def decode_request(self, request: dict[str, Any]) -> str:
        return request["inputs"]

    def encode_response(self, output: dict[str, Any]) -> list[dict[str, Any]]:
        return [output]


class SingleApi(Api):
    """The classifier without batching: LitServe passes one text at a time."""

    def predict(self, text: str) -> dict[str, Any]:
        return self.classify([text])[0]


class BatchingApi(Api):
    """The classifier with batching."""

    def batch(self, inputs: list[str]) -> list[str]:
        return list(inputs)

    def predict(self, texts: list[str]) -> list[dict[str, Any]]:
        return self.classify(texts)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output


if __name__ == "__main__":
    arguments = parse_arguments(__doc__)
    options = Options.of(arguments)
    if options.max_batch_size == 1:
        api: Api = SingleApi()
    else:
        # With the default timeout of 0 LitServe never batches.
        api = BatchingApi(max_batch_size=options.max_batch_size, batch_timeout=BATCH_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=options.instances, track_requests=False)
    server.run(host="127.0.0.1", port=int(arguments.port), log_level="warning", generate_client_file=False)
