"""A session of the fused runtime: batches are packed, computed by a graph of their size, and taken apart again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hasten.backends import Artifact, OpenSession
from hasten.core.buckets import check_ids, check_lengths
from hasten.core.errors import HastenError, StageError
from hasten.core.recording import recording
from hasten.core.tensors import MASKS, Batch, FloatArray, Layout, Outputs, SessionSpec, gather
from hasten.core.variant import Precision

if TYPE_CHECKING:
    from hasten.kernels.encoder import Encoder, Geometry, Packed
    from hasten.kernels.packing import Bucket
    from hasten.kernels.products import Products
    from hasten.kernels.replay import Fill, Replay

CUDA = "cuda"
ABOUT = "fused.json"
DTYPES = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
# What products are computed in, where it is not what all else is.
NARROW = {Precision.FP8: "float8_e4m3fn", Precision.INT8: "int8"}
# What the columns of a batch are called, and the tables that they are looked up in.
_TABLES = {"input_ids": ("token", "words"), "token_type_ids": ("token type", "kinds")}
_CLS, _LAST = "cls", "lasttoken"
# For batches of more than runs at once.
LANES = 2


@dataclass(frozen=True, slots=True)
class About:
    """What the file of weights does not say."""

    geometry: Geometry
    # Layers and activations behind the encoder, by their names in the file; and how tokens become rows before them.
    head: tuple[str, ...]
    pooling: tuple[str, ...]
    normalize: bool
    # Whether products of fp8 are added up in fewer bits than fp32.
    sums_fast: bool = False


def read_about(artifact: Artifact) -> About:
    from hasten.kernels.encoder import Geometry

    try:
        # Imported late, so that its name is not known where the types are read.
        raw = msgspec.json.decode((artifact.directory / ABOUT).read_bytes())
        geometry = msgspec.convert(raw.pop("geometry"), Geometry)
        is_fast = bool(raw.get("sums_fast", False))
        return About(geometry, tuple(raw["head"]), tuple(raw["pooling"]), raw["normalize"], is_fast)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StageError(f"{artifact.variant} cannot be loaded: {ABOUT}: {error}") from error


@dataclass(frozen=True, slots=True)
class Lane:
    """What a batch needs for itself on its way over the device; weights are everybody's."""

    encoder: Encoder
    products: Products | None
    replay: Replay
    is_tuned: bool

    def close(self) -> None:
        self.replay.clear()
        if self.products is not None:
            self.products.close()


