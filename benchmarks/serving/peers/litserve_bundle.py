"""Serve a bundle of hasten with LitServe, which batches requests in front of `hasten.load`.

    litserve_bundle.py BUNDLE VARIANT PORT [--instances N] [--max-batch-size N]

LitServe reads the annotations of the methods, so their evaluation is not postponed here.
"""

from typing import Any

import litserve
from options import BATCH_WAIT_S, Options, parse_arguments

import hasten


class BatchingApi(litserve.LitAPI):
    """The classifier; its methods are LitServe's."""

    def setup(self, device: str) -> None:
        args = parse_arguments(__doc__)
        self.classify = hasten.load(args.model, variant=args.graph)
        self.classify(["warm up"])

    def decode_request(self, request: dict[str, Any]) -> list[str]:
        texts = request["inputs"]
        return [texts] if isinstance(texts, str) else texts

    def batch(self, inputs: list[list[str]]) -> list[list[str]]:
        return list(inputs)

    def predict(self, requests: list[list[str]]) -> list[list[dict[str, Any]]]:
        answers = self.classify([text for texts in requests for text in texts])
        parts = []
        for texts in requests:
            parts.append(answers[: len(texts)])
            answers = answers[len(texts) :]
        return parts

    def unbatch(self, output: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        return output

    def encode_response(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output


if __name__ == "__main__":
    arguments = parse_arguments(__doc__)
    options = Options.of(arguments)
    api = BatchingApi(max_batch_size=options.max_batch_size, batch_timeout=BATCH_WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, track_requests=False)
    server.run(
        host="127.0.0.1",
        port=int(arguments.port),
        num_api_servers=options.instances,
        log_level="warning",
        generate_client_file=False,
    )
