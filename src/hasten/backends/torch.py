"""PyTorch as it comes: the reference for answers and the baseline for speed. Never stored in a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hasten.backends import (
    MODEL,
    Artifact,
    Dialect,
    PaddedSession,
    RunOptions,
    Session,
    Source,
    probe_packages,
)
from hasten.core.errors import StageError
from hasten.core.execution import Execution, Trial
from hasten.core.hardware import Machine
from hasten.core.tensors import Batch, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import CPU, Precision, Support, Variant

FILE = "module.pt"


class Torch:
    name = "torch"
    requires = ("torch",)
    extra = "build"
    dialect = Dialect.MODULE
    is_stored = False

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant != Variant(self.name, Precision.FP32):
            return Support.no("as the reference it runs in fp32 on the CPU only")
        return probe_packages(self)

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return [Variant(self.name, Precision.FP32)]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        save_module(source, directory)
        return Artifact(variant, source.signature, directory, {MODEL: FILE})

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return ModuleSession(load_module(artifact), artifact, options)

    def trials(self, machine: Machine) -> Sequence[Trial]:
        import torch

        devices = ["cpu"]
        found = []
        if torch.version.cuda and torch.cuda.is_available():
            devices.append("cuda")
        elif torch.version.cuda:
            here = "cannot use the GPU here" if machine.gpus else "there is no GPU here: the CPU build is far smaller"
            note = f"built for CUDA {torch.version.cuda}, and {here}"
            found.append(Trial("cuda", is_ok=not machine.gpus, note=note))
        for device in devices:
            try:
                product = torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)
                found.append(Trial(device, (Execution("matmul", product.device.type, 1),)))
            except RuntimeError as error:
                found.append(Trial(device, is_ok=False, note=str(error).splitlines()[0]))
        return found


def save_module(source: Source, directory: Path) -> None:
    """Pickled whole, into the build's own temporary directory: the benchmark's process reads it from there."""
    import torch

    try:
        torch.save(source.module, directory / FILE)
    except Exception as error:  # whatever a model's own attributes raise when pickled
        raise StageError(f"the PyTorch module cannot be saved for the benchmark: {error}") from error


def load_module(artifact: Artifact) -> Any:
    import torch

    # Not weights alone: this build wrote the file a moment ago, and no bundle can hold one (is_stored).
    try:
        return torch.load(artifact.path(), weights_only=False, map_location="cpu").eval()
    except Exception as error:  # unpickling raises whatever the damage leads to
        raise StageError(f"PyTorch cannot load {artifact.variant}: {type(error).__name__}: {error}") from error


class ModuleSession(PaddedSession):
    def __init__(self, module: Any, artifact: Artifact, options: RunOptions) -> None:
        import torch

        torch.set_num_threads(options.thread_count)
        self._module = module
        precision = str(next(module.parameters()).dtype).removeprefix("torch.")
        names = {"float32": Precision.FP32, "float16": Precision.FP16, "bfloat16": Precision.BF16}
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, CPU, names.get(precision, precision))

    def run_padded(self, batch: Batch) -> Outputs:
        import torch

        feeds = {name: torch.from_numpy(value) for name, value in pad(batch, self.spec.signature).items()}
        try:
            with torch.inference_mode():
                results = self._module(**feeds)
        except Exception as error:  # a model raises what its author chose to
            raise StageError(f"PyTorch failed on a batch of {len(batch)}: {error}") from error
        outputs = {
            spec.name: result.float().numpy() for spec, result in zip(self.spec.signature.outputs, results, strict=True)
        }
        return unpad(outputs, batch, self.spec.signature)


BACKEND = Torch()
