"""Export a decoder model of transformers as one graph with the KV cache as inputs and outputs.

Attention is ONNX Runtime's GroupQueryAttention, registered as an attention function of transformers: rows of different
lengths run in one batch, and the KV cache is updated in place where past and present share a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface

from hasten.builder.export.contrib_ops import AttentionConfig, CausalAttention, FullAttention, LMHead
from hasten.builder.export.encoder import IR_VERSION, attention_implementation
from hasten.builder.passes.simplify_decoder import simplify_decoder
from hasten.builder.sources.quiet import quiet_libraries
from hasten.core.errors import StageError, UnsupportedError
from hasten.onnx_export import trace
from hasten.onnx_graph import write_graph

KeyValue: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_ATTENTION_NAME = "hasten"
# Contrib operators do not depend on the opset; from opset 17, LayerNormalization is one operator.
_OPSET = 17
_ROTARY_FUNCTION = "apply_rotary_pos_emb"
# The operator rotates a multiple of eight values of a head.
_ROTARY_MULTIPLE = 8
# Tested in tests/contract/generation/test_build.py; others with the same attention may work.
SUPPORTED_ARCHITECTURES = (
    "supported are Llama, Qwen2, Qwen3, Mistral, Gemma, Phi, OLMo, Granite, StarCoder2, GPT-NeoX, OPT, GPT-2,"
    " T5, BART, Marian, Pegasus, M2M100"
)


@dataclass(slots=True)
class Trace:
    """Inputs shared by all layers, and the outputs collected from them, while the module is traced."""

    past: Sequence[KeyValue]
    seqlens_k: torch.Tensor
    total_sequence_length: torch.Tensor
    # Cosines and sines for every position, if the operator applies the rotary embeddings.
    rotary_tables: KeyValue | None = None
    # Keys and values of the encoder's output, and their number in each row.
    cross: Sequence[KeyValue] = ()
    cross_lengths: torch.Tensor | None = None
    present: list[torch.Tensor] = field(default_factory=list)
    cross_attention_calls: int = 0

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
        """Compute attention with transformers' signature. Layers must be called in order."""
        if s_aux is not None:
            raise UnsupportedError(
                f"{type(module).__name__} uses attention sinks, which are not supported", hint=SUPPORTED_ARCHITECTURES
            )
        heads, width = query.shape[1], query.shape[-1]
        config = AttentionConfig(
            heads=heads,
            kv_heads=key.shape[1],
            scale=float(scaling if scaling is not None else width**-0.5),
            window=int(sliding_window) if sliding_window else -1,
            softcap=float(softcap or 0.0),
            rotates=self.rotary_tables is not None,
        )
        if any(key is cross_key for cross_key, _ in self.cross):
            self.cross_attention_calls += 1
            result = FullAttention.apply(merge_heads(query), key, value, self.cross_lengths, None, config)
        else:
            result, *present = CausalAttention.apply(
                *(merge_heads(tensor) for tensor in (query, key, value)),
                *self.past[len(self.present) // 2],
                self.seqlens_k,
                self.total_sequence_length,
                *(self.rotary_tables or (None, None)),
                position_bias,
                config,
            )
            self.present += present
        return result.view(*result.shape[:2], heads, width), None

    def check(self, model: torch.nn.Module) -> None:
        """Raise unless every layer attended through `attend`."""
        if len(self.present) != 2 * len(self.past) or self.cross_attention_calls != len(self.cross):
            raise UnsupportedError(
                f"{type(model).__name__} does not attend through transformers' attention interface in all layers",
                hint=SUPPORTED_ARCHITECTURES,
            )


def merge_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape (rows, heads, tokens, width) to (rows, tokens, heads × width)."""
    heads, width = tensor.shape[1], tensor.shape[-1]
    return tensor.transpose(1, 2).reshape(tensor.shape[0], -1, heads * width)


class ExportableDecoder(torch.nn.Module):
    """Takes ids, lengths and the KV cache; returns the logits of each row's last token and the KV cache."""

    def __init__(self, model: torch.nn.Module, rotary_tables: KeyValue | None) -> None:
        super().__init__()
        self.model = model
        for name, table in zip(("cosines", "sines"), rotary_tables or (None, None), strict=True):
            self.register_buffer(name, table)

    def forward(
        self, input_ids: torch.Tensor, seqlens_k: torch.Tensor, total_sequence_length: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rotary_tables = (self.cosines, self.sines) if self.cosines is not None else None
        # The operator applies the rotary embeddings.
        rotary_modules = _rotary_modules(self.model) if rotary_tables is not None else []
        trace = Trace(cache_pairs(past), seqlens_k, total_sequence_length, rotary_tables)
        with (
            use_attention(self.model, trace.attend),
            last_position_only(self.model),
            replaced_attribute(rotary_modules, _ROTARY_FUNCTION, lambda query, key, *_, **__: (query, key)),
        ):
            positions = position_ids(input_ids, seqlens_k)
            logits = self.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        trace.check(self.model)
        return logits[:, 0], *trace.present


def cache_pairs(tensors: Sequence[torch.Tensor]) -> list[KeyValue]:
    """Group alternating keys and values by layer."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def position_ids(input_ids: torch.Tensor, seqlens_k: torch.Tensor) -> torch.Tensor:
    """Return the positions of the new tokens, which are the last ones of each row.

    They are counted backwards from the last: a range takes its bounds from the CPU, which holds the sizes, so that
    nothing is copied to or from a GPU.
    """
    return seqlens_k[:, None] - torch.arange(input_ids.shape[1] - 1, -1, -1, dtype=torch.int32)[None]


def use_attention(model: Any, attend: Callable[..., Any]) -> AbstractContextManager[None]:
    """Use an attention function within the context. transformers makes no mask for its name: lengths mask the keys."""
    AttentionInterface.register(_ATTENTION_NAME, attend)
    return attention_implementation(model, _ATTENTION_NAME)


def last_position_only(model: Any) -> AbstractContextManager[None]:
    """Compute the logits of the last token only: the others are not used."""
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = LMHead.apply(hidden[:, -1], head.weight, getattr(head, "bias", None))
        return logits[:, None]

    return replaced_attribute([head], "forward", forward)


@contextmanager
def replaced_attribute(owners: Sequence[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of each object within the context."""
    defaults = [vars(owner).get(name) for owner in owners]
    for owner in owners:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, default in zip(owners, defaults, strict=True):
            if default is None:
                delattr(owner, name)
            else:
                setattr(owner, name, default)


def _rotary_modules(model: Any) -> list[Any]:
    """Return the Python modules of the model's classes that define the rotary embedding function."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules[name], _ROTARY_FUNCTION)]


def rotary_tables(model: Any, context: int) -> KeyValue | None:
    """Return cosines and sines if the operator can apply the rotary embeddings: one table for all layers."""
    embeddings = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    if len(embeddings) != 1 or not _rotary_modules(model):
        return None
    try:
        with torch.inference_mode():
            cosines, sines = embeddings[0](torch.zeros(1, 1, 1), torch.arange(context)[None])
    except TypeError:  # it needs more arguments: each kind of layer has its own table
        return None
    half = cosines.shape[-1] // 2
    return None if half % _ROTARY_MULTIPLE else (cosines[0, :, :half].clone(), sines[0, :, :half].clone())


def export_decoder(model: Any, file: Path, rotary_tables: KeyValue | None) -> None:
    """Export the model as one graph, traced with two rows of three tokens, one of which has a past."""
    config = model.config.get_text_config(decoder=True)
    names = cache_names(config.num_hidden_layers)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    feeds = (*example_inputs(), *(torch.zeros(2, heads, EXAMPLE_CAPACITY, width) for _ in names))
    inputs = [*INPUT_NAMES, *(name.format("past") for name in names)]
    outputs = ["logits", *(name.format("present") for name in names)]
    axes = {name: {0: "rows", 2: "capacity"} for name in (*inputs[len(INPUT_NAMES) :], *outputs[1:])}
    graph = export_module(
        ExportableDecoder(model, rotary_tables).eval(), feeds, (inputs, outputs), {**DYNAMIC_AXES, **axes}
    )
    write_graph(graph, file, external_data=True)


INPUT_NAMES = ("input_ids", "seqlens_k", "total_sequence_length")
# Tokens that the KV cache of the example holds.
EXAMPLE_CAPACITY = 7
DYNAMIC_AXES = {"input_ids": {0: "rows", 1: "tokens"}, "seqlens_k": {0: "rows"}, "logits": {0: "rows"}}


def example_inputs() -> tuple[torch.Tensor, ...]:
    """Return values for the inputs in `INPUT_NAMES`."""
    values = ([[1, 1, 1], [1, 1, 1]], [2, 4], 5)
    return tuple(torch.tensor(value, dtype=torch.int32) for value in values)


def cache_names(layers: int) -> list[str]:
    """Return the names of each layer's keys and values, with a placeholder for past, present or cross."""
    return [f"{{}}.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


def export_module(
    module: torch.nn.Module,
    feeds: tuple[Any, ...],
    names: tuple[list[str], list[str]],
    axes: Mapping[str, Mapping[int, str]],
) -> Any:
    """Trace a module and return its simplified graph; `names` are those of inputs and outputs."""
    with quiet_libraries(), torch.inference_mode():
        try:
            feeds_by_name = dict(zip(names[0], feeds, strict=True))
            graph, _ = trace(module, feeds_by_name, names[1], axes, opset=_OPSET, domains={"com.microsoft": 1})
        except StageError as error:
            raise StageError(f"the model does not export to ONNX: {error.message}") from error
    graph = simplify_decoder(graph)
    graph.ir_version = IR_VERSION
    return graph
