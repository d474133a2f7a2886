"""tritonserver from PyPI over ONNX Runtime in its Python backend, dynamic batching on.

pytriton's wheel carries the genuine binary; this writes a model repository for it and becomes it.
    triton_onnxruntime.py MODEL GRAPH PORT GRPC_PORT FOLDER
"""

from __future__ import annotations

import os
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

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
        tensors = [backend.get_input_tensor_by_name(one, "text").as_numpy().reshape(-1) for one in requests]
        scores = self.classifier.scores([text.decode() for tensor in tensors for text in tensor])
        ends = np.cumsum([len(tensor) for tensor in tensors])[:-1]
        return [
            backend.InferenceResponse([backend.Tensor("scores", part.astype(np.float32))])
            for part in np.split(scores, ends)
        ]
"""


def main(model: str, graph: str, port: str, grpc_port: str, folder: str) -> None:
    version = folder / Path("models/classifier/1")
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    here = str(Path(__file__).parent)
    (version / "model.py").write_text(MODEL.format(here=here, model=model, graph=graph))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = find_spec("pytriton")
    assert found is not None, "pip install --no-deps nvidia-pytriton"
    triton = Path(next(iter(found.submodule_search_locations or ()))) / "tritonserver"
    backend = folder / Path("backends/python")
    backend.mkdir(parents=True)
    # Links: a copy loses the libraries that it finds beside itself.
    for file in (
        triton / "backends/python/libtriton_python.so",
        triton / "backends/python/triton_python_backend_utils.py",
        triton / f"python_backend_stubs/{python}/triton_python_backend_stub",
    ):
        (backend / file.name).symlink_to(file)
    libraries = [sysconfig.get_config_var("LIBDIR"), str(triton / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        # The stub takes its packages from the first python3 there.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = [
        str(triton / "bin/tritonserver"),
        f"--model-repository={folder}/models",
        f"--backend-directory={folder}/backends",
        f"--backend-config=python,shm-region-prefix-name=hasten{os.getpid()}",
        f"--http-port={port}",
        "--http-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--grpc-address=127.0.0.1",
        "--allow-metrics=false",
        # Clients that are still connected hold it up.
        "--exit-timeout-secs=5",
        "--log-info=false",
        "--log-warning=false",
    ]
    os.execve(words[0], words, environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
