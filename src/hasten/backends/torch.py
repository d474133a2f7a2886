"""Run the PyTorch module unchanged: the reference for outputs and the baseline for speed. Never stored in a bundle."""

from __future__ import annotations

import os
import secrets
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
from hasten.core.errors import StageError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.gpu.padded_buckets import check_lengths
from hasten.core.placement import OperatorPlacement, SelfTest
from hasten.core.system.hardware import Machine
from hasten.core.tensors import Batch, FloatArray, IntArray, Layout, Outputs, SessionSpec, pad, unpad
from hasten.core.variant import CPU, CUDA, Precision, Support, Variant

# The name of the pickled module: a secret of this process and of the benchmark processes that inherit its environment.
# Another program cannot know it in advance, so no file of a bundle or of a download is ever unpickled.
FILE = f"module-{os.environ.setdefault('_HASTEN_MODULE_KEY', secrets.token_hex(16))}.pt"
_DTYPES = {Precision.FP32: "float32", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
_ON_GPU = [Variant("torch", precision, CUDA) for precision in _DTYPES]


class Torch:
    """The backend `torch`."""

    name = "torch"
    requires = ("torch",)
    extra = "build"
    dialect = Dialect.MODULE
    is_stored = False

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is None or variant == Variant(self.name, Precision.FP32):
            return probe_packages(self)
        if variant not in _ON_GPU:
            return Support.no("it runs in fp32 on the CPU, and in fp32, fp16 and bf16 on 'cuda'")
        support = probe_packages(self)
        return probe_torch_gpu(machine) if support.ok else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """Return the baselines; bf16 runs only if named, because it is as fast as fp16."""
        offered = [variant for variant in _ON_GPU if variant.precision is not Precision.BF16]
        return [Variant(self.name, Precision.FP32), *(each for each in offered if self.probe(machine, each).ok)]

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        return save_module(source, variant, directory)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        return ModuleSession(load_module(artifact), artifact, options)

    def trials(self, machine: Machine) -> Sequence[SelfTest]:
        import torch

        devices = [CPU]
        tests = []
        if torch.version.cuda and torch.cuda.is_available():
            devices.append(CUDA)
        elif torch.version.cuda:
            problem = "cannot use the GPU" if machine.gpus else "there is no GPU here: the CPU build is far smaller"
            note = f"built for CUDA {torch.version.cuda}, but {problem}"
            tests.append(SelfTest(CUDA, is_ok=not machine.gpus, note=note))
        for device in devices:
            try:
                product = torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)
                tests.append(SelfTest(device, (OperatorPlacement("matmul", product.device.type, 1),)))
            except RuntimeError as error:
                tests.append(SelfTest(device, is_ok=False, note=str(error).splitlines()[0]))
        return tests


def probe_torch_gpu(machine: Machine) -> Support:
    """Return whether the installed PyTorch can use the machine's GPU."""
    support = probe_gpu(machine)
    if not support.ok:
        return support
    import torch

    if torch.cuda.is_available():
        return support
    reason = "is built for CPUs only" if torch.version.cuda is None else f"needs a driver for {torch.version.cuda}"
    return Support.no(f"the installed PyTorch {reason} and cannot use the GPU")


def save_module(source: Source, variant: Variant, directory: Path) -> Artifact:
    """Save the pickled module in the build's temporary directory, from which the benchmark process loads it.

    Pickle, because a module may be of any class, also of one that came with the model.
    """
    import torch

    try:
        torch.save(source.module, directory / FILE)
    except Exception as error:  # pickling a model's attributes may raise anything
        raise StageError(f"cannot save the PyTorch module for the benchmark: {error}") from error
    return Artifact(variant, source.signature, directory, {MODEL: FILE})


def load_module(artifact: Artifact) -> Any:
    """Load the module on the variant's device, in its precision."""
    if artifact.graphs.get(MODEL) != FILE:
        raise StageError(f"{artifact.variant} was not saved by this build: unpickling it could run code")
    import torch

    try:
        module = torch.load(artifact.path(), weights_only=False, map_location=artifact.variant.device).eval()
        if artifact.variant.precision is not Precision.FP32:
            # Only the weights are cast: the frequencies of rotary embeddings are not among them and stay in fp32.
            dtype, weights = getattr(torch, _DTYPES[artifact.variant.precision]), module.state_dict()
            cast = {name: value.to(dtype) for name, value in weights.items() if value.is_floating_point()}
            module.load_state_dict(weights | cast, assign=True)
    except Exception as error:  # unpickling a damaged file may raise anything
        raise StageError(f"PyTorch cannot load {artifact.variant}: {type(error).__name__}: {error}") from error
    return module


class ModuleSession(PaddedSession):
    """A PyTorch module, called on padded batches."""

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
        """Run padded inputs on the module's device and return padded outputs on the host."""
        import torch

        try:
            with capture_lock.shared(), torch.inference_mode():
                results = self._module(
                    **{name: torch.from_numpy(feed).to(self._device) for name, feed in feeds.items()}
                )
                outputs = [result.float().cpu().numpy() for result in results]
        except Exception as error:  # a model may raise anything
            rows = len(next(iter(feeds.values())))
            raise StageError(f"PyTorch failed on a batch of {rows}: {error}") from error
        return {spec.name: result for spec, result in zip(self.spec.signature.outputs, outputs, strict=True)}


BACKEND = Torch()
