"""torch.compile, for comparison. It compiles for a minute and gains little on a CPU, so it runs only when asked for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hasten.backends import MODEL, Artifact, Dialect, RunOptions, Session, Source, probe_packages
from hasten.backends.torch import FILE, ModuleSession, load_module, probe_torch_gpu, save_module
from hasten.core.buckets import bucket_of, fill, take_out
from hasten.core.hardware import Machine
from hasten.core.tensors import Batch, Outputs
from hasten.core.variant import CUDA, Precision, Support, Variant

_KNOWN = (Variant("inductor", Precision.FP32), Variant("inductor", Precision.FP16, CUDA))


class Inductor:
    name = "inductor"
    requires = ("torch",)
    extra = "build"
    dialect = Dialect.MODULE
    is_stored = False

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant not in _KNOWN:
            return Support.no("it runs in fp32 on the CPU, in fp16 on 'cuda'")
        support = probe_packages(self)
        if not support.ok:
            return support
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            return Support.no("torch.compile needs a C++ compiler, and none is on the PATH", "install g++")
        return probe_torch_gpu(machine) if variant is not None and variant.device == CUDA else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        save_module(source, directory)
        return Artifact(variant, source.signature, directory, {MODEL: FILE})

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        import torch

        module = load_module(artifact)
        if artifact.variant.device != CUDA:
            return ModuleSession(torch.compile(module, dynamic=True), artifact, options)
        # Kernels that take any size, and with them a CUDA graph for each: compiled for one size each, the ninth would
        # no longer be compiled at all.
        return _Bucketed(torch.compile(module, mode="reduce-overhead", dynamic=True), artifact, options)


class _Bucketed(ModuleSession):
    """A CUDA graph is of one shape, so there must be few."""

    def run_padded(self, batch: Batch) -> Outputs:
        import torch

        signature = self.spec.signature
        room = bucket_of(batch, signature)
        # What the graph gave before has been copied, and may be overwritten.
        torch.compiler.cudagraph_mark_step_begin()
        return take_out(self.answer(fill(batch, signature, room)), batch, signature, room)


BACKEND = Inductor()
