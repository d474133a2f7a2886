"""Session of the `fused` backend: packs a batch, replays the CUDA graph of its bucket, and unpacks the results."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hasten.backends import Artifact, Session
from hasten.core.errors import HastenError, StageError
from hasten.core.gpu.capture_lock import capture_lock
from hasten.core.gpu.padded_buckets import check_ids, check_lengths
from hasten.core.tensors import MASKS, Batch, FloatArray, IntArray, Layout, Outputs, SessionSpec, gather
from hasten.core.variant import Precision

if TYPE_CHECKING:
    from hasten.kernels.cuda.packed_buckets import Bucket
    from hasten.kernels.cuda.replay import Fill, GraphReplay
    from hasten.kernels.encoder import Encoder, Geometry, PackedBatch
    from hasten.kernels.gemm.cublaslt import CublasLtGemms

CUDA = "cuda"
METADATA_FILE = "fused.json"
DTYPES = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# Precisions of the GEMMs; everything else stays in half precision.
LOW_PRECISION = {Precision.FP8: "float8_e4m3fn", Precision.INT8: "int8"}
# The columns of a batch: their names in messages, and their embedding tables.
_TABLES = {"input_ids": ("token", "word_embeddings"), "token_type_ids": ("token type", "token_type_embeddings")}
_CLS, _LAST = "cls", "lasttoken"
# Parts of a large batch that are in flight at once.
_SLOTS = 2
# A part may run in a prepared bucket of up to this many times its tokens: parts differ a little in size, and a capture
# takes as long as many of them.
_MAX_PART_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class FusedMetadata:
    """The contents of fused.json: everything but the weights."""

    geometry: Geometry
    # The layers and activations of the head, by their names in the file, and the pooling before them.
    head: tuple[str, ...]
    pooling: tuple[str, ...]
    normalize: bool
    # Whether fp8 GEMMs accumulate in the tensor cores, with fewer bits than fp32.
    fast_accum: bool = False


def read_metadata(artifact: Artifact) -> FusedMetadata:
    """Read fused.json."""
    from hasten.kernels.encoder import Geometry

    try:
        # Geometry is imported late, so msgspec cannot resolve the annotation of FusedMetadata.
        raw = msgspec.json.decode((artifact.directory / METADATA_FILE).read_bytes())
        geometry = msgspec.convert(raw.pop("geometry"), Geometry)
        fast_accum = bool(raw.get("fast_accum", False))
        return FusedMetadata(geometry, tuple(raw["head"]), tuple(raw["pooling"]), raw["normalize"], fast_accum)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StageError(f"{artifact.variant} cannot be loaded: {METADATA_FILE}: {error}") from error


@dataclass(frozen=True, slots=True)
class PipelineSlot:
    """The stream, graphs and workspaces of one batch in flight; slots share the weights."""

    encoder: Encoder
    cublaslt: CublasLtGemms | None
    replay: GraphReplay
    is_tuned: bool

    def close(self) -> None:
        """Free the graphs and the cuBLASLt handle."""
        self.replay.clear()
        if self.cublaslt is not None:
            self.cublaslt.close()


class FusedSession(Session):
    """A loaded model. Not thread-safe. On the CPU, for tests, it runs through Triton's interpreter.

    `prunes` restricts the last layer to the tokens whose states are read.
    """

    def __init__(
        self,
        metadata: FusedMetadata,
        weights: Mapping[str, Any],
        artifact: Artifact,
        *,
        device: str,
        use_pdl: bool,
        prunes: bool = True,
    ) -> None:
        self._metadata, self._weights, self.prunes = metadata, weights, prunes
        self._device, self._use_pdl, self._directory = device, use_pdl, artifact.directory
        self._slots = [self._new_slot()]
        self.spec = SessionSpec(artifact.signature, Layout.PACKED, artifact.variant.device, _precision(weights).value)
        self._is_closed = False
        self.uses_larger_buckets = False
        self._picks_masks = MASKS in artifact.signature.outputs[0].shape
        # Cached, since asking a tensor for its length is slow and every batch needs it.
        self._table_rows = {
            column: (name, len(weights[table])) for column, (name, table) in _TABLES.items() if table in weights
        }

    def run(self, batch: Batch) -> Outputs:
        parts = self._parts(batch)
        if len(parts) > 1:
            (outputs,) = self.run_many([batch])
            return outputs
        with translate_torch_errors(f"a batch of {len(batch)} failed"):
            return self._outputs(self.slot.replay(*self._bucket_and_fill(batch, self.slot.replay)), batch)

    def run_many(self, batches: Iterable[Batch]) -> Generator[Outputs, None, None]:
        """Yield the outputs of each batch, in order, with two parts of them in flight across all batches."""
        signature = self.spec.signature
        running: deque[tuple[Batch, Sequence[IntArray]]] = deque()

        def split() -> Iterator[tuple[Batch, int]]:
            for batch in batches:
                parts = self._parts(batch)
                running.append((batch, parts))
                for rows in parts:
                    yield batch if len(parts) == 1 else batch.take(rows), len(batch)

        finished: list[Outputs] = []
        with closing(self._run_parts(split())) as results:
            for outputs in results:
                finished.append(outputs)
                batch, parts = running[0]
                if len(finished) == len(parts):
                    running.popleft()
                    yield outputs if len(parts) == 1 else gather(zip(parts, finished, strict=True), batch, signature)
                    finished = []

    def tune(self, directory: Path | None = None) -> None:
        """Tune for all bucket sizes, and write the results to the directory or to the cache."""
        from hasten.kernels.tuning import FILE, cache_file, tune

        encoder, cublaslt = self.slot.encoder, self.slot.cublaslt
        assert cublaslt is not None
        file = cache_file(encoder, cublaslt) if directory is None else directory / FILE
        with translate_torch_errors("tuning failed"):
            tune(encoder, cublaslt).write(file)

    @property
    def max_batch_tokens(self) -> int:
        from hasten.kernels.packing import MAX_TOKENS

        return MAX_TOKENS

    def rounded(self, tokens: int) -> int:
        from hasten.kernels.cuda.packed_buckets import Bucket

        return Bucket.of(tokens, 1).tokens

    def samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        from hasten.kernels.cuda.replay import MAX_GRAPHS
        from hasten.kernels.warmup_batches import samples

        return samples(tokens, rows, self.spec.signature)[:MAX_GRAPHS]

    def covering_samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        from hasten.kernels.warmup_batches import covering_samples

        return covering_samples(tokens, rows, self.spec.signature)

    def prepare(self, batch: Batch) -> None:
        uses_larger_buckets, self.uses_larger_buckets = self.uses_larger_buckets, False
        try:
            self.run(batch)
        finally:
            self.uses_larger_buckets = uses_larger_buckets

    def close(self) -> None:
        """Free the GPU memory now: the garbage collector does not know about it."""
        if self._is_closed:
            return
        self._is_closed = True
        with capture_lock.shared():
            for slot in self._slots:
                slot.close()
            self._weights, self._slots = {}, []

    @property
    def slot(self) -> PipelineSlot:
        """Return the slot of batches that run at once."""
        return self._slots[0]

    def _parts(self, batch: Batch) -> Sequence[IntArray]:
        """Check a batch, and return the rows of each of its parts."""
        from hasten.kernels.packing import MAX_PICKED, MAX_TOKENS, PART_TOKENS, split_rows

        if self._is_closed:
            raise StageError("the session is closed")
        signature, tokens = self.spec.signature, batch.tokens
        check_lengths(batch, signature)
        for column, (name, count) in self._table_rows.items():
            if column in batch.values:
                check_ids(name, batch.values[column], count)
        masks = signature.counts(signature.outputs[0], batch) if self._picks_masks else None
        fits = tokens <= MAX_TOKENS and (masks is None or int(masks.sum()) <= MAX_PICKED)
        if fits or len(batch) == 1:
            return [np.arange(len(batch))]
        # Of equal size, with room for an average row: each further bucket would need a CUDA graph of its own.
        part_tokens = tokens // -(-tokens // PART_TOKENS) + tokens // len(batch)
        return split_rows(batch.lengths, min(PART_TOKENS, part_tokens), masks)

    def _run_parts(self, parts: Iterable[tuple[Batch, int]]) -> Generator[Outputs, None, None]:
        """Run parts concurrently: one fills the gaps of another, and the host packs and reads meanwhile.

        Each comes with the number of rows of its whole batch, for messages.
        """
        while len(self._slots) < _SLOTS:
            with capture_lock.shared():
                self._slots.append(self._new_slot())
        in_flight: deque[tuple[PipelineSlot, Batch, int]] = deque()

        def finish_first() -> Outputs:
            slot, part, rows = in_flight.popleft()
            with translate_torch_errors(f"a batch of {rows} failed"):
                return self._outputs(slot.replay.finish(), part)

        try:
            for (part, rows), slot in zip(parts, cycle(self._slots), strict=False):
                if len(in_flight) == _SLOTS:
                    yield finish_first()
                with translate_torch_errors(f"a batch of {rows} failed"):
                    slot.replay.start(*self._bucket_and_fill(part, slot.replay, _MAX_PART_GROWTH))
                in_flight.append((slot, part, rows))
            while in_flight:
                yield finish_first()
        finally:
            # After an error, wait until no slot uses the buffers that the next batch is packed into.
            for slot, _, _ in in_flight:
                slot.replay.finish()

    def _new_slot(self) -> PipelineSlot:
        import torch

        from hasten.kernels.cuda.replay import GraphReplay
        from hasten.kernels.encoder import Encoder
        from hasten.kernels.gemm.cublaslt import CublasLtGemms
        from hasten.kernels.ops.pdl import shared_bytes
        from hasten.kernels.tuning import find

        weights, is_gpu = self._weights, self._device == CUDA
        dtype, fast_accum = weights["word_embeddings"].dtype, self._metadata.fast_accum
        cublaslt = CublasLtGemms(dtype, fast_accum=fast_accum) if is_gpu else None
        encoder = Encoder(
            self._metadata.geometry,
            weights,
            use_pdl=self._use_pdl,
            cublaslt=cublaslt,
            shared_bytes=shared_bytes(torch.cuda.current_device()) if is_gpu else None,
        )
        tuning = find(encoder, cublaslt, self._directory) if cublaslt is not None else None
        if cublaslt is not None and tuning is not None:
            tuning.apply(encoder, cublaslt)
        replay = GraphReplay(partial(self._compute, encoder), self._device)
        return PipelineSlot(encoder, cublaslt, replay, is_tuned=tuning is not None)

    def _bucket_and_fill(
        self, batch: Batch, replay: GraphReplay, max_growth: float | None = None
    ) -> tuple[Bucket, Fill]:
        from hasten.kernels.cuda.packed_buckets import Bucket
        from hasten.kernels.packing import pack, row_positions

        masks = None
        if self._picks_masks:
            masks = np.flatnonzero(batch.values["input_ids"] == self.spec.signature.mask_id)
        bucket = Bucket.of(batch.tokens, len(batch), None if masks is None else len(masks))
        if self.uses_larger_buckets:
            max_growth = math.inf
        if max_growth is not None:
            bucket = replay.smallest_holding(bucket, max_growth)
        offset = self._metadata.geometry.position_offset
        positions = row_positions(batch, offset)
        fill = partial(pack, batch=batch, bucket=bucket, position_offset=offset, positions=positions, picked=masks)
        return bucket, fill

    def _outputs(self, results: FloatArray, batch: Batch) -> Outputs:
        """Drop the unused rows of the bucket; with several outputs, each is a column."""
        signature = self.spec.signature
        rows = results[: signature.count(signature.outputs[0], batch)]
        if len(signature.outputs) == 1:
            return {signature.outputs[0].name: rows.copy()}
        return {spec.name: rows[:, index].copy() for index, spec in enumerate(signature.outputs)}

    def _compute(self, encoder: Encoder, buffer: Any, bucket: Bucket) -> Any:
        """Compute the outputs of the task, scores or vectors, per row, per token or per mask."""
        import torch

        from hasten.kernels.packing import unpack
        from hasten.kernels.task_head import run_layers

        batch = unpack(buffer, bucket)
        rows = self._rows(buffer, bucket, batch)
        if rows is not None and self.prunes and bucket.tokens > encoder.small_batch_max_tokens:
            hidden, rows = encoder.large_batch(batch, rows), None
        else:
            hidden = encoder(batch)
            if rows is None and self._metadata.pooling:
                hidden = self._pooled(hidden, batch.starts)
        answers = run_layers(hidden, rows, self._metadata.head, self._weights, self._metadata.geometry.eps).float()
        return torch.nn.functional.normalize(answers, dim=-1) if self._metadata.normalize else answers

    def _rows(self, buffer: Any, bucket: Bucket, batch: PackedBatch) -> Any | None:
        """Return the tokens whose states are read, or None for all."""
        from hasten.kernels.packing import picked_rows

        metadata = self._metadata
        if self._picks_masks:
            return picked_rows(buffer, bucket)
        if metadata.pooling == (_LAST,):
            return (batch.starts[1:] - 1).clamp(min=0)
        if self.spec.signature.outputs[0].is_per_token or metadata.pooling not in ((), (_CLS,)):
            return None
        return batch.starts[:-1]

    def _pooled(self, hidden: Any, starts: Any) -> Any:
        import torch

        from hasten.kernels.ops.pool import pool

        # Unused sequences of the bucket start behind the last token.
        rows = {_CLS: starts[:-1].clamp(max=hidden.shape[0] - 1), _LAST: (starts[1:] - 1).clamp(min=0)}
        kinds = self._metadata.pooling
        vectors = [hidden[rows[kind]].float() if kind in rows else pool(hidden, starts, kind) for kind in kinds]
        return torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0]


def _precision(weights: Mapping[str, Any]) -> Precision:
    """Return the lowest precision among the weights."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    for precision, name in LOW_PRECISION.items():
        if name in dtypes:
            return precision
    precisions = {f"torch.{name}": precision for precision, name in DTYPES.items()} | {"torch.float32": Precision.FP32}
    return precisions[str(weights["word_embeddings"].dtype)]


@contextmanager
def translate_torch_errors(failure: str) -> Iterator[None]:
    """Raise StageError for the exceptions of PyTorch, Triton and cuBLAS, which have no common base class."""
    try:
        yield
    except HastenError:
        raise
    except Exception as error:
        raise StageError(f"{failure}: {str(error).strip() or type(error).__name__}") from error
