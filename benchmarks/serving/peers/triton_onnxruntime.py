"""Serve with tritonserver from PyPI and ONNX Runtime in its Python backend.

Write a model repository and replace this process by the server binary of pytriton's wheel.
"""

from __future__ import annotations

from pathlib import Path

from options import Options, parse_arguments
from triton_repository import exec_tritonserver

CONFIG = """
name: "classifier"
backend: "python"
max_batch_size: {max_batch_size}
{batching}
input [{{ name: "text" data_type: TYPE_STRING dims: [1] }}]
output [{{ name: "scores" data_type: TYPE_FP32 dims: [-1] }}]
instance_group [{{ count: {instances} }}]
"""
MODEL = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
import triton_python_backend_utils as backend
from classifier import Classifier
from options import Options

class TritonPythonModel:
    def initialize(self, args):
        self.classifier = Classifier({model!r}, {graph!r}, {options!r})

    def execute(self, requests):
        tensors = [backend.get_input_tensor_by_name(each, "text").as_numpy().reshape(-1) for each in requests]
        scores = self.classifier.scores([text.decode() for tensor in tensors for text in tensor])
        ends = np.cumsum([len(tensor) for tensor in tensors])[:-1]
        return [
            backend.InferenceResponse([backend.Tensor("scores", part.astype(np.float32))])
            for part in np.split(scores, ends)
        ]
"""


def main() -> None:
    """Write the model repository and run the server."""
    args = parse_arguments(__doc__, "grpc_port", "folder")
    options = Options.of(args)
    version = Path(args.folder, "models/classifier/1")
    version.mkdir(parents=True)
    batching = "dynamic_batching {}" if options.max_batch_size > 1 else ""
    config = CONFIG.format(max_batch_size=options.max_batch_size, instances=options.instances, batching=batching)
    (version.parent / "config.pbtxt").write_text(config)
    here = str(Path(__file__).parent)
    code = MODEL.format(here=here, model=args.model, graph=args.graph, options=options)
    (version / "model.py").write_text(code)
    exec_tritonserver(f"{args.folder}/models", args.port, args.grpc_port, args.folder)


if __name__ == "__main__":
    main()
