"""Our own runtime for encoders on NVIDIA GPUs: packed tokens, fused kernels, a CUDA graph for each size of batch.

Made from the PyTorch module's weights, with no graph between. A batch costs its real tokens, rounded up to a bucket;
a bucket that was seen before is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hasten.backends import (
    MODEL,
    Artifact,
    Dialect,
    OpenSession,
    RunOptions,
    Session,
    Source,
    probe_packages,
)
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.hardware import Machine
from hasten.core.tensors import Batch, IntArray, Layout, Outputs, SessionSpec, Signature, gather
from hasten.core.variant import Precision, Support, Variant

if TYPE_CHECKING:
    from hasten.kernels.encoder import Geometry
    from hasten.kernels.packing import Bucket

CUDA = "cuda"
FILE, ABOUT = "model.safetensors", "fused.json"
_DTYPES = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# Tensor cores for bf16, and what the kernels are written for.
_OLDEST = (8, 0)
# Kernels that overlap.
_HOPPER = (9, 0)
_CLS, _LAST = "cls", "lasttoken"


@dataclass(frozen=True, slots=True)
class About:
    """What the file of weights does not say."""

    geometry: Geometry
    # Layers and activations behind the encoder, by their names in the file; and how tokens become rows before them.
    head: tuple[str, ...]
    pooling: tuple[str, ...]
    normalize: bool


class Fused:
    name = "fused"
    requires = ("torch", "triton", "safetensors")
    extra = "fused"
    dialect = Dialect.MODULE
    is_stored = True

    def probe(self, machine: Machine, variant: Variant | None = None) -> Support:
        if not machine.gpus:
            return Support.no("there is no NVIDIA GPU here")
        capability = machine.gpus[0].capability
        if tuple(map(int, capability.split("."))) < _OLDEST:
            return Support.no(f"it needs compute capability 8.0, and {machine.gpus[0].name} has {capability}")
        support = probe_packages(self)
        if not support.ok or variant is None:
            return support
        if variant.device != CUDA:
            return Support.no(f"it runs on '{CUDA}', not on '{variant.device}'")
        if variant.precision not in _DTYPES:
            return Support.no(f"it does not compute in {variant.precision}")
        return support

    def variants(self, machine: Machine) -> Sequence[Variant]:
        half = Variant(self.name, Precision.FP16, CUDA)
        return [half] if self.probe(machine, half).ok else []

    def make(self, source: Source, variant: Variant, directory: Path) -> Artifact:
        import torch
        from safetensors.torch import save_file

        from hasten.kernels.weights import cast, read

        module: Any = source.module
        reading = cast(read(module.model), getattr(torch, _DTYPES[variant.precision]))
        pooling, normalize = _pooling(module)
        about = About(reading.geometry, reading.head, pooling, normalize)
        save_file(reading.weights, directory / FILE)
        (directory / ABOUT).write_bytes(msgspec.json.encode(about))
        return Artifact(variant, source.signature, directory, {MODEL: FILE})

    def open(self, artifact: Artifact, options: RunOptions) -> Session:
        import torch
        from safetensors.torch import load_file

        about = read_about(artifact)
        try:
            weights = load_file(artifact.path(), device=CUDA)
        except (OSError, RuntimeError) as error:
            raise StageError(f"{artifact.variant} cannot be loaded: {error}") from error
        is_dependent = torch.cuda.get_device_capability() >= _HOPPER
        return FusedSession(about, weights, artifact, device=CUDA, is_dependent=is_dependent)


def _pooling(module: Any) -> tuple[tuple[str, ...], bool]:
    head = getattr(module, "head", None)
    if head is None:
        return (), False
    if len(head.dense):
        raise UnsupportedError("dense layers behind the pooling are not in the fused backend")
    return tuple(str(kind.value) for kind in head.pooling), bool(head.normalize)


def read_about(artifact: Artifact) -> About:
    from hasten.kernels.encoder import Geometry

    # Imported late, so that its name is not known where the types are read.
    raw = msgspec.json.decode((artifact.directory / ABOUT).read_bytes())
    geometry = msgspec.convert(raw.pop("geometry"), Geometry)
    return About(geometry, tuple(raw["head"]), tuple(raw["pooling"]), raw["normalize"])


class FusedSession(OpenSession):
    """One thread's. On the CPU, through Triton's interpreter, it is for tests."""

    def __init__(
        self, about: About, weights: Mapping[str, Any], artifact: Artifact, *, device: str, is_dependent: bool
    ) -> None:
        import torch

        from hasten.kernels.encoder import Encoder
        from hasten.kernels.replay import Replay

        self._about, self._weights = about, weights
        self._encoder = Encoder(about.geometry, weights, is_dependent=is_dependent)
        self.replay = Replay(self._compute, device)
        names = {torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16, torch.float32: Precision.FP32}
        precision = names[weights["words"].dtype].value
        self.spec = SessionSpec(artifact.signature, Layout.PACKED, artifact.variant.device, precision)

    def run(self, batch: Batch) -> Outputs:
        from hasten.kernels.packing import MOST_TOKENS, parts

        if batch.tokens <= MOST_TOKENS or len(batch) == 1:
            return self._run(batch)
        rows = parts(batch.lengths)
        return gather([(part, self._run(batch.take(part))) for part in rows], batch, self.spec.signature)

    @property
    def most_tokens(self) -> int:
        from hasten.kernels.packing import MOST_TOKENS

        return MOST_TOKENS

    def rounded(self, tokens: int) -> int:
        from hasten.kernels.packing import Bucket

        return Bucket.of([tokens]).tokens

    def samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        from hasten.kernels.replay import MOST_GRAPHS
        from hasten.kernels.sizes import samples

        return samples(tokens, rows, self.spec.signature)[:MOST_GRAPHS]

    def close(self) -> None:
        self.replay.clear()

    def _run(self, batch: Batch) -> dict[str, Any]:
        from hasten.kernels.packing import Bucket, pack

        bucket = Bucket.of(batch.lengths)
        results = self.replay(pack(batch, bucket, self._about.geometry.first_place), bucket)
        return _named(results, batch, self.spec.signature)

    def _compute(self, whole: Any, bucket: Bucket) -> Any:
        """From the packed batch to what the task reads: scores or vectors, of rows or of tokens."""
        from hasten.kernels.packing import unpack

        batch = unpack(whole, bucket)
        hidden = self._encoder(batch)
        return self._pooled(hidden, batch.starts) if self._about.pooling else self._scored(hidden, batch.starts)

    def _pooled(self, hidden: Any, starts: Any) -> Any:
        import torch

        from hasten.kernels.pool import pool

        # A sequence that the bucket has room for, and the batch does not have, begins behind the last token.
        rows = {_CLS: starts[:-1].clamp(max=hidden.shape[0] - 1), _LAST: (starts[1:] - 1).clamp(min=0)}
        kinds = self._about.pooling
        vectors = [hidden[rows[kind]].float() if kind in rows else pool(hidden, starts, kind) for kind in kinds]
        joined = torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0]
        return torch.nn.functional.normalize(joined, dim=-1) if self._about.normalize else joined

    def _scored(self, hidden: Any, starts: Any) -> Any:
        from hasten.kernels.head import dense

        x, rows = hidden, None if self.spec.signature.outputs[0].is_per_token else starts[:-1]
        steps = [*self._about.head, ""]
        for step, following in pairwise(steps):
            weight = self._weights.get(f"head.{step}.weight")
            if weight is not None:
                # What follows a layer is its activation, or another layer, which names none.
                activation = "" if f"head.{following}.weight" in self._weights else following
                bias = self._weights[f"head.{step}.bias"]
                x, rows = dense(x, rows, weight, bias, activation), None
        return x


def _named(results: IntArray, batch: Batch, signature: Signature) -> dict[str, Any]:
    """Without what the bucket had room for; where there are several outputs, each is a column."""
    count = batch.tokens if signature.outputs[0].is_per_token else len(batch)
    found = results[:count]
    if len(signature.outputs) == 1:
        return {signature.outputs[0].name: found.copy()}
    return {spec.name: found[:, place].copy() for place, spec in enumerate(signature.outputs)}


BACKEND = Fused()
