"""Backend for encoders on NVIDIA GPUs: padding-free batches, fused kernels, and a CUDA graph per bucket.

Artifacts are made from the weights of the PyTorch module, without an exported graph. A batch costs its real tokens,
rounded up to a bucket, and runs with a single launch once its bucket was captured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hasten.backends import MODEL, Artifact, Dialect, RunOptions, Source, probe_capability, probe_on_gpu, probe_packages
from hasten.backends.fused.session import (
    CUDA,
    DTYPES,
    LOW_PRECISION,
    METADATA_FILE,
    FusedMetadata,
    FusedSession,
    read_metadata,
    translate_torch_errors,
)
from hasten.backends.torch import probe_torch_gpu
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.system.hardware import Gpu, Machine
from hasten.core.tensors import PROMPT_MASK, Batch
from hasten.core.variant import Precision, Support, Variant

if TYPE_CHECKING:
    from hasten.kernels.weights import ModelWeights

FILE = "model.safetensors"
# Compute capability: Ampere has the bf16 tensor cores that the kernels use.
MIN_CAPABILITY = (8, 0)
# fp8 tensor cores: Ada, Hopper and newer.
_MIN_CAPABILITIES = {Precision.FP8: (8, 9)}
# Supports programmatic dependent launch.
HOPPER = (9, 0)
# The tanh approximation of GELU, which cuBLAS fuses into the preceding GEMM.
_TANH_GELU = "tanhgelu"
# fp8 accumulation in the tensor cores, with fewer bits than fp32.
_FAST_ACCUM = "fastaccum"
# GEMMs that stay in half precision.
_KEEP = "keep"
# Ranges from the quantizers of the module.
_QDQ = "qdq"


class Fused:
    """The `fused` backend."""

    name = "fused"
    requires = ("torch", "triton", "safetensors")
    extra = "fused"
    dialect = Dialect.MODULE
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        support = probe_on_gpu(machine, variant, lambda: self._probe_installation(machine.gpus[0]))
        if not support.ok or variant is None:
            return support
        gpu = machine.gpus[0]
        if variant.precision not in (*DTYPES, *LOW_PRECISION):
            return Support.no(f"{variant.precision} is not supported")
        min_capability = _MIN_CAPABILITIES.get(variant.precision, MIN_CAPABILITY)
        if not (support := probe_capability(gpu, min_capability, variant.precision)).ok:
            return support
        if not all(_is_supported(modifier, variant.precision) for modifier in variant.modifiers):
            supported = f"'{_TANH_GELU}', in 8 bits '{_KEEP}N' and '{_QDQ}', and in fp8 '{_FAST_ACCUM}'"
            return Support.no(f"the only modifiers it supports are {supported}")
        return probe_torch_gpu(machine)

    def _probe_installation(self, gpu: Gpu) -> Support:
        """Check the GPU first: missing packages do not matter if it is too old."""
        support = probe_capability(gpu, MIN_CAPABILITY)
        return probe_packages(self) if support.ok else support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        """Return the variants that need no calibration; 8-bit ones do."""
        offered = [Variant(self.name, Precision.FP16, CUDA, modifiers) for modifiers in ((), (_TANH_GELU,))]
        return [variant for variant in offered if self.probe(machine, variant).ok]

    def check_module(self, module: Any) -> None:
        from hasten.kernels.weights import read

        _check_inputs(module)
        read(module.model)

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        """Write the weights and metadata of a variant, with tuning results where there is a GPU."""
        import torch
        from safetensors.torch import save_file

        from hasten.kernels.ops.activation import TANH
        from hasten.kernels.weights import read_dense

        module: Any = source.module
        _check_inputs(module)
        model = _read(source, variant)
        # A pooled model has the layers after its pooling as head, not those of the transformers model.
        pooled = getattr(module, "head", None)
        pooling = tuple(str(kind.value) for kind in pooled.pooling) if pooled is not None else model.pooling
        head, dense = read_dense(pooled.dense) if pooled is not None else (model.head, {})
        geometry = replace(model.geometry, activation=TANH) if _TANH_GELU in variant.modifiers else model.geometry
        normalize = bool(pooled is not None and pooled.normalize)
        metadata = FusedMetadata(geometry, head, pooling, normalize, fast_accum=_FAST_ACCUM in variant.modifiers)
        save_file({**_quantize(model, source, variant), **dense}, directory / FILE)
        (directory / METADATA_FILE).write_bytes(msgspec.json.encode(metadata))
        artifact = Artifact(variant, source.signature, directory, {MODEL: FILE})
        if torch.cuda.is_available():
            with self.open(artifact, RunOptions()) as session:
                session.tune(directory)
        return artifact

    def most_sensitive(self, source: Source, variant: Variant) -> Sequence[str]:
        from hasten.kernels.quantize_weights import most_sensitive

        model = _read(source, variant)
        with translate_torch_errors(f"the sensitivity of {variant} cannot be measured"):
            return most_sensitive(
                model.geometry, _to_compute_device(model), _calibration_rows(source, variant), _quantized_dtype(variant)
            )

    def tune(self, artifact: Artifact) -> None:
        """Tune for this machine, unless the bundle or the cache has results for its GPU and libraries."""
        with self.open(artifact, RunOptions()) as session:
            if not session.slot.is_tuned:
                session.tune()

    def open(self, artifact: Artifact, options: RunOptions) -> FusedSession:
        import torch
        from safetensors.torch import load_file

        metadata = read_metadata(artifact)
        with translate_torch_errors(f"{artifact.variant} cannot be loaded"), capture_lock.shared():
            weights = load_file(artifact.path(), device=CUDA)
            use_pdl = torch.cuda.get_device_capability() >= HOPPER
            return FusedSession(metadata, weights, artifact, device=CUDA, use_pdl=use_pdl)


def _is_supported(modifier: str, precision: Precision) -> bool:
    """Accept any number after `keep`: the builder decides which GEMMs that means."""
    is_quantization = precision in LOW_PRECISION and (modifier == _QDQ or modifier.startswith(_KEEP))
    return modifier == _TANH_GELU or is_quantization or (modifier == _FAST_ACCUM and precision is Precision.FP8)


def _check_inputs(module: Any) -> None:
    if PROMPT_MASK in module.inputs:
        raise UnsupportedError("the fused backend does not leave prompts out of the pooling")
    if module.not_fused:
        raise UnsupportedError(f"the fused backend {module.not_fused}")


def _read(source: Source, variant: Variant) -> ModelWeights:
    """Read the model's weights in half precision."""
    import torch

    from hasten.kernels.weights import cast, read

    module: Any = source.module
    precision = Precision.FP16 if variant.precision in LOW_PRECISION else variant.precision
    return cast(read(module.model), getattr(torch, DTYPES[precision]))


