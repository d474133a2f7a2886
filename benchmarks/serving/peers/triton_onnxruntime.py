"""Serve with tritonserver from PyPI and ONNX Runtime in its Python backend, with dynamic batching.

Write a model repository and replace this process by the server binary of pytriton's wheel.

    triton_onnxruntime.py MODEL GRAPH PORT GRPC_PORT FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from triton_repository import exec_tritonserver

CONFIG = """
name: "classifier"
backend: "python"
max_batch_size: 16
dynamic_batching {}
input [{ name: "text" data_type: TYPE_STRING dims: [1] }]
output [{ name: "scores" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ count: 1 }]
"""
MODEL = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
import triton_python_backend_utils as backend
from classifier import Classifier

class TritonPythonModel:
    def initialize(self, args):
        self.classifier = Classifier({model!r}, {graph!r})

    def execute(self, requests):
        tensors = [backend.get_input_tensor_by_name(each, "text").as_numpy().reshape(-1) for each in requests]
        scores = self.classifier.scores([text.decode() for tensor in tensors for text in tensor])
        ends = np.cumsum([len(tensor) for tensor in tensors])[:-1]
        return [
            backend.InferenceResponse([backend.Tensor("scores", part.astype(np.float32))])
            for part in np.split(scores, ends)
        ]
"""


def main(model: str, graph: str, port: str, grpc_port: str, folder: str) -> None:
    """Write the model repository and run the server."""
    version = folder / Path("models/classifier/1")
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    here = str(Path(__file__).parent)
    (version / "model.py").write_text(MODEL.format(here=here, model=model, graph=graph))
    exec_tritonserver(f"{folder}/models", port, grpc_port, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
