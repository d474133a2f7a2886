"""Our own runtime for encoders on NVIDIA GPUs: packed tokens, fused kernels, a CUDA graph for each size of batch.

Made from the PyTorch module's weights, with no graph between. A batch costs its real tokens, rounded up to a bucket;
a bucket that was seen before is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hasten.backends import (
    MODEL,
    Artifact,
    Dialect,
    RunOptions,
    Source,
    probe_on_gpu,
    probe_packages,
)
from hasten.backends.fused.session import ABOUT, CUDA, DTYPES, NARROW, About, FusedSession, read_about, translated
from hasten.backends.torch import probe_torch_gpu
from hasten.core.errors import StageError
from hasten.core.hardware import Gpu, Machine
from hasten.core.recording import recording
from hasten.core.tensors import Batch
from hasten.core.variant import Precision, Support, Variant

if TYPE_CHECKING:
    from hasten.kernels.weights import Reading

FILE = "model.safetensors"
# Tensor cores for bf16, and what the kernels are written for.
OLDEST = (8, 0)
# Those for fp8: Ada, Hopper and newer.
_OLDEST = {Precision.FP8: (8, 9)}
# Kernels that overlap.
HOPPER = (9, 0)
# GELU by tanh, which cuBLAS computes with the product in front of it.
_GELU = "gelu"
# Products of fp8 added up as tensor cores do by themselves, in fewer bits than fp32.
_FAST = "fast"
# Products that stay in half precision.
_KEEP = "keep"
# By the ranges of quantizers that stand in the module.
_QDQ = "qdq"


class Fused:
    name = "fused"
    requires = ("torch", "triton", "safetensors")
    extra = "fused"
    dialect = Dialect.MODULE
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        support = probe_on_gpu(machine, variant, lambda: self._installed(machine.gpus[0]))
        if not support.ok or variant is None:
            return support
        gpu = machine.gpus[0]
        if variant.precision not in (*DTYPES, *NARROW):
            return Support.no(f"it does not compute in {variant.precision}")
        oldest = _OLDEST.get(variant.precision, OLDEST)
        if _capability(gpu) < oldest:
            needed = ".".join(map(str, oldest))
            return Support.no(f"{variant.precision} needs compute capability {needed}; {gpu.name} has {gpu.capability}")
        if not all(_is_known(way, variant.precision) for way in variant.ways):
            known = f"'{_GELU}', in eight bits '{_KEEP}N' and '{_QDQ}', and in fp8 '{_FAST}'"
            return Support.no(f"of the ways that variants are made in it knows {known}, and no others")
        return probe_torch_gpu(machine)

    def _installed(self, gpu: Gpu) -> Support:
        """No package is asked for where the GPU is too old for it."""
        if _capability(gpu) < OLDEST:
            return Support.no(f"it needs compute capability 8.0, and {gpu.name} has {gpu.capability}")
        return probe_packages(self)

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """Eight bits have to be calibrated first."""
        offered = [Variant(self.name, Precision.FP16, CUDA, ways) for ways in ((), (_GELU,))]
        return [variant for variant in offered if self.probe(machine, variant).ok]

    def check_module(self, module: Any) -> None:
        from hasten.kernels.weights import read

        read(module.model)

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        import torch
        from safetensors.torch import save_file

        from hasten.kernels.activation import TANH
        from hasten.kernels.weights import read_dense

        module: Any = source.module
        reading = _read(source, variant)
        # Where token vectors are pooled, what stands behind them is not the model's but the pooling's.
        pooled = getattr(module, "head", None)
        pooling = tuple(str(kind.value) for kind in pooled.pooling) if pooled is not None else ()
        steps, dense = read_dense(pooled.dense) if pooled is not None else (reading.head, {})
        geometry = replace(reading.geometry, activation=TANH) if _GELU in variant.ways else reading.geometry
        normalizes = bool(pooled is not None and pooled.normalize)
        about = About(geometry, steps, pooling, normalizes, sums_fast=_FAST in variant.ways)
        save_file({**_narrowed(reading, source, variant), **dense}, directory / FILE)
        (directory / ABOUT).write_bytes(msgspec.json.encode(about))
        artifact = Artifact(variant, source.signature, directory, {MODEL: FILE})
        if torch.cuda.is_available():
            with self.open(artifact, RunOptions()) as session:
                session.tune(directory)
        return artifact

    def most_sensitive(self, source: Source, variant: Variant) -> Sequence[str]:
        from hasten.kernels.calibrate import most_sensitive

        reading = _read(source, variant)
        with translated(f"the products of {variant} cannot be told apart"):
            return most_sensitive(reading.geometry, _placed(reading), _rows(source, variant), _narrow(variant))

    def tune(self, artifact: Artifact) -> None:
        """Measure what its build has measured, on its own GPU and with its libraries, for those that are here."""
        with self.open(artifact, RunOptions()) as session:
            if not session.lane.is_tuned:
                session.tune()

    def open(self, artifact: Artifact, options: RunOptions) -> FusedSession:
        import torch
        from safetensors.torch import load_file

        about = read_about(artifact)
        with translated(f"{artifact.variant} cannot be loaded"), recording.beside_others():
            weights = load_file(artifact.path(), device=CUDA)
            is_dependent = torch.cuda.get_device_capability() >= HOPPER
            return FusedSession(about, weights, artifact, device=CUDA, is_dependent=is_dependent)


def _capability(gpu: Gpu) -> tuple[int, ...]:
    return tuple(map(int, gpu.capability.split(".")))


def _is_known(way: str, precision: Precision) -> bool:
    """How many products are kept is the builder's business, which says which."""
    is_of_products = precision in NARROW and (way == _QDQ or way.startswith(_KEEP))
    return way == _GELU or is_of_products or (way == _FAST and precision is Precision.FP8)


def _read(source: Source, variant: Variant) -> Reading:
    """The model's weights in half precision."""
    import torch

    from hasten.kernels.weights import cast, read

    module: Any = source.module
    return cast(read(module.model), getattr(torch, DTYPES[_half(variant)]))


def _half(variant: Variant) -> Precision:
    return Precision.FP16 if variant.precision in NARROW else variant.precision


def _narrow(variant: Variant) -> Any:
    import torch

    return getattr(torch, NARROW[variant.precision])


def _narrowed(reading: Reading, source: Source, variant: Variant) -> Mapping[str, Any]:
    """With the weights of products in eight bits, where that is the variant's precision."""
    if variant.precision not in NARROW:
        return reading.weights
    from hasten.kernels.calibrate import narrowed, narrowed_by, watched
    from hasten.kernels.weights import ranges

    if _QDQ in variant.ways:
        module: Any = source.module
        found = ranges(module.model)
        if not found:
            raise StageError("no product of the encoder has quantizers that are on and calibrated")
        return narrowed_by(reading.weights, found, _narrow(variant))
    with translated(f"{variant} cannot be calibrated"):
        taken = watched(reading.geometry, _placed(reading), _rows(source, variant))
        return narrowed(reading.weights, taken, _narrow(variant), source.keep)


def _placed(reading: Reading) -> Mapping[str, Any]:
    """Where they are computed with: on the CPU, through Triton's interpreter, in fp32."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {name: value.to(CUDA) if on_gpu else value.float() for name, value in reading.weights.items()}


def _rows(source: Source, variant: Variant) -> Batch:
    if source.calibration is None or not len(source.calibration):
        raise StageError(f"{variant} is calibrated, and there are no rows to calibrate on")
    return source.calibration


BACKEND = Fused()
