"""torch.compile, for comparison. On a CPU it compiles for a minute and gains little, so it runs only when asked for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hasten.backends import MODEL, Artifact, Dialect, RunOptions, Session, Source, probe_packages
from hasten.backends.torch import FILE, ModuleSession, load_module, save_module
from hasten.core.hardware import Machine
from hasten.core.variant import Precision, Support, Variant


class Inductor:
    name = "inductor"
    requires = ("torch",)
    extra = "build"
    dialect = Dialect.MODULE
    is_stored = False

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if variant is not None and variant != Variant(self.name, Precision.FP32):
            return Support.no("it runs in fp32 on the CPU only")
        support = probe_packages(self)
        if not support.ok:
            return support
        if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
            return Support.no("torch.compile needs a C++ compiler, and none is on the PATH", "install g++")
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        return []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        save_module(source, directory)
        return Artifact(variant, source.signature, directory, {MODEL: FILE})

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        import torch

        return ModuleSession(torch.compile(load_module(artifact), dynamic=True), artifact, options)


BACKEND = Inductor()
