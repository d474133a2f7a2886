"""A transformers model that writes as one graph: what was read so far comes in and goes out as keys and values.

Attention is ONNX Runtime's GroupQueryAttention, put in through transformers' own registry of attention functions: rows
of different lengths go together, and keys and values are written in place where past and present share a buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hasten.builder.export import IR_VERSION, silent_stdout
from hasten.builder.load import first_line, quiet_libraries
from hasten.builder.straighten import straighten
from hasten.core.errors import StageError, UnsupportedError
from hasten.graph import write_graph

_NAME = "hasten"
# Contrib operators are the same in all; from here on norms over a last axis are one operator.
OPSET = 17
_ROTATE = "apply_rotary_pos_emb"
# The operator rotates whole eights of a head.
_ROTATED_EIGHTS = 8
# Those that were tried (tests/contract/test_generation_build.py); others that attend in the same way may do as well.
_KNOWN = "Llama, Qwen2, Qwen3, Mistral, Gemma, Phi, OLMo, Granite, StarCoder2, GPT-NeoX, OPT, GPT-2"


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one attention is told beside queries, keys and values."""

    heads: int
    kv_heads: int
    scale: float
    window: int
    softcap: float
    rotates: bool


@dataclass(slots=True)
class _Trace:
    """The inputs that every layer shares, and what the layers give back, while the module is traced."""

    past: list[tuple[torch.Tensor, torch.Tensor]]
    seqlens_k: torch.Tensor
    longest: torch.Tensor
    # Cosines and sines for every position, where rotating is left to the operator.
    tables: tuple[torch.Tensor, torch.Tensor] | None
    present: list[torch.Tensor] = field(default_factory=list)

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
            raise UnsupportedError(
                f"{type(module).__name__} attends to sinks, which is not written yet", hint=f"these work: {_KNOWN}"
            )
        place = len(self.present) // 2
        heads, width = query.shape[1], query.shape[-1]
        about = _Layer(
            heads=heads,
            kv_heads=key.shape[1],
            scale=float(scaling if scaling is not None else width**-0.5),
            window=int(sliding_window) if sliding_window else -1,
            softcap=float(softcap or 0.0),
            rotates=self.tables is not None,
        )
        result, *present = _Attention.apply(
            *(_flat(tensor) for tensor in (query, key, value)),
            *self.past[place],
            self.seqlens_k,
            self.longest,
            *(self.tables or (None, None)),
            about,
        )
        self.present += present
        return result.view(*result.shape[:2], heads, width), None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, heads, tokens, width) → (rows, tokens, heads × width)"""
    heads, width = tensor.shape[1], tensor.shape[-1]
    return tensor.transpose(1, 2).reshape(tensor.shape[0], -1, heads * width)


class _Attention(torch.autograd.Function):
    """The operator, as the tracing exporter sees it; in PyTorch it has the right shapes and no values."""

    @staticmethod
    def forward(_: Any, query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        past_key, past_value = rest[2:4]
        return torch.zeros_like(query), past_key.clone(), past_value.clone()

    @staticmethod
    def symbolic(g: Any, query: Any, *rest: Any) -> Any:
        *inputs, about = rest
        made = g.op(
            "com.microsoft::GroupQueryAttention",
            query,
            *(value for value in inputs if value is not None and not _is_none(value)),
            outputs=3,
            num_heads_i=about.heads,
            kv_num_heads_i=about.kv_heads,
            scale_f=about.scale,
            local_window_size_i=about.window,
            softcap_f=about.softcap,
            do_rotary_i=int(about.rotates),
        )
        result, *present = made
        result.setType(query.type())
        for value, past in zip(present, inputs[2:4], strict=True):
            value.setType(past.type())
        return made


def _is_none(value: Any) -> bool:
    return bool(value.node().mustBeNone())


class _Head(torch.autograd.Function):
    """A product with the weights as they lie, so that a table of words that is the head too is stored once."""

    @staticmethod
    def forward(_: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, weight, bias)

    @staticmethod
    def symbolic(g: Any, hidden: Any, weight: Any, bias: Any) -> Any:
        inputs = (hidden, weight) if bias is None or _is_none(bias) else (hidden, weight, bias)
        return g.op("Gemm", *inputs, transB_i=1)


class Decoder(torch.nn.Module):
    """Ids, lengths and caches in; the logits after each row's last token, and the caches, out."""

    def __init__(self, model: torch.nn.Module, tables: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        super().__init__()
        self.model = model
        for name, table in zip(("cosines", "sines"), tables or (None, None), strict=True):
            self.register_buffer(name, table)
        self.rotations = 0

    def forward(
        self, input_ids: torch.Tensor, seqlens_k: torch.Tensor, longest: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tables = (self.cosines, self.sines) if self.cosines is not None else None
        trace = _Trace(list(zip(past[::2], past[1::2], strict=True)), seqlens_k, longest, tables)
        tokens = input_ids.shape[1]
        positions = (seqlens_k + (1 - tokens))[:, None] + torch.arange(tokens, dtype=torch.int32)[None]
        with ExitStack() as stack:
            stack.enter_context(_attention(self.model, trace.attend))
            stack.enter_context(_last_alone(self.model))
            if tables is not None:
                stack.enter_context(_without_rotation(self.model))
            logits = self.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
        if len(trace.present) != len(past):
            raise UnsupportedError(
                f"{type(self.model).__name__} does not attend through transformers' attention interface in all layers",
                hint=f"these do: {_KNOWN}",
            )
        return logits[:, 0], *trace.present


@contextmanager
def _attention(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """Ours for a while. A name that no mask is known for is given none: lengths say what may be seen."""
    from transformers import AttentionInterface

    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, attend)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _last_alone(model: Any) -> Iterator[None]:
    """Logits of the last token alone: of the others, nobody reads them."""
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = _Head.apply(hidden[:, -1], head.weight, bias)
        return logits[:, None]

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


@contextmanager
def _without_rotation(model: Any) -> Iterator[None]:
    """The operator rotates queries and keys: the modules that would, do not."""
    places = _rotating(model)
    before = [getattr(place, _ROTATE) for place in places]
    for place in places:
        setattr(place, _ROTATE, lambda query, key, *_, **__: (query, key))
    try:
        yield
    finally:
        for place, function in zip(places, before, strict=True):
            setattr(place, _ROTATE, function)


def _rotating(model: Any) -> list[Any]:
    modules = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(modules) if hasattr(sys.modules[name], _ROTATE)]


def rotation_tables(model: Any, context: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the operator needs to rotate as this model does, where it may: one table for all layers."""
    makers = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    if len(makers) != 1 or not _rotating(model):
        return None
    try:
        with torch.inference_mode():
            cosines, sines = makers[0](torch.zeros(1, 1, 1), torch.arange(context)[None])
    except TypeError:  # it wants to know more: a table for each kind of layer
        return None
    half = cosines.shape[-1] // 2
    if half % _ROTATED_EIGHTS:
        return None
    return cosines[0, :, :half].clone(), sines[0, :, :half].clone()


def export_decoder(model: Any, file: Path, tables: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Trace two rows of three tokens, one of them with something before."""
    config = model.config.get_text_config(decoder=True)
    shape = _cache_shape(config)
    past = [torch.zeros(2, *shape) for _ in range(2 * config.num_hidden_layers)]
    feeds = (
        torch.ones(2, 3, dtype=torch.int32),
        torch.tensor([2, 4], dtype=torch.int32),
        torch.tensor(5, dtype=torch.int32),
        *past,
    )
    names = [f"{{}}.{layer}.{what}" for layer in range(config.num_hidden_layers) for what in ("key", "value")]
    inputs = ["input_ids", "seqlens_k", "total_sequence_length", *(name.format("past") for name in names)]
    outputs = ["logits", *(name.format("present") for name in names)]
    axes = {name: {0: "rows", 2: "capacity"} for name in (*inputs[3:], *outputs[1:])}
    axes |= {"input_ids": {0: "rows", 1: "tokens"}, "seqlens_k": {0: "rows"}, "logits": {0: "rows"}}
    export_module(Decoder(model, tables).eval(), feeds, file, inputs, outputs, axes)


def export_module(
    module: torch.nn.Module, feeds: tuple[Any, ...], file: Path, inputs: list[str], outputs: list[str], axes: Any
) -> None:
    import onnx

    parts = file.parent / f"{file.stem}-export"
    parts.mkdir()
    with quiet_libraries(), silent_stdout(), torch.inference_mode():
        try:
            torch.onnx.export(
                module,
                feeds,
                str(parts / file.name),
                dynamo=False,
                opset_version=OPSET,
                input_names=inputs,
                output_names=outputs,
                dynamic_axes=axes,
                custom_opsets={"com.microsoft": 1},
            )
        except UnsupportedError:
            raise
        except Exception as error:
            raise StageError(f"it does not export to ONNX: {first_line(error)}") from error
        finally:
            module.eval()
    graph = straighten(onnx.load(parts / file.name))
    graph.ir_version = IR_VERSION
    write_graph(graph, file, external_data=True)
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()


def _cache_shape(config: Any) -> tuple[int, int, int]:
    """(heads, capacity of the example, width) of one row."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, 7, width
