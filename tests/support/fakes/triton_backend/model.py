"""A model for tritonserver's Python backend that runs a bundle's graph and tokenizer with ONNX Runtime.

Its input is `text` or token ids; its outputs are `logits` and `answer`.
"""

import json

import numpy as np
import onnxruntime
import tokenizers
import triton_python_backend_utils as backend  # provided by the server

DTYPES = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args):
        """Open the tokenizer and the graph that the configuration names."""
        parameters = {
            name: entry["string_value"] for name, entry in json.loads(args["model_config"])["parameters"].items()
        }
        self.labels = json.loads(parameters["labels"])
        self.tokenizer = tokenizers.Tokenizer.from_file(parameters["tokenizer"])
        self.session = onnxruntime.InferenceSession(parameters["graph"])

    def execute(self, requests):
        """Return a response per request."""
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Return the requested outputs."""
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if "text" in inputs:
            inputs = self.encode([text.decode() for text in inputs["text"].reshape(-1)])
        feeds = {
            tensor.name: inputs.get(tensor.name, np.zeros_like(inputs["input_ids"])).astype(DTYPES[tensor.type])
            for tensor in self.session.get_inputs()
        }
        (logits,) = self.session.run(["logits"], feeds)
        tensors = {"logits": logits, "answer": np.array([self.decode(row) for row in logits], object)}
        outputs = [backend.Tensor(name, tensors[name]) for name in request.requested_output_names()]
        return backend.InferenceResponse(output_tensors=outputs)

    def encode(self, texts):
        """Return the padded tokens of a batch."""
        rows = self.tokenizer.encode_batch(texts)
        width = max(len(row.ids) for row in rows)

        def pad(values):
            return np.array([row + [0] * (width - len(row)) for row in values])

        return {
            "input_ids": pad([row.ids for row in rows]),
            "attention_mask": pad([row.attention_mask for row in rows]),
            "token_type_ids": pad([row.type_ids for row in rows]),
        }

    def decode(self, row):
        """Return the label and score of a row as JSON."""
        scores = np.exp(row - row.max())
        best = int(row.argmax())
        return json.dumps({"label": self.labels[best], "score": float(scores[best] / scores.sum())}).encode()
