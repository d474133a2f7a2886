"""Contenders of the GPU benchmark: the variants that are timed, and how each is made, tuned and opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoders import Encoder
from safetensors.torch import load_file
from triton.runtime.errors import OutOfResources

from hasten.backends import BACKENDS, Artifact, RunOptions, Session
from hasten.backends.fused import BACKEND as FUSED
from hasten.backends.fused.session import FusedSession, read_metadata
from hasten.backends.inductor import Inductor
from hasten.backends.torch import ModuleSession, load_module
from hasten.core.errors import StageError
from hasten.core.system.hardware import Machine
from hasten.core.tensors import Batch, Outputs
from hasten.core.variant import Precision, Support, Variant
from hasten.kernels import tuning
from hasten.kernels.packing import PART_TOKENS, split_rows

VARIANTS = (
    "torch-fp16@cuda", "torch-bf16@cuda", "inductor-fp16@cuda", "inductor_static-fp16@cuda", "onnxruntime-fp16@cuda",
    "fused-fp16@cuda", "fused-fp16+tanhgelu@cuda",
    "fused-fp8@cuda", "fused-fp8+tanhgelu@cuda", "fused-fp8+tanhgelu+fastaccum@cuda",
)  # fmt: skip
# The same without a GPU: Triton's interpreter runs the fused variants.
CPU_VARIANTS = (
    "torch-fp32", "inductor-fp32", "inductor_static-fp32", "onnxruntime-fp32",
    *(name for name in VARIANTS if name.startswith(FUSED.name)),
)  # fmt: skip
MAX_ERROR = 1e-2
# Random weights say nothing about accuracy: these limits detect a wrong function. Rounding the weights of RoBERTa-base
# to fp8 in PyTorch, and nothing else, moves these logits by 0.06 to 0.08.
MAX_ERRORS = {Precision.BF16: 5e-2, Precision.INT8: 1e-1, Precision.FP8: 0.25}
# Modes of torch.compile for fixed shapes. `max-autotune` also times Triton GEMMs, for minutes per model.
_STATIC_MODES = {"inductor_static": "reduce-overhead", "inductor_autotuned": "max-autotune"}
# Bucket sizes up to this one are always tuned, since tuning looks for the end of the small-batch kernels from below.
_SMALL_TOKENS = 128


class StaticInductor(Inductor):
    """torch.compile with a compilation and a CUDA graph per shape, and without padding to buckets."""

    def __init__(self, name: str) -> None:
        self.name = name

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        """Return the support of torch.compile."""
        return super().probe(machine, variant and replace(variant, backend=Inductor.name))

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        """Open the stored module, compiled when it first sees a shape."""
        compiled = torch.compile(load_module(artifact), mode=_STATIC_MODES[self.name], dynamic=False)
        return _StaticSession(compiled, artifact, options)


class _StaticSession(ModuleSession):
    def run_padded(self, batch: Batch) -> Outputs:
        # The outputs of the previous replay were copied and may be overwritten.
        torch.compiler.cudagraph_mark_step_begin()
        return super().run_padded(batch)


# All compiled modules of a process count together; beyond the default of 8 PyTorch runs them uncompiled.
torch._dynamo.config.recompile_limit = 64

for _name in _STATIC_MODES:
    BACKENDS.add(_name, StaticInductor(_name))


def is_static(variant: str) -> bool:
    """Return whether a variant compiles every shape anew, which makes it unfit for texts of mixed length."""
    return Variant.parse(variant).backend in _STATIC_MODES


def max_error(variant: str) -> float:
    """Return the largest accepted relative error of a variant."""
    return MAX_ERRORS.get(Variant.parse(variant).precision, MAX_ERROR)


def make_and_open(encoder: Encoder, variant: Variant, folder: Path) -> Session:
    """Make a variant in a folder and open it; pruning of the last layer is off, since no other contender prunes."""
    folder.mkdir(parents=True)
    backend = BACKENDS.get(variant.backend)
    with _tuned_for(_timed_tokens(encoder)):
        artifact = backend.make(encoder.source(variant), variant, folder)
    if variant.backend != FUSED.name:
        return backend.open(artifact, RunOptions())
    session = FUSED.open(artifact, RunOptions()) if torch.cuda.is_available() else _open_interpreted(artifact)
    session.prunes = False
    return session


@contextmanager
def untimed_tuning() -> Iterator[None]:
    """Compile everything that tuning would time, without timing it."""
    with _replaced("measure_seconds", _launch_once):
        yield


def _timed_tokens(encoder: Encoder) -> set[int]:
    """Return the numbers of tokens in the batches that are timed."""
    study = encoder.study
    sizes = {shape.batch * shape.sequence for shape in study.shapes}
    if study.mixed_lengths:
        # The parts that the fused backend splits a large batch into.
        lengths = np.array(study.mixed_lengths, np.int32)
        sizes |= {int(lengths[rows].sum()) for rows in split_rows(lengths, PART_TOKENS)}
    return sizes


@contextmanager
def _tuned_for(tokens: Iterable[int]) -> Iterator[None]:
    """Tune only the buckets of batches that are timed, not those of all sizes, which takes minutes for all models."""
    all_sizes = tuning.bucket_sizes
    timed = {min(size for size in all_sizes(tuning.MAX_TOKENS) if size >= count) for count in tokens}

    def timed_sizes(max_batch_tokens: int) -> list[int]:
        return [size for size in all_sizes(max_batch_tokens) if size in timed or size <= _SMALL_TOKENS]

    with _replaced("bucket_sizes", timed_sizes):
        yield


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of the tuning module."""
    original = getattr(tuning, name)
    setattr(tuning, name, function)
    try:
        yield
    finally:
        setattr(tuning, name, original)


def _launch_once(launch: Callable[[], Any]) -> float:
    try:
        launch()
        torch.cuda.synchronize()
    except (StageError, RuntimeError, OutOfResources):
        return float("inf")
    return 0.0


def _open_interpreted(artifact: Artifact) -> FusedSession:
    """Open a fused artifact for Triton's interpreter, in fp32 except for 8-bit weights."""
    dtypes_8bit = (torch.float8_e4m3fn, torch.int8)
    weights = {
        name: value if value.dtype in dtypes_8bit else value.float()
        for name, value in load_file(artifact.path()).items()
    }
    return FusedSession(read_metadata(artifact), weights, artifact, device="cpu", use_pdl=False)
