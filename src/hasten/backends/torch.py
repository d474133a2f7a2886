"""PyTorch as it comes: the reference for answers and the baseline for speed. Never stored in a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    probe_gpu,
    probe_packages,
)
from hasten.core.buckets import check_lengths
from hasten.core.errors import StageError
from hasten.core.execution import Execution, Trial
from hasten.core.hardware import Machine
from hasten.core.recording import recording
from hasten.core.tensors import Batch, FloatArray, IntArray, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import CPU, CUDA, Precision, Support, Variant

FILE = "module.pt"
_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}


class Torch:
    name = "torch"
    requires = ("torch",)
    extra = "build"
    dialect = Dialect.MODULE
    is_stored = False

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is None or variant == Variant(self.name, Precision.FP32):
            return probe_packages(self)
        if variant not in self._on_gpu():
            return Support.no("as the reference it runs in fp32 on the CPU; on 'cuda' in fp32, fp16 and bf16")
        support = probe_packages(self)
        return probe_torch_gpu(machine) if support.ok else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """On a GPU bf16 only when asked for: it says no more about speed than fp16."""
        offered = [variant for variant in self._on_gpu() if variant.precision is not Precision.BF16]
        return [Variant(self.name, Precision.FP32), *(one for one in offered if self.probe(machine, one).ok)]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        save_module(source, directory)
        return Artifact(variant, source.signature, directory, {MODEL: FILE})

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return ModuleSession(load_module(artifact), artifact, options)

    def trials(self, machine: Machine) -> Sequence[Trial]:
        import torch

        devices = [CPU]
        found = []
        if torch.version.cuda and torch.cuda.is_available():
            devices.append(CUDA)
        elif torch.version.cuda:
            here = "cannot use the GPU here" if machine.gpus else "there is no GPU here: the CPU build is far smaller"
            note = f"built for CUDA {torch.version.cuda}, and {here}"
            found.append(Trial(CUDA, is_ok=not machine.gpus, note=note))
        for device in devices:
            try:
                product = torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)
                found.append(Trial(device, (Execution("matmul", product.device.type, 1),)))
            except RuntimeError as error:
                found.append(Trial(device, is_ok=False, note=str(error).splitlines()[0]))
        return found

    def _on_gpu(self) -> list[Variant]:
        return [Variant(self.name, precision, CUDA) for precision in _DTYPES]


def probe_torch_gpu(machine: Machine) -> Support:
    """Whether the PyTorch that is installed can use a GPU that is there."""
    support = probe_gpu(machine)
    if not support.ok:
        return support
    import torch

    if torch.cuda.is_available():
        return support
    reason = "is built for the CPU alone" if torch.version.cuda is None else f"needs a driver for {torch.version.cuda}"
    return Support.no(f"the PyTorch that is installed {reason}, and cannot use the GPU")


def save_module(source: Source, directory: Path) -> None:
    """Pickled whole, into the build's own temporary directory: the benchmark's process reads it from there."""
    import torch

    try:
        torch.save(source.module, directory / FILE)
    except Exception as error:  # whatever a model's own attributes raise when pickled
        raise StageError(f"the PyTorch module cannot be saved for the benchmark: {error}") from error


def load_module(artifact: Artifact) -> Any:
    """On the variant's device, in its precision."""
    import torch

    # Not weights alone: this build wrote the file a moment ago, and no bundle can hold one (is_stored).
    try:
        module = torch.load(artifact.path(), weights_only=False, map_location=artifact.variant.device).eval()
        if artifact.variant.precision is not Precision.FP32:
            _cast(module, getattr(torch, _DTYPES[artifact.variant.precision]))
    except Exception as error:  # unpickling raises whatever the damage leads to
        raise StageError(f"PyTorch cannot load {artifact.variant}: {type(error).__name__}: {error}") from error
    return module


def _cast(module: Any, dtype: Any) -> None:
    """What is in its weights alone: frequencies of rotary embeddings, which are in none, stay in fp32."""
    weights = module.state_dict()
    halves = {name: value.to(dtype) for name, value in weights.items() if value.is_floating_point()}
    module.load_state_dict(weights | halves, assign=True)


class ModuleSession(PaddedSession):
    def __init__(self, module: Any, artifact: Artifact, options: RunOptions) -> None:
        import torch

        torch.set_num_threads(options.thread_count)
        self._module = module
        first = next(module.parameters())
        self._device = first.device
        dtype = str(first.dtype).removeprefix("torch.")
        precision = next((precision.value for precision, name in _DTYPES.items() if name == dtype), dtype)
        self.spec = SessionSpec(artifact.signature, Layout.PADDED, self._device.type, precision)

    def run_padded(self, batch: Batch) -> Outputs:
        if self._device.type != CPU:
            check_lengths(batch, self.spec.signature)
        return unpad(self.answer(pad(batch, self.spec.signature)), batch, self.spec.signature)

    def answer(self, feeds: Mapping[str, IntArray]) -> dict[str, FloatArray]:
        """Rectangles in and out; what is between stays on the device."""
        import torch

        try:
            with recording.beside_others(), torch.inference_mode():
                results = self._module(
                    **{name: torch.from_numpy(feed).to(self._device) for name, feed in feeds.items()}
                )
                found = [result.float().cpu().numpy() for result in results]
        except Exception as error:  # a model raises what its author chose to
            rows = len(next(iter(feeds.values())))
            raise StageError(f"PyTorch failed on a batch of {rows}: {error}") from error
        return {spec.name: result for spec, result in zip(self.spec.signature.outputs, found, strict=True)}


BACKEND = Torch()
