"""Write the directory of one model of a repository: its configuration, its files and the code that runs it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hasten.backends import Artifact
from hasten.bundle import Bundle
from hasten.bundle.read import TOKENIZER
from hasten.core.tensors import Signature
from hasten.deploy.tritonserver.models.request import ABOUT
from hasten.deploy.tritonserver.models.request import TOKENIZER as TOKENIZER_FILE
from hasten.deploy.tritonserver.pbtxt import Message, Tensor, to_text
from hasten.deploy.tritonserver.vendoring import vendor
from hasten.deploy.tritonserver_options import Options, Runtime

LABELS_FILE = "labels.txt"
_VERSION = "1"
_MODEL_PY = '''"""Written by hasten: the code is in the folder beside it."""

import sys
from pathlib import Path

# First on the path: this is the version that the repository was written with, whatever the image has installed.
sys.path.insert(0, str(Path(__file__).parent))

from hasten.deploy.tritonserver.models.{module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True, slots=True)
class Repository:
    """A written model repository: the names of its models, and the inputs and outputs of the one that clients call."""

    directory: Path
    runtime: Runtime
    variant: str
    model: str
    inference: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    # The packages that the server's Python needs in addition to NumPy.
    packages: tuple[str, ...]
    # None if the inference model tokenizes by itself.
    tokenize: str | None = None
    # Whether the outputs are the model's tensors instead of answers in JSON.
    is_raw: bool = False
    # The names of the inputs of the model itself.
    tokens: tuple[str, ...] = ()
    # The maximum number of rows of a request; 0 if tensors have no batch axis.
    max_rows: int = 0
    # The oldest version of the server's ONNX Runtime that computes correctly; empty if the server's is not used.
    least_onnxruntime: str = ""
    # The device that the model runs on, unless the server chooses it.
    device: str | None = None
    # The kind of GPU and the version of TensorRT that an engine needs; empty if the variant is not an engine.
    platform: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all models, each once: a generative model is its own inference model."""
        names = (self.model, self.tokenize, self.inference)
        return tuple(dict.fromkeys(name for name in names if name is not None))


@dataclass(frozen=True)
class ModelWriter:
    """Writes models that run one variant of a bundle."""

    bundle: Bundle
    directory: Path
    options: Options
    artifact: Artifact
    # The oldest version of the server's ONNX Runtime that computes the variant correctly, if it runs the variant.
    least_onnxruntime: str = ""

    @property
    def signature(self) -> Signature:
        """Return the inputs and outputs of the variant."""
        return self.artifact.signature

    @property
    def session_config(self) -> dict[str, object]:
        """Return the entries of the configuration from which a Python model opens its session."""
        return {
            "variant": self.artifact.variant.name,
            "graphs": dict(self.artifact.graphs),
            "instances": self.options.instances,
            "threads": self.options.threads,
        }

    def create(self, message: Message) -> Path:
        """Create a model's directory with its configuration and return the folder of its only version."""
        directory = self.directory / str(message["name"])
        folder = directory / _VERSION
        folder.mkdir(parents=True)
        # Git and archives drop empty folders, as an ensemble's is, but the server requires the folder.
        (folder / ".keep").touch()
        text = to_text(message)
        (directory / "config.pbtxt").write_text(text, encoding="utf-8")
        if f'"{LABELS_FILE}"' in text:
            names = [" ".join(label.split()) for label in self.bundle.manifest.task.labels]
            (directory / LABELS_FILE).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        return folder

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the bundle's tokenizer after checking its hash and that it opens."""
        self.bundle.tokenizer()
        shutil.copyfile(self.bundle.path / TOKENIZER, folder / TOKENIZER_FILE)

    def write_code(self, folder: Path, module: str, config: Mapping[str, object], modules: Sequence[str]) -> None:
        """Write a Python model: its entry point, its configuration, and the hasten modules that it imports."""
        (folder / "model.py").write_text(_MODEL_PY.format(module=module), encoding="utf-8")
        variants = self.bundle.manifest.variants
        entry = next((entry for entry in variants if entry.name == self.artifact.variant.name), None)
        requirements = {
            "signature": self.signature,
            "least_onnxruntime": self.least_onnxruntime,
            "instructions": () if entry is None else entry.instructions,
        }
        content = msgspec.json.encode({**requirements, **config})
        (folder / ABOUT).write_bytes(msgspec.json.format(content, indent=1))
        vendor([f"hasten.deploy.tritonserver.models.{module}", *modules], folder)
