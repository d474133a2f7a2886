"""Fusing what ONNX Runtime has one operator for: attention, LayerNorm, GELU, embeddings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hasten.core.errors import StageError, missing_package
from hasten.core.report import Unfused
from hasten.graph import attribute

# The only one of ONNX Runtime's families whose patterns find an encoder's attention. Where they do not (relative
# positions added to it, rotary embeddings, one product for query, key and value), none of the others' do either:
# docs/reference/support.md tells the layers fused.
_FAMILY = "bert"

# The operators that are gone where a fusion succeeded, and what they are a part of.
_SIGNS = {"Softmax": "attention", "Erf": "GELU"}

_RELATIVE = "a relative position bias is added to its scores"
_ROTARY = "rotary embeddings turn its queries and keys"
# Why attention stays in parts: it is not the plain one that the fused operator computes.
_WHY_NO_ATTENTION = {
    "bart": "ONNX Runtime's fusion would lose the mask of its decoder",
    "convbert": "convolutions stand beside it",
    "deberta": _RELATIVE,
    "deberta-v2": _RELATIVE,
    "eurobert": _ROTARY,
    "gemma3_text": _ROTARY,
    "gte": _ROTARY,
    "jina_embeddings_v3": _ROTARY,
    "luke": "words and entities attend to each other in one",
    "mobilebert": "its queries and values come from different tensors",
    "modernbert": _ROTARY,
    "mpnet": _RELATIVE,
    "nomic_bert": _ROTARY,
    "nystromformer": "it is approximated, or convolutions stand beside it",
    "roformer": _ROTARY,
    "squeezebert": "convolutions take the place of its matrix products",
    "xlnet": _RELATIVE,
}
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Fusions:
    """Operators that replaced many, by name, and how many layers there are to fuse."""

    counts: dict[str, int]
    layers: int
    nodes_before: int
    nodes_after: int
    left: tuple[Unfused, ...] = ()

    @property
    def attention(self) -> int:
        return self.counts.get("Attention", 0) + self.counts.get("MultiHeadAttention", 0)

    def notes(self) -> tuple[str, ...]:
        listed = ", ".join(f"{count}× {name}" for name, count in self.counts.items() if name != "Attention")
        return (
            f"attention fused in {self.attention} of {self.layers} layers",
            f"fused: {listed or 'nothing else'}",
        )


def fuse(graph: Path, file: Path, config: Any, *, external_data: bool, pads_left: bool = False) -> Fusions:
    try:
        import onnx
        from onnxruntime.transformers import optimizer
        from onnxruntime.transformers.fusion_options import FusionOptions
    except ImportError as error:
        raise missing_package(error.name or "onnx", "optimizing", "build") from error

    options = FusionOptions(_FAMILY)
    # By default it counts the mask's ones and takes as many positions from the first on.
    options.use_raw_attention_mask(pads_left)
    # It takes a decoder's mask, which hides what comes later, for one of padding.
    options.enable_attention = not getattr(config, "is_encoder_decoder", False)
    source = onnx.load(graph)
    before = len(source.graph.node)
    options.enable_embed_layer_norm = not _has_shifted_positions(source.graph)
    _order_sums(source.graph)
    heads = int(getattr(config, "num_attention_heads", 0))
    try:
        with _quiet_optimizer():
            model = optimizer.optimize_model(
                source,
                model_type=_FAMILY,
                num_heads=heads,
                hidden_size=int(config.hidden_size) if heads else 0,
                optimization_options=options,
                # The session repeats the general passes when it loads, fitted to the machine it then runs on.
                opt_level=0,
            )
        counts = {name: count for name, count in model.get_fused_operator_statistics().items() if count}
        model.save_model_to_file(str(file), use_external_data_format=external_data)
    except Exception as error:
        raise StageError(f"ONNX Runtime's optimizer failed on {config.model_type}: {error}") from error
    layers = int(getattr(config, "num_hidden_layers", 0))
    nodes = model.model.graph.node
    return Fusions(counts, layers, before, len(nodes), unfused(nodes, config.model_type))


def unfused(nodes: Iterable[Any], model_type: str) -> tuple[Unfused, ...]:
    """What is left of attention and GELU in a graph, node by node; the reason where the architecture tells it."""
    reasons = {"attention": _WHY_NO_ATTENTION.get(model_type, _UNKNOWN)}
    return tuple(
        Unfused(what, node.name or node.output[0], reasons.get(what, _UNKNOWN))
        for node in nodes
        if (what := _SIGNS.get(node.op_type))
    )


def _has_shifted_positions(graph: Any) -> bool:
    """Whether positions are cut from a constant that starts elsewhere, as YOSO's: fused embeddings count from zero."""
    from onnx import numpy_helper

    constants = {node.output[0]: attribute(node, "value", None) for node in graph.node if node.op_type == "Constant"}
    constants |= {tensor.name: tensor for tensor in graph.initializer}
    cut = (constants.get(node.input[0]) for node in graph.node if node.op_type == "Slice")
    rows = (numpy_helper.to_array(tensor) for tensor in cut if tensor is not None and len(tensor.dims) == 2)
    return any(row.shape[0] == 1 and row[0, 0] != 0 for row in rows)


def _order_sums(graph: Any) -> None:
    """Of two terms that are sums themselves, the one computed later first.

    The patterns follow the first of them alone, and it must be the attention's output, not the layer's input: ALBERT
    and Megatron-BERT write it last, and their first layer stayed as it was.
    """
    place = {output: index for index, node in enumerate(graph.node) for output in node.output}
    sums = {node.output[0] for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type == "Add" and sums.issuperset(node.input) and place[node.input[0]] < place[node.input[1]]:
            node.input[:] = [node.input[1], node.input[0]]


@contextmanager
def _quiet_optimizer() -> Iterator[None]:
    """It prints where its inference of shapes gives up, and logs to the root."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(before)
