"""Write a bundle as a model repository that NVIDIA's tritonserver loads as it is.

<name>_<backend>_model       runs the graph: in the server's own ONNX Runtime or in hasten's session (`Runtime.PYTHON`)
<name>_<backend>_tokenize    converts texts to the model's input tensors
<name>_<backend>_inference   takes texts and returns tensors, as an ensemble of the two; or runs the task's code, which
                             calls the model, if answers are more than a tensor

A generative model is one model, <name>_onnx_generate, which can stream its text (`generation_repository.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hasten.bundle import Bundle
from hasten.core.errors import translate_os_errors
from hasten.deploy import atomic_output
from hasten.deploy.tritonserver.model_directory import Repository
from hasten.deploy.tritonserver.repository import write_models
from hasten.deploy.tritonserver_options import Options, Runtime
from hasten.families import family_of_bundle

__all__ = ["Options", "Repository", "Runtime", "write_models", "write_repository"]


def write_repository(bundle: Bundle, target: Path, options: Options, *, force: bool = False) -> Repository:
    """Write the models, an image, example clients and a README atomically."""
    with atomic_output(target, force=force) as staging:
        with translate_os_errors(f"writing {target}"):
            repository = family_of_bundle(bundle).write_tritonserver(bundle, staging.path, options)
        staging.put_in_place()
    return replace(repository, directory=target)
