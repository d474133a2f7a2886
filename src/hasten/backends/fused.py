"""Our own runtime for encoders on NVIDIA GPUs: packed tokens, fused kernels, a CUDA graph for each size of batch.

Made from the PyTorch module's weights, with no graph between. A batch costs its real tokens, rounded up to a bucket;
a bucket that was seen before is one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np

from hasten.backends import (
    MODEL,
    Artifact,
    Dialect,
    RunOptions,
    Session,
    Source,
    probe_packages,
    uniform_batch,
)
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.hardware import Machine
from hasten.core.tensors import Batch, IntArray, Layout, Outputs, SessionSpec, Shape, Signature, gather
from hasten.core.variant import Precision, Support, Variant

if TYPE_CHECKING:
    from hasten.kernels.encoder import Encoder, Geometry, Packed

CUDA = "cuda"
FILE, ABOUT = "model.safetensors", "fused.json"
_DTYPES = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# Tensor cores for bf16, and what the kernels are written for.
_OLDEST = (8, 0)
# Kernels that overlap.
_HOPPER = (9, 0)
# Tokens that run at once; more are run one part after the other.
_MOST_TOKENS = 16384
_SMALLEST = 16
_MOST_GRAPHS = 256
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


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for so many tokens, in so many sequences."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, batch: Batch) -> Bucket:
        return cls(_round_up(max(_SMALLEST, batch.tokens)), 1 << (len(batch) - 1).bit_length())


def _round_up(tokens: int) -> int:
    """To an eighth of the next power of two: at most an eighth of what runs is for nothing; few ones to a power."""
    power = 1 << (tokens - 1).bit_length()
    step = power if tokens <= 128 else power // 16
    return -(-tokens // step) * step


class FusedSession:
    """One thread's. On the CPU, through Triton's interpreter, it is for tests."""

    def __init__(
        self, about: About, weights: Mapping[str, Any], artifact: Artifact, *, device: str, is_dependent: bool
    ) -> None:
        import torch

        from hasten.kernels.encoder import Encoder

        self._about, self._weights = about, weights
        self._encoder: Encoder = Encoder(about.geometry, weights, is_dependent=is_dependent)
        # The one that was used last is last.
        self._graphs: dict[Bucket, _Graph] = {}
        self._device = _Device() if device == CUDA else None
        names = {torch.float16: Precision.FP16, torch.bfloat16: Precision.BF16, torch.float32: Precision.FP32}
        precision = names[weights["words"].dtype].value
        self.spec = SessionSpec(artifact.signature, Layout.PACKED, artifact.variant.device, precision)

    def run(self, batch: Batch) -> Outputs:
        if batch.tokens <= _MOST_TOKENS or len(batch) == 1:
            return self._run(batch)
        parts = _parts(batch.lengths)
        return gather([(rows, self._run(batch.take(rows))) for rows in parts], batch, self.spec.signature)

    def warm(self, shapes: Sequence[Shape]) -> None:
        for shape in shapes:
            self.run(uniform_batch(shape, self.spec.signature))

    def close(self) -> None:
        self._graphs.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, batch: Batch) -> dict[str, Any]:
        bucket = Bucket.of(batch)
        packed = pack(batch, bucket, self._about.geometry.first_place)
        results = self._interpret(packed, bucket) if self._device is None else self._graph(bucket)(packed)
        return _named(results, batch, self.spec.signature)

    def _graph(self, bucket: Bucket) -> _Graph:
        """Those that were not used for long make room: each holds some of the driver's memory."""
        assert self._device is not None
        graph = self._graphs.pop(bucket, None) or _Graph(self._compute, bucket, self._device)
        self._graphs[bucket] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        return graph

    def _interpret(self, packed: IntArray, bucket: Bucket) -> Any:
        import torch

        with torch.inference_mode():
            return self._compute(torch.from_numpy(packed), bucket).numpy()

    def _compute(self, whole: Any, bucket: Bucket) -> Any:
        """From the packed batch to what the task reads: scores or vectors, of rows or of tokens."""
        batch, starts = unpack(whole, bucket)
        is_few = bucket.tokens <= self._encoder.few_tokens
        hidden = self._encoder.few(batch) if is_few else self._encoder.many(batch)
        return self._pooled(hidden, starts) if self._about.pooling else self._scored(hidden, starts)

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


