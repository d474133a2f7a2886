"""A transformers model that writes as one graph: what was read so far comes in and goes out as keys and values.

Attention is ONNX Runtime's GroupQueryAttention, put in through transformers' own registry of attention functions: rows
of different lengths go together, and keys and values are written in place where past and present share a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hasten.builder.export import IR_VERSION
from hasten.builder.libraries import quiet_libraries
from hasten.builder.operators import About, CausalAttention, FullAttention, Head
from hasten.builder.straighten import straighten
from hasten.core.errors import StageError, UnsupportedError
from hasten.exporter import trace
from hasten.graph import write_graph

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_NAME = "hasten"
# Contrib operators are the same in all; from here on norms over a last axis are one operator.
_OPSET = 17
_ROTATE = "apply_rotary_pos_emb"
# The operator rotates whole eights of a head.
_EIGHT = 8
# Those that were tried (tests/contract/test_generation_build.py); others that attend in the same way may do as well.
KNOWN = (
    "these write: Llama, Qwen2, Qwen3, Mistral, Gemma, Phi, OLMo, Granite, StarCoder2, GPT-NeoX, OPT, GPT-2,"
    " T5, BART, Marian, Pegasus"
)


@dataclass(slots=True)
class Trace:
    """The inputs that every layer shares, and what the layers give back, while the module is traced."""

    past: Sequence[Pair]
    seqlens_k: torch.Tensor
    longest: torch.Tensor
    # Cosines and sines for every position, where rotating is left to the operator.
    tables: Pair | None = None
    # What an encoder read, and how much of it is each row's.
    cross: Sequence[Pair] = ()
    cross_lengths: torch.Tensor | None = None
    present: list[torch.Tensor] = field(default_factory=list)
    crossed: int = 0

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """The signature is transformers'; layers come in their order."""
        if s_aux is not None:
            raise UnsupportedError(f"{type(module).__name__} attends to sinks, which is not written yet", hint=KNOWN)
        heads, width = query.shape[1], query.shape[-1]
        about = About(
            heads=heads,
            kv_heads=key.shape[1],
            scale=float(scaling if scaling is not None else width**-0.5),
            window=int(sliding_window) if sliding_window else -1,
            softcap=float(softcap or 0.0),
            rotates=self.tables is not None,
        )
        if any(key is known for known, _ in self.cross):
            self.crossed += 1
            result = FullAttention.apply(flat(query), key, value, self.cross_lengths, None, about)
        else:
            result, *present = CausalAttention.apply(
                *(flat(tensor) for tensor in (query, key, value)),
                *self.past[len(self.present) // 2],
                self.seqlens_k,
                self.longest,
                *(self.tables or (None, None)),
                position_bias,
                about,
            )
            self.present += present
        return result.view(*result.shape[:2], heads, width), None

    def check(self, model: torch.nn.Module) -> None:
        if len(self.present) != 2 * len(self.past) or self.crossed != len(self.cross):
            raise UnsupportedError(
                f"{type(model).__name__} does not attend through transformers' attention interface in all layers",
                hint=KNOWN,
            )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, heads, tokens, width) → (rows, tokens, heads × width)"""
    heads, width = tensor.shape[1], tensor.shape[-1]
    return tensor.transpose(1, 2).reshape(tensor.shape[0], -1, heads * width)


class Decoder(torch.nn.Module):
    """Ids, lengths and caches in; the logits after each row's last token, and the caches, out."""

    def __init__(self, model: torch.nn.Module, tables: Pair | None) -> None:
        super().__init__()
        self.model = model
        for name, table in zip(("cosines", "sines"), tables or (None, None), strict=True):
            self.register_buffer(name, table)

    def forward(
        self, input_ids: torch.Tensor, seqlens_k: torch.Tensor, longest: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tables = (self.cosines, self.sines) if self.cosines is not None else None
        trace = Trace(pairs(past), seqlens_k, longest, tables)
        with (
            attention(self.model, trace.attend),
            last_alone(self.model),
            _without_rotation(self.model) if tables is not None else nullcontext(),
        ):
            positions = places(input_ids, seqlens_k)
            logits = self.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        trace.check(self.model)
        return logits[:, 0], *trace.present


def pairs(parts: Sequence[torch.Tensor]) -> list[Pair]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def places(input_ids: torch.Tensor, seqlens_k: torch.Tensor) -> torch.Tensor:
    """Of each new token in its row: they are the last ones.

    Counted back from the last: a range takes its ends from the CPU, where sizes are, and on a GPU nothing is copied.
    """
    return seqlens_k[:, None] - torch.arange(input_ids.shape[1] - 1, -1, -1, dtype=torch.int32)[None]


@contextmanager
def attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Ours for a while. A name that no mask is known for is given none: lengths say what may be seen."""
    from transformers import AttentionInterface, PreTrainedModel

    # T5's encoder and decoder have configurations of their own, which older transformers leave as they are.
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    AttentionInterface.register(_NAME, attend)
    for part in parts:
        part.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        for part, name in zip(parts, before, strict=True):
            part.set_attn_implementation(name)


@contextmanager
def last_alone(model: Any) -> Iterator[None]:
    """Logits of the last token alone: of the others, nobody reads them."""
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = Head.apply(hidden[:, -1], head.weight, getattr(head, "bias", None))
        return logits[:, None]

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


@contextmanager
def _without_rotation(model: Any) -> Iterator[None]:
    """The operator rotates queries and keys: the modules that would, do not."""
    found = _rotating(model)
    before = [getattr(place, _ROTATE) for place in found]
    for place in found:
        setattr(place, _ROTATE, lambda query, key, *_, **__: (query, key))
    try:
        yield
    finally:
        for place, function in zip(found, before, strict=True):
            setattr(place, _ROTATE, function)


def _rotating(model: Any) -> list[Any]:
    modules = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(modules) if hasattr(sys.modules[name], _ROTATE)]


def rotation_tables(model: Any, context: int) -> Pair | None:
    """What the operator needs to rotate as this model does, where it may: one table for all layers."""
    makers = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    if len(makers) != 1 or not _rotating(model):
        return None
    try:
        with torch.inference_mode():
            cosines, sines = makers[0](torch.zeros(1, 1, 1), torch.arange(context)[None])
    except TypeError:  # it wants to know more: there is a table for each kind of layer
        return None
    half = cosines.shape[-1] // 2
    return None if half % _EIGHT else (cosines[0, :, :half].clone(), sines[0, :, :half].clone())


def export_decoder(model: Any, file: Path, tables: Pair | None) -> None:
    """Trace two rows of three tokens, one of them with something before."""
    config = model.config.get_text_config(decoder=True)
    names = cache_names(config.num_hidden_layers)
    feeds = (*example(), *(torch.zeros(2, *_cache_shape(config)) for _ in names))
    inputs = [*EXAMPLE, *(name.format("past") for name in names)]
    outputs = ["logits", *(name.format("present") for name in names)]
    axes = {name: {0: "rows", 2: "capacity"} for name in (*inputs[len(EXAMPLE) :], *outputs[1:])}
    made = export_module(Decoder(model, tables).eval(), feeds, (inputs, outputs), {**AXES, **axes})
    write_graph(made, file, external_data=True)


EXAMPLE = ("input_ids", "seqlens_k", "total_sequence_length")
AXES = {"input_ids": {0: "rows", 1: "tokens"}, "seqlens_k": {0: "rows"}, "logits": {0: "rows"}}


def example() -> tuple[torch.Tensor, ...]:
    values = ([[1, 1, 1], [1, 1, 1]], [2, 4], 5)
    return tuple(torch.tensor(value, dtype=torch.int32) for value in values)


def cache_names(layers: int) -> list[str]:
    """Of each layer's keys and values, their kind left out."""
    return [f"{{}}.{layer}.{what}" for layer in range(layers) for what in ("key", "value")]


def export_module(
    module: torch.nn.Module,
    feeds: tuple[Any, ...],
    names: tuple[list[str], list[str]],
    axes: Mapping[str, Mapping[int, str]],
) -> Any:
    """The graph, straightened; `names` are those of inputs and outputs."""
    with quiet_libraries(), torch.inference_mode():
        try:
            feeds_by_name = dict(zip(names[0], feeds, strict=True))
            graph, _ = trace(module, feeds_by_name, names[1], axes, opset=_OPSET, domains={"com.microsoft": 1})
        except StageError as error:
            raise StageError(f"it does not export to ONNX: {error.message}") from error
    graph = straighten(graph)
    graph.ir_version = IR_VERSION
    return graph


def _cache_shape(config: Any) -> tuple[int, int, int]:
    """(heads, capacity of the example, width) of one row."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, 7, width
