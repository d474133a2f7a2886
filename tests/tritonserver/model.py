"""A model for tritonserver's Python backend: a bundle's own graph and tokenizer, run with ONNX Runtime.

The names of its inputs say what it takes, texts or token ids; those of its outputs, what it gives.
"""

import json

import numpy as np
import onnxruntime
import tokenizers
import triton_python_backend_utils as backend  # what the server puts on the path

KINDS = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}


class TritonPythonModel:
    def initialize(self, args):
        about = {name: entry["string_value"] for name, entry in json.loads(args["model_config"])["parameters"].items()}
        self.labels = json.loads(about["labels"])
        self.tokenizer = tokenizers.Tokenizer.from_file(about["tokenizer"])
        self.session = onnxruntime.InferenceSession(about["graph"])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if "text" in given:
            given = self.encoded([text.decode() for text in given["text"].reshape(-1)])
        feeds = {
            tensor.name: given.get(tensor.name, np.zeros_like(given["input_ids"])).astype(KINDS[tensor.type])
            for tensor in self.session.get_inputs()
        }
        (logits,) = self.session.run(["logits"], feeds)
        tensors = {"logits": logits, "answer": np.array([self.decoded(row) for row in logits], object)}
        wanted = [backend.Tensor(name, tensors[name]) for name in request.requested_output_names()]
        return backend.InferenceResponse(output_tensors=wanted)

    def encoded(self, texts):
        rows = self.tokenizer.encode_batch(texts)
        width = max(len(row.ids) for row in rows)

        def padded(values):
            return np.array([row + [0] * (width - len(row)) for row in values])

        return {
            "input_ids": padded([row.ids for row in rows]),
            "attention_mask": padded([row.attention_mask for row in rows]),
            "token_type_ids": padded([row.type_ids for row in rows]),
        }

    def decoded(self, row):
        scores = np.exp(row - row.max())
        best = int(row.argmax())
        return json.dumps({"label": self.labels[best], "score": float(scores[best] / scores.sum())}).encode()
