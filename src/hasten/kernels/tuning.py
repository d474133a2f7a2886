"""Tuning results for one GPU: the GEMM algorithm per shape, and the small-batch threshold.

A bundle contains the results of the machine that built it; for another GPU or other library versions, the cache may
have results. They only choose between what the libraries and our kernels offer here: a bundle from a stranger can make
a GEMM slow, but not make it read or write other memory. Without either, the libraries' defaults are used: nothing is
measured when a model is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import triton
from triton.runtime.errors import OutOfResources

from hasten.core.errors import StageError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.system.cache import cache_directory
from hasten.core.tensors import Batch
from hasten.core.version import __version__
from hasten.kernels.cuda.graph_exec import GraphExec, capture_graph
from hasten.kernels.cuda.packed_buckets import Bucket, round_up
from hasten.kernels.cuda.replay import gc_paused
from hasten.kernels.encoder_base import PackedEncoder
from hasten.kernels.gemm.cublaslt import MAX_CANDIDATES, CublasLtGemms, GemmShape, library_version
from hasten.kernels.gemm.dispatch import BACKEND_NAME
from hasten.kernels.packing import MAX_TOKENS, pack, unpack

FILE = "tuning.json"
# The number of a cuBLASLt candidate.
Candidate = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CANDIDATES)]
_LAUNCHES, _REPLAYS = 8, 5


@dataclass(frozen=True, slots=True)
class Tuning:
    """The fastest choices measured in one environment (GPU, versions and precision)."""

    environment: str
    small_batch_max_tokens: int
    # In half precision the number of a cuBLASLt candidate, in 8 bits the name of a GEMM backend.
    gemms: tuple[tuple[GemmShape, Candidate | str], ...]

    def apply(self, encoder: PackedEncoder, cublaslt: CublasLtGemms) -> None:
        """Make the encoder use these choices."""
        encoder.small_batch_max_tokens = min(encoder.small_batch_max_tokens, self.small_batch_max_tokens)
        _choose(encoder, cublaslt, dict(self.gemms))

    def write(self, file: Path) -> None:
        """Write the results as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(self))


def find(encoder: PackedEncoder, cublaslt: CublasLtGemms, directory: Path) -> Tuning | None:
    """Return the results for this environment from the bundle's directory or from the cache."""
    current = environment(cublaslt)
    for file in (directory / FILE, cache_file(encoder, cublaslt)):
        tuning = _read(file)
        if tuning is not None and tuning.environment == current:
            return tuning
    return None


def environment(cublaslt: CublasLtGemms) -> str:
    """Return everything that results depend on, as text."""
    # Kernels of another version may be faster or slower.
    libraries = (
        f"hasten {__version__}, cuBLASLt {library_version()}, PyTorch {torch.__version__}, Triton {triton.__version__}"
    )
    accumulation = ", fast accumulation" if cublaslt.fast_accum else ""
    return f"{torch.cuda.get_device_name()}, {libraries}, {cublaslt.dtype}{accumulation}"


def cache_file(encoder: PackedEncoder, cublaslt: CublasLtGemms) -> Path:
    """Return the file in the cache for this encoder and environment."""
    key = f"{environment(cublaslt)} {asdict(encoder.geometry)}"
    # Which GEMMs are 8-bit.
    key += "".join(f" {shape}" for shape in encoder.gemm_shapes(1) if shape.input_dtype)
    return cache_directory() / "fused" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def tune(encoder: PackedEncoder, cublaslt: CublasLtGemms, max_batch_tokens: int = MAX_TOKENS) -> Tuning:
    """Measure the fastest choices, which takes some seconds."""
    with torch.inference_mode():
        shapes = [shape for tokens in bucket_sizes(max_batch_tokens) for shape in encoder.gemm_shapes(tokens)]
        gemms = {
            shape: encoder.gemm_dispatch.fastest(shape, measure_seconds)
            if shape.input_dtype
            else cublaslt.fastest(shape, measure_seconds)
            for shape in shapes
        }
        # The small-batch kernels are compared with the tuned GEMMs.
        _choose(encoder, cublaslt, gemms)
        small_batch_max_tokens = _find_small_batch_max_tokens(encoder)
    return Tuning(environment(cublaslt), small_batch_max_tokens, tuple(gemms.items()))


def _choose(encoder: PackedEncoder, cublaslt: CublasLtGemms, gemms: Mapping[GemmShape, int | str]) -> None:
    cublaslt.choose({shape: choice for shape, choice in gemms.items() if isinstance(choice, int)})
    encoder.gemm_dispatch.choose({shape: choice for shape, choice in gemms.items() if isinstance(choice, str)})


def bucket_sizes(max_batch_tokens: int) -> list[int]:
    """Return the token counts of all buckets for batches of up to this size."""
    return list(dict.fromkeys(map(round_up, range(16, max_batch_tokens + 1))))


def measure_seconds(launch: Callable[[], Any]) -> float:
    """Return the device seconds of one launch, measured over several in a CUDA graph; infinity if it fails."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            launch()
        stream.synchronize()
        with capture_lock.exclusive(), gc_paused():
            with capture_graph(stream) as graph:
                for _ in range(_LAUNCHES):
                    launch()
            graph_exec = GraphExec(graph)
    except (StageError, RuntimeError, OutOfResources):
        # PyTorch raises RuntimeError for unsupported GEMMs, Triton OutOfResources for tiles that are too large.
        torch.cuda.synchronize()
        return float("inf")
    return median(graph_exec.device_seconds(stream) for _ in range(_REPLAYS)) / _LAUNCHES


def _find_small_batch_max_tokens(encoder: PackedEncoder) -> int:
    """Return the largest bucket size up to which the small-batch kernels are the faster ones."""
    best = 0
    for tokens in bucket_sizes(encoder.small_batch_limit):
        single = Batch({"input_ids": np.zeros(tokens, np.int32)}, np.array([tokens], np.int32))
        bucket = Bucket.of(tokens, 1)
        buffer = np.zeros(sum(bucket.segment_sizes), np.int32)
        pack(buffer, single, bucket, encoder.geometry.position_offset)
        batch = unpack(torch.from_numpy(buffer).cuda(), bucket)
        small, large = partial(encoder.small_batch, batch), partial(encoder.large_batch, batch)
        if measure_seconds(small) > measure_seconds(large):
            break
        best = tokens
    return best


def _read(file: Path) -> Tuning | None:
    try:
        tuning = msgspec.json.decode(file.read_bytes(), type=Tuning)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None
    is_valid = all(
        isinstance(choice, str) == bool(shape.input_dtype)
        and (isinstance(choice, int) or BACKEND_NAME.fullmatch(choice))
        for shape, choice in tuning.gemms
    )
    return tuning if is_valid else None
