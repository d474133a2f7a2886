"""Export encoder-decoder models (T5, BART, Marian) as two graphs.

The encoder's graph returns the cross-attention keys and values of each decoder layer; only it holds their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hasten.backends import DECODER, ENCODER
from hasten.backends.onnxruntime.decoder import DECODER_START_TOKEN_IDS
from hasten.builder.export import decoder
from hasten.builder.export.contrib_ops import AttentionConfig, FullAttention
from hasten.builder.export.relative_bias import bidirectional_bias, relative_bias
from hasten.builder.sources.quiet import first_line, quiet_libraries
from hasten.core.errors import HastenError, UnsupportedError
from hasten.onnx_graph import write_merged

# Prompt tokens of the example.
_PROMPT_TOKENS = 5


def export_encoder_decoder(model: Any, folder: Path, starts: Sequence[int], limits: tuple[int, int]) -> dict[str, Path]:
    """Export both graphs, with shared weights stored once; `limits` are the maximum prompt and output tokens."""
    max_prompt_tokens, max_output_tokens = limits
    _extend_positions(model, max(limits))
    encoder, ids = _Encoder(model, max_prompt_tokens).eval(), torch.ones(1, _PROMPT_TOKENS, dtype=torch.int32)
    try:
        with quiet_libraries(), torch.inference_mode():
            cross_cache = encoder(ids)
    except HastenError:
        raise
    except Exception as error:  # a model may raise anything
        raise UnsupportedError(
            f"{type(model).__name__} cannot be traced: {first_line(error)}", hint=decoder.SUPPORTED_ARCHITECTURES
        ) from error
    names = decoder.cache_names(len(cross_cache) // 2)
    cross, past, present = ([name.format(kind) for name in names] for kind in ("cross", "past", "present"))
    axes = {**decoder.DYNAMIC_AXES, **{name: {0: "rows", 2: "read"} for name in cross}}
    encoder_graph = decoder.export_module(encoder, (ids,), (["input_ids"], cross), axes)
    heads, width = cross_cache[0].shape[1], cross_cache[0].shape[3]
    feeds = (
        *decoder.example_inputs(),
        torch.tensor([_PROMPT_TOKENS, _PROMPT_TOKENS - 1], dtype=torch.int32),
        *(torch.zeros(2, heads, decoder.EXAMPLE_CAPACITY, width) for _ in past),
        *(torch.zeros(2, heads, _PROMPT_TOKENS, width) for _ in cross),
    )
    axes |= {name: {0: "rows", 2: "capacity"} for name in (*past, *present)}
    axes["cross_lengths"] = {0: "rows"}
    inputs = [*decoder.INPUT_NAMES, "cross_lengths", *past, *cross]
    decoder_graph = decoder.export_module(
        _Decoder(model, max_output_tokens).eval(), feeds, (inputs, ["logits", *present]), axes
    )
    decoder_graph.metadata_props.add(key=DECODER_START_TOKEN_IDS, value=",".join(map(str, starts)))
    graphs = {DECODER: folder / f"{DECODER}.onnx", ENCODER: folder / f"{ENCODER}.onnx"}
    write_merged({graphs[DECODER]: decoder_graph, graphs[ENCODER]: encoder_graph})
    return graphs


class _Encoder(torch.nn.Module):
    """Takes a prompt; returns the cross-attention keys and values of every decoder layer."""

    def __init__(self, model: torch.nn.Module, max_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._max_tokens = max_tokens

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cross_cache: list[torch.Tensor] = []
        with (
            decoder.use_attention(self.model, _attend_to_all),
            relative_bias(self.model, partial(_distances, self._max_tokens), bidirectional_bias),
        ):
            encoded = self.model.get_encoder()(input_ids=input_ids)
            # The decoder runs only to compute keys and values; the rest is unused and not in the graph.
            start, cache = torch.ones(1, 1, dtype=torch.int32), _TracedCache(cross_cache, ())
            self.model(decoder_input_ids=start, encoder_outputs=encoded, past_key_values=cache, use_cache=True)
        if not cross_cache:
            raise UnsupportedError(
                f"{type(self.model).__name__} does not cache cross-attention keys and values, as T5 and BART do"
            )
        return tuple(cross_cache)


class _Decoder(torch.nn.Module):
    """`decoder.ExportableDecoder` with the cross-attention keys and values as further inputs."""

    def __init__(self, model: torch.nn.Module, max_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._max_tokens = max_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        seqlens_k: torch.Tensor,
        total_sequence_length: torch.Tensor,
        cross_lengths: torch.Tensor,
        *caches: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        half = len(caches) // 2
        past, cross = decoder.cache_pairs(caches[:half]), decoder.cache_pairs(caches[half:])
        trace = decoder.Trace(past, seqlens_k, total_sequence_length, None, cross, cross_lengths)
        positions = decoder.position_ids(input_ids, seqlens_k)

        def causal(table: torch.Tensor, *_: Any) -> torch.Tensor:
            keys = torch.arange(total_sequence_length, dtype=torch.int32)
            # No clamp: ONNX Runtime's GPU kernels support only Max and Min for int32.
            first, last = (torch.tensor(index, dtype=torch.int32) for index in (0, table.shape[0] - 1))
            distances = (positions[:, :, None] - keys[None, None]).maximum(first).minimum(last)
            return torch.nn.functional.embedding(distances, table).permute(0, 3, 1, 2)

        # Only its size is used: the encoder's output is in the cache.
        encoded = BaseModelOutput(last_hidden_state=torch.zeros(1, 1, self.model.config.d_model))
        with (
            decoder.use_attention(self.model, trace.attend),
            decoder.last_position_only(self.model),
            _position_embeddings(self.model, positions),
            relative_bias(self.model, partial(_distances, self._max_tokens), causal),
        ):
            logits = self.model(
                decoder_input_ids=input_ids,
                encoder_outputs=encoded,
                past_key_values=_TracedCache([], trace.cross),
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
    """Attend without a mask: the encoder runs one prompt at a time."""
    heads, width = query.shape[1], query.shape[-1]
    config = AttentionConfig(heads, heads, float(scaling if scaling is not None else width**-0.5))
    result = FullAttention.apply(
        decoder.merge_heads(query), decoder.merge_heads(key), decoder.merge_heads(value), None, position_bias, config
    )
    return result.view(*result.shape[:2], heads, width), None


class _RecordingCache(Cache):
    """Returns keys and values unchanged, and appends them to a list."""

    def __init__(self, recorded: list[torch.Tensor]) -> None:
        super().__init__(layers=[])
        self._recorded = recorded

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._recorded += [key_states, value_states]
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


class _TracedCache(EncoderDecoderCache):
    """Caches no self-attention; cross-attention keys and values are `known`, or recorded in `cross`."""

    def __init__(self, cross: list[torch.Tensor], known: Sequence[decoder.KeyValue]) -> None:
        self.self_attention_cache = _RecordingCache([])
        self.cross_attention_cache = _RecordingCache(cross)
        self.cross_attention_cache.layers = [SimpleNamespace(keys=key, values=value) for key, value in known]
        self.is_updated = dict.fromkeys(range(len(known)), True)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def _position_embeddings(model: Any, positions: torch.Tensor) -> AbstractContextManager[None]:
    """Give each decoder row its own positions, if the decoder has a position table."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    if table is None:
        return nullcontext()
    if hasattr(table, "make_weights"):
        return decoder.replaced_attribute([table], "forward", partial(_positions_after_padding, table, positions))
    if not hasattr(table, "weight"):
        raise UnsupportedError(
            f"{type(model).__name__} has unsupported position embeddings", hint=decoder.SUPPORTED_ARCHITECTURES
        )
    offset = getattr(table, "offset", 0)
    embed = torch.nn.functional.embedding
    return decoder.replaced_attribute([table], "forward", lambda *_, **__: embed(positions + offset, table.weight))


def _positions_after_padding(table: Any, positions: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the position embeddings of M2M100, which count from the padding id; padding has a position of its own."""
    indices = torch.where(ids == table.padding_idx, table.padding_idx, positions + table.padding_idx + 1)
    return torch.nn.functional.embedding(indices, table.weights)


def _extend_positions(model: Any, max_tokens: int) -> None:
    """Compute all rows of M2M100's position tables, which otherwise grow with the texts they have seen."""
    for table in (part for part in model.modules() if hasattr(part, "make_weights")):
        rows = table.padding_idx + 1 + max_tokens
        if rows > table.weights.shape[0]:
            table.make_weights(rows, table.embedding_dim, table.padding_idx)


def _distances(max_tokens: int, part: Any) -> torch.Tensor:
    """Return the distances between an attention's tokens: of a decoder, those of earlier keys."""
    return -torch.arange(max_tokens) if part.is_decoder else torch.arange(1 - max_tokens, max_tokens)
