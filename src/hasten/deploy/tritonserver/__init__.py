"""A bundle as a model repository for NVIDIA's tritonserver, which loads as it is.

<name>_<backend>_model       the graph, run by the server's own ONNX Runtime or by hasten's session (`Runtime.PYTHON`)
<name>_<backend>_tokenize    texts to its tensors
<name>_<backend>_inference   texts in, tensors out: the two one after the other; or, for tasks whose answers are more
                             than a tensor, the task's own code, which asks the model
"""

from hasten.deploy.tritonserver.options import Options, Repository, Runtime
from hasten.deploy.tritonserver.repository import write_models

__all__ = ["Options", "Repository", "Runtime", "write_models"]