def _quantized_dtype(variant: Variant) -> Any:
    import torch

    return getattr(torch, LOW_PRECISION[variant.precision])


def _quantize(model: ModelWeights, source: Source, variant: Variant) -> Mapping[str, Any]:
    """Quantize the weights of GEMMs to 8 bits, where that is the variant's precision."""
    if variant.precision not in LOW_PRECISION:
        return model.weights
    from hasten.kernels.quantize_weights import observe_activations, quantize_weights, quantize_with_module
    from hasten.kernels.weights import ranges

    if _QDQ in variant.modifiers:
        module: Any = source.module
        amax = ranges(module.model)
        if not amax:
            raise StageError("no linear layer of the encoder has enabled and calibrated quantizers")
        return quantize_with_module(model.weights, amax, _quantized_dtype(variant))
    with translate_torch_errors(f"{variant} cannot be calibrated"):
        observed = observe_activations(model.geometry, _to_compute_device(model), _calibration_rows(source, variant))
        return quantize_weights(model.weights, observed, _quantized_dtype(variant), source.keep)


def _to_compute_device(model: ModelWeights) -> Mapping[str, Any]:
    """Move the weights to the GPU; on the CPU, Triton's interpreter runs in fp32."""
    import torch

    has_gpu = torch.cuda.is_available()
    return {name: value.to(CUDA) if has_gpu else value.float() for name, value in model.weights.items()}


def _calibration_rows(source: Source, variant: Variant) -> Batch:
    if source.calibration is None or not len(source.calibration):
        raise StageError(f"{variant} needs calibration rows, and there are none")
    return source.calibration


BACKEND = Fused()