def _parts(lengths: IntArray) -> list[IntArray]:
    """Rows in their order, as many at a time as may run at once."""
    parts: list[list[int]] = [[]]
    tokens = 0
    for row, length in enumerate(lengths.tolist()):
        if parts[-1] and tokens + length > _MOST_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(row)
        tokens += length
    return [np.array(rows) for rows in parts]


def _named(results: IntArray, batch: Batch, signature: Signature) -> dict[str, Any]:
    """Without what the bucket had room for; where there are several outputs, each is a column."""
    count = batch.tokens if signature.outputs[0].is_per_token else len(batch)
    found = results[:count]
    if len(signature.outputs) == 1:
        return {signature.outputs[0].name: found.copy()}
    return {spec.name: found[:, place].copy() for place, spec in enumerate(signature.outputs)}


def pack(batch: Batch, bucket: Bucket, first_place: int) -> IntArray:
    """All that a batch is, in one array, so that one copy takes it to the device; `unpack` finds the parts."""
    from hasten.kernels.attention import tiles
    from hasten.kernels.encoder import TILE

    lengths, tokens, room = batch.lengths, batch.tokens, bucket.tokens
    ends = np.cumsum(lengths)
    whole = np.zeros(sum(_sizes(bucket)), np.int32)
    ids, places, kinds, sequence, starts, work = np.split(whole, np.cumsum(_sizes(bucket))[:-1])
    ids[:tokens] = batch.values["input_ids"]
    places[:tokens] = np.arange(tokens) - np.repeat(ends - lengths, lengths) + first_place
    if "token_type_ids" in batch.values:
        kinds[:tokens] = batch.values["token_type_ids"]
    sequence[:tokens] = np.repeat(np.arange(len(batch)), lengths)
    sequence[tokens:room] = -1
    starts[1 : len(batch) + 1] = ends
    starts[len(batch) + 1 :] = tokens
    found = tiles(lengths, TILE)
    work[: found.size] = found.ravel()
    return whole


def unpack(whole: Any, bucket: Bucket) -> tuple[Packed, Any]:
    from hasten.kernels.encoder import Packed

    ids, places, kinds, sequence, starts, work = whole.split(_sizes(bucket))
    return Packed(ids, places, kinds, sequence, work.view(-1, 3)), starts


def _sizes(bucket: Bucket) -> list[int]:
    from hasten.kernels.encoder import TILE

    tiles = bucket.tokens // TILE + bucket.sequences
    return [bucket.tokens] * 4 + [bucket.sequences + 1, 3 * tiles]


class _Device:
    """What the buckets of a session share: a stream, with the libraries' workspaces, and memory."""

    def __init__(self) -> None:
        import torch

        self.stream = torch.cuda.Stream()
        self.pool: Any = None


class _Graph:
    """One bucket: a place for the batch on both sides, what is computed from it, and a place for what comes back."""

    def __init__(self, compute: Callable[[Any, Bucket], Any], bucket: Bucket, device: _Device) -> None:
        import torch

        here = torch.zeros(sum(_sizes(bucket)), dtype=torch.int32, pin_memory=True)
        there = torch.zeros_like(here, device=CUDA)
        with torch.inference_mode(), torch.cuda.stream(device.stream):
            # Kernels are compiled and libraries make their workspaces, which no graph may hold.
            for _ in range(2):
                result = compute(there, bucket)
            device.stream.synchronize()
            back = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            self._graph = torch.cuda.CUDAGraph()
            # cuBLAS's workspace must be the graph's own: others may give back the one there is (torch.compile does).
            torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.graph(self._graph, pool=device.pool, stream=device.stream):
                there.copy_(here, non_blocking=True)
                back.copy_(compute(there, bucket), non_blocking=True)
            torch._C._cuda_clearCublasWorkspaces()
        device.pool = self._graph.pool()
        self._stream, self._there = device.stream, there
        self._here, self._back = here.numpy(), back.numpy()

    def __call__(self, packed: IntArray) -> Any:
        import torch

        self._here[:] = packed
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()
        return self._back


BACKEND = Fused()
