"""Models whose encoder reads and whose decoder writes, as two graphs: T5, BART, Marian.

The encoder's graph gives the keys and values that each layer of the decoder attends to: their weights are in it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hasten.backends import DECODER, ENCODER
from hasten.backends.onnxruntime.decoder import START_IDS
from hasten.builder.decoder import (
    AXES,
    EXAMPLE,
    KNOWN,
    Pair,
    Trace,
    attention,
    cache_names,
    example,
    export_module,
    flat,
    last_alone,
    pairs,
    places,
)
from hasten.builder.libraries import first_line, quiet_libraries
from hasten.builder.operators import About, FullAttention
from hasten.core.errors import HastenError, UnsupportedError
from hasten.graph import write_together

# Tokens that the example reads.
_READ = 5


def export_encoder_decoder(model: Any, folder: Path, starts: Sequence[int], limits: tuple[int, int]) -> dict[str, Path]:
    """Both graphs, what both hold stored once; `limits` are the tokens that may be read and written."""
    reads, writes = limits
    encoder, ids = _Encoder(model, reads).eval(), torch.ones(1, _READ, dtype=torch.int32)
    try:
        with quiet_libraries(), torch.inference_mode():
            crossed = encoder(ids)
    except HastenError:
        raise
    except Exception as error:  # a model raises what its author chose to
        raise UnsupportedError(f"{type(model).__name__} cannot be traced: {first_line(error)}", hint=KNOWN) from error
    names = cache_names(len(crossed) // 2)
    crosses, past, present = ([name.format(kind) for name in names] for kind in ("cross", "past", "present"))
    axes = {**AXES, **{name: {0: "rows", 2: "read"} for name in crosses}}
    reading = export_module(encoder, (ids,), (["input_ids"], crosses), axes)
    heads, width = crossed[0].shape[1], crossed[0].shape[3]
    feeds = (
        *example(),
        torch.tensor([_READ, _READ - 1], dtype=torch.int32),
        *(torch.zeros(2, heads, 7, width) for _ in past),
        *(torch.zeros(2, heads, _READ, width) for _ in crosses),
    )
    axes |= {name: {0: "rows", 2: "capacity"} for name in (*past, *present)}
    axes["cross_lengths"] = {0: "rows"}
    inputs = [*EXAMPLE, "cross_lengths", *past, *crosses]
    writing = export_module(_Decoder(model, writes).eval(), feeds, (inputs, ["logits", *present]), axes)
    told = writing.metadata_props.add()
    told.key, told.value = START_IDS, ",".join(map(str, starts))
    graphs = {DECODER: folder / f"{DECODER}.onnx", ENCODER: folder / f"{ENCODER}.onnx"}
    write_together({graphs[DECODER]: writing, graphs[ENCODER]: reading})
    return graphs


class _Encoder(torch.nn.Module):
    """A prompt in; the keys and values that it is for every layer of the decoder, out."""

    def __init__(self, model: torch.nn.Module, limit: int) -> None:
        super().__init__()
        self.model = model
        self._limit = limit

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        crossed: list[torch.Tensor] = []
        with attention(self.model, _attend_to_all), _relative_bias(self.model, self._limit, _both_ways):
            read = self.model.get_encoder()(input_ids=input_ids)
            # What the decoder computes from here on nobody reads, and it is not in the graph.
            start = torch.ones(1, 1, dtype=torch.int32)
            self.model(
                decoder_input_ids=start, encoder_outputs=read, past_key_values=_Caches(crossed, ()), use_cache=True
            )
        if not crossed:
            raise UnsupportedError(
                f"{type(self.model).__name__} does not keep what its encoder read, as T5 and BART do"
            )
        return tuple(crossed)


class _Decoder(torch.nn.Module):
    """As `decoder.Decoder`, with what the encoder read beside the caches."""

    def __init__(self, model: torch.nn.Module, limit: int) -> None:
        super().__init__()
        self.model = model
        self._limit = limit

    def forward(
        self,
        input_ids: torch.Tensor,
        seqlens_k: torch.Tensor,
        longest: torch.Tensor,
        cross_lengths: torch.Tensor,
        *caches: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        half = len(caches) // 2
        trace = Trace(pairs(caches[:half]), seqlens_k, longest, None, pairs(caches[half:]), cross_lengths)
        positions = places(input_ids, seqlens_k)

        def backwards(table: torch.Tensor, *_: Any) -> torch.Tensor:
            keys = torch.arange(longest, dtype=torch.int32)
            # No clamp: of int32, ONNX Runtime's GPU kernels know the larger and the smaller of two alone.
            first, last = (torch.tensor(place, dtype=torch.int32) for place in (0, table.shape[0] - 1))
            distances = (positions[:, :, None] - keys[None, None]).maximum(first).minimum(last)
            return torch.nn.functional.embedding(distances, table).permute(0, 3, 1, 2)

        # Asked for its size alone: what was read is in the caches.
        read = BaseModelOutput(last_hidden_state=torch.zeros(1, 1, self.model.config.d_model))
        with (
            attention(self.model, trace.attend),
            last_alone(self.model),
            _positions(self.model, positions),
            _relative_bias(self.model, self._limit, backwards),
        ):
            logits = self.model(
                decoder_input_ids=input_ids,
                encoder_outputs=read,
                past_key_values=_Caches([], trace.cross),
                use_cache=True,
            ).logits
        trace.check(self.model)
        return logits[:, 0], *trace.present


def _attend_to_all(
    _: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    __: torch.Tensor | None,
    *,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **___: object,
) -> tuple[torch.Tensor, None]:
    """As in `Trace`: a prompt comes alone, so that there is nothing to mask."""
    heads, width = query.shape[1], query.shape[-1]
    about = About(heads, heads, float(scaling if scaling is not None else width**-0.5))
    result = FullAttention.apply(flat(query), flat(key), flat(value), None, position_bias, about)
    return result.view(*result.shape[:2], heads, width), None


class _Kept(Cache):
    """Hands keys and values on as they come, and remembers them."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__(layers=[])
        self._kept = kept

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._kept += [key_states, value_states]
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


