"""A bundle as a model repository for NVIDIA's tritonserver, which loads as it is.

<name>_<backend>_model       the graph, run by the server's own ONNX Runtime or by hasten's session (`Runtime.PYTHON`)
<name>_<backend>_tokenize    texts to its tensors
<name>_<backend>_inference   texts in, tensors out: the two one after the other; or, for tasks whose answers are more
                             than a tensor, the task's own code, which asks the model

Of a model that writes there is one, <name>_onnx_generate, whose answers may come piece by piece (`writer.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hasten.bundle import Bundle
from hasten.core.errors import translate_os_errors
from hasten.deploy import written
from hasten.deploy.tritonserver.around import write_around, write_image
from hasten.deploy.tritonserver.options import Options, Repository, Runtime
from hasten.deploy.tritonserver.repository import write_models
from hasten.deploy.tritonserver.writer import write_asking, write_writer

__all__ = ["Options", "Repository", "Runtime", "write_models", "write_repository"]


def write_repository(bundle: Bundle, target: Path, options: Options, *, force: bool = False) -> Repository:
    """The models, and beside them how to run and how to ask them; all of it or nothing."""
    with written(target, force=force) as staging:
        writes = bundle.manifest.generation is not None
        repository = (write_writer if writes else write_models)(bundle, staging.path, options)
        with translate_os_errors(f"writing {target}"):
            if writes:
                write_image(options, repository)
                write_asking(repository)
            else:
                write_around(bundle.manifest.task, options, repository)
        staging.put_in_place()
    return replace(repository, directory=target)
