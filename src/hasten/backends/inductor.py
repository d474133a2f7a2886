"""Run torch.compile for comparison, only if named: compilation takes a minute and gains little on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hasten.backends import Artifact, Dialect, RunOptions, Session, Source, probe_packages
from hasten.backends.torch import ModuleSession, load_module, probe_torch_gpu, save_module
from hasten.core.gpu.padded_buckets import bucket_of
from hasten.core.system.hardware import Machine
from hasten.core.tensors import Batch, Outputs, pad, unpad
from hasten.core.variant import CUDA, Precision, Support, Variant

_SUPPORTED = (Variant("inductor", Precision.FP32), Variant("inductor", Precision.FP16, CUDA))


class Inductor:
    """The backend `inductor`."""

    name = "inductor"
    requires = ("torch",)
    extra = "build"
    dialect = Dialect.MODULE
    is_stored = False

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant not in _SUPPORTED:
            return Support.no("it runs in fp32 on the CPU and in fp16 on 'cuda'")
        support = probe_packages(self)
        if not support.ok:
            return support
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return Support.no("torch.compile needs a C++ compiler, and the PATH has none", "install g++")
        return probe_torch_gpu(machine) if variant is not None and variant.device == CUDA else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        return save_module(source, variant, directory)

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        module = load_module(artifact)
        import torch

        if artifact.variant.device != CUDA:
            return ModuleSession(torch.compile(module, dynamic=True), artifact, options)
        # Dynamic shapes, with a CUDA graph per bucket: torch.compile recompiles a function for at most eight static
        # shapes and runs the ninth uncompiled.
        return _BucketedSession(torch.compile(module, mode="reduce-overhead", dynamic=True), artifact, options)


class _BucketedSession(ModuleSession):
    """Pads to buckets, because every shape has a CUDA graph of its own."""

    def run_padded(self, batch: Batch) -> Outputs:
        import torch

        signature = self.spec.signature
        bucket = bucket_of(batch, signature)
        # The outputs of the previous replay were copied and may be overwritten.
        torch.compiler.cudagraph_mark_step_begin()
        return unpad(self.answer(pad(batch, signature, bucket)), batch, signature, bucket)


BACKEND = Inductor()