class FusedSession(OpenSession):
    """One thread's. On the CPU, through Triton's interpreter, it is for tests.

    `prunes`: the last layer is computed for the tokens alone whose states are read.
    """

    def __init__(
        self,
        about: About,
        weights: Mapping[str, Any],
        artifact: Artifact,
        *,
        device: str,
        is_dependent: bool,
        prunes: bool = True,
    ) -> None:
        self._about, self._weights, self.prunes = about, weights, prunes
        self._device, self._is_dependent, self._directory = device, is_dependent, artifact.directory
        self._lanes = [self._lane()]
        self.spec = SessionSpec(artifact.signature, Layout.PACKED, artifact.variant.device, _precision(weights).value)
        self._is_closed = False
        self._is_of_masks = MASKS in artifact.signature.outputs[0].shape
        # Of the tables that ids are looked up in: to ask a tensor takes a while, and every batch would.
        self._table_rows = {
            column: (name, len(weights[table])) for column, (name, table) in _TABLES.items() if table in weights
        }

    def run(self, batch: Batch) -> Outputs:
        from hasten.kernels.packing import MOST_PICKED, MOST_TOKENS, PART_TOKENS, parts

        if self._is_closed:
            raise StageError("the session is closed")
        signature, tokens = self.spec.signature, batch.tokens
        check_lengths(batch, signature)
        for column, (name, count) in self._table_rows.items():
            if column in batch.values:
                check_ids(name, batch.values[column], count)
        masks = signature.counts(signature.outputs[0], batch) if self._is_of_masks else None
        is_few = tokens <= MOST_TOKENS and (masks is None or int(masks.sum()) <= MOST_PICKED)
        with translated(f"a batch of {len(batch)} failed"):
            if is_few or len(batch) == 1:
                return self._outputs(self.lane.replay(*self._packing(batch, tokens)), batch)
            rows = parts(batch.lengths, PART_TOKENS, masks)
            return gather(list(zip(rows, self._in_turn(map(batch.take, rows)), strict=True)), batch, signature)

    def tune(self, folder: Path | None = None) -> None:
        """For all sizes of batches; kept there, or in the cache."""
        from hasten.kernels.tuning import FILE, cached, tune

        encoder, products = self.lane.encoder, self.lane.products
        assert products is not None
        file = cached(encoder, products) if folder is None else folder / FILE
        with translated("its products cannot be timed"):
            tune(encoder, products).write(file)

    @property
    def most_tokens(self) -> int:
        from hasten.kernels.packing import MOST_TOKENS

        return MOST_TOKENS

    def rounded(self, tokens: int) -> int:
        from hasten.kernels.packing import Bucket

        return Bucket.of(tokens, 1).tokens

    def samples(self, tokens: int, rows: int) -> Sequence[Batch]:
        from hasten.kernels.replay import MOST_GRAPHS
        from hasten.kernels.sizes import samples

        return samples(tokens, rows, self.spec.signature)[:MOST_GRAPHS]

    def close(self) -> None:
        """Its memory is the GPU's, of which the garbage collector knows nothing: nothing may be left to that."""
        if self._is_closed:
            return
        self._is_closed = True
        with recording.beside_others():
            for lane in self._lanes:
                lane.close()
            self._weights, self._lanes = {}, []

    @property
    def lane(self) -> Lane:
        """The one for what runs at once."""
        return self._lanes[0]

    def _in_turn(self, batches: Iterator[Batch]) -> Iterator[Outputs]:
        """Several at a time: where one leaves the device idle another is computed, and the host reads and packs."""
        while len(self._lanes) < LANES:
            with recording.beside_others():
                self._lanes.append(self._lane())
        started: deque[tuple[Lane, Batch]] = deque()

        def finished() -> Outputs:
            lane, batch = started.popleft()
            return self._outputs(lane.replay.finish(), batch)

        try:
            for batch, lane in zip(batches, cycle(self._lanes), strict=False):
                if len(started) == LANES:
                    yield finished()
                lane.replay.start(*self._packing(batch, batch.tokens))
                started.append((lane, batch))
            while started:
                yield finished()
        finally:
            # After an error: nobody may be at work where the next batch is packed.
            for lane, _ in started:
                lane.replay.finish()

    def _lane(self) -> Lane:
        import torch

        from hasten.kernels.dependent import shared_bytes
        from hasten.kernels.encoder import Encoder
        from hasten.kernels.products import Products
        from hasten.kernels.replay import Replay
        from hasten.kernels.tuning import find

        weights, is_gpu = self._weights, self._device == CUDA
        products = Products(weights["words"].dtype, sums_fast=self._about.sums_fast) if is_gpu else None
        encoder = Encoder(
            self._about.geometry,
            weights,
            is_dependent=self._is_dependent,
            products=products,
            shared_bytes=shared_bytes(torch.cuda.current_device()) if is_gpu else None,
        )
        tuning = find(encoder, products, self._directory) if products is not None else None
        if products is not None and tuning is not None:
            tuning.apply(encoder, products)
        replay = Replay(partial(self._compute, encoder), self._device, products)
        return Lane(encoder, products, replay, is_tuned=tuning is not None)

    def _packing(self, batch: Batch, tokens: int) -> tuple[Bucket, Fill]:
        from hasten.kernels.packing import Bucket, pack, places_of

        masks = None
        if self._is_of_masks:
            masks = np.flatnonzero(batch.values["input_ids"] == self.spec.signature.mask_id)
        bucket = Bucket.of(tokens, len(batch), None if masks is None else len(masks))
        first = self._about.geometry.first_place
        places = places_of(batch, first)
        return bucket, partial(pack, batch=batch, bucket=bucket, first_place=first, places=places, picked=masks)

    def _outputs(self, results: FloatArray, batch: Batch) -> Outputs:
        """Without what the bucket had room for; where there are several outputs, each is a column."""
        signature = self.spec.signature
        found = results[: signature.count(signature.outputs[0], batch)]
        if len(signature.outputs) == 1:
            return {signature.outputs[0].name: found.copy()}
        return {spec.name: found[:, place].copy() for place, spec in enumerate(signature.outputs)}

    def _compute(self, encoder: Encoder, whole: Any, bucket: Bucket) -> Any:
        """From the packed batch to what the task reads: scores or vectors, of rows, of tokens or of masks."""
        import torch

        from hasten.kernels.layers import through
        from hasten.kernels.packing import unpack

        batch = unpack(whole, bucket)
        rows = self._rows(whole, bucket, batch)
        if rows is not None and self.prunes and bucket.tokens > encoder.few_tokens:
            hidden, rows = encoder.many(batch, rows), None
        else:
            hidden = encoder(batch)
            if rows is None and self._about.pooling:
                hidden = self._pooled(hidden, batch.starts)
        answers = through(hidden, rows, self._about.head, self._weights, self._about.geometry.eps).float()
        return torch.nn.functional.normalize(answers, dim=-1) if self._about.normalize else answers

    def _rows(self, whole: Any, bucket: Bucket, batch: Packed) -> Any | None:
        """The tokens whose states are read; None where all are."""
        from hasten.kernels.packing import picked_of

        about = self._about
        if self._is_of_masks:
            return picked_of(whole, bucket)
        if about.pooling == (_LAST,):
            return (batch.starts[1:] - 1).clamp(min=0)
        if self.spec.signature.outputs[0].is_per_token or about.pooling not in ((), (_CLS,)):
            return None
        return batch.starts[:-1]

    def _pooled(self, hidden: Any, starts: Any) -> Any:
        import torch

        from hasten.kernels.pool import pool

        # A sequence that the bucket has room for, and the batch does not have, begins behind the last token.
        rows = {_CLS: starts[:-1].clamp(max=hidden.shape[0] - 1), _LAST: (starts[1:] - 1).clamp(min=0)}
        kinds = self._about.pooling
        vectors = [hidden[rows[kind]].float() if kind in rows else pool(hidden, starts, kind) for kind in kinds]
        return torch.cat(vectors, dim=1) if len(vectors) > 1 else vectors[0]


def _precision(weights: Mapping[str, Any]) -> Precision:
    """That of the narrowest of the weights that products have."""
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    narrow = next((precision for precision, name in NARROW.items() if name in found), None)
    if narrow is not None:
        return narrow
    halves = {name: precision for precision, name in DTYPES.items()} | {"float32": Precision.FP32}
    return halves[str(weights["words"].dtype).removeprefix("torch.")]


@contextmanager
def translated(failure: str) -> Iterator[None]:
    """PyTorch, Triton and cuBLAS raise classes of their own, which have nothing in common."""
    try:
        yield
    except HastenError:
        raise
    except Exception as error:
        raise StageError(f"{failure}: {str(error).strip() or type(error).__name__}") from error