class _Caches(EncoderDecoderCache):
    """Of the decoder's own words nothing is kept here; what the encoder read is known, or goes into a list."""

    def __init__(self, crossed: list[torch.Tensor], known: Sequence[Pair]) -> None:
        self.self_attention_cache = _Kept([])
        self.cross_attention_cache = _Kept(crossed)
        self.cross_attention_cache.layers = [SimpleNamespace(keys=key, values=value) for key, value in known]
        self.is_updated = dict.fromkeys(range(len(known)), True)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def _both_ways(table: torch.Tensor, queries: Any, keys: Any) -> torch.Tensor:
    """Of each key from each query, before it or after it."""
    distances = torch.arange(keys)[None] - torch.arange(queries)[:, None] + table.shape[0] // 2
    return torch.nn.functional.embedding(distances, table).permute(2, 0, 1)[None]


@contextmanager
def _positions(model: Any, positions: torch.Tensor) -> Iterator[None]:
    """Each row of the decoder has its own, where it has a table of them."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    if table is None:
        yield
        return
    if not hasattr(table, "weight"):
        raise UnsupportedError(f"{type(model).__name__} makes its positions in a way of its own", hint=KNOWN)
    offset = getattr(table, "offset", 0)
    table.forward = lambda *_, **__: torch.nn.functional.embedding(positions + offset, table.weight)
    try:
        yield
    finally:
        del table.forward


@contextmanager
def _relative_bias(model: Any, limit: int, made: Callable[..., torch.Tensor]) -> Iterator[None]:
    """T5's bias from a table by distance: found by logarithms, it may fall into another bucket in another runtime."""
    parts = [part for part in model.modules() if getattr(part, "has_relative_attention_bias", False)]
    for part in parts:
        distances = torch.arange(limit) if part.is_decoder else torch.arange(1 - limit, limit)
        buckets = part._relative_position_bucket(
            -distances if part.is_decoder else distances,
            bidirectional=not part.is_decoder,
            num_buckets=part.relative_attention_num_buckets,
            max_distance=part.relative_attention_max_distance,
        )
        table = part.relative_attention_bias.weight.detach()[buckets]
        part.compute_bias = lambda queries, keys, *_, table=table, **__: made(table, queries, keys)
    try:
        yield
    finally:
        for part in parts:
            del part.compute_bias
