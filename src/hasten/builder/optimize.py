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

# What an architecture needs beyond the general case: the family whose fusion patterns fit it.
_FUSION_FAMILY: dict[str, str] = {}
_GENERAL = "bert"

# The operators that are gone where a fusion succeeded, and what they are a part of.
_SIGNS = {"Softmax": "attention", "Erf": "GELU"}

_RELATIVE = "a relative position bias is added to its scores"
_ROTARY = "rotary embeddings turn its queries and keys"
# Why attention stays in parts: it is not the plain one that the fused operator computes.
_WHY_NO_ATTENTION = {
    "convbert": "convolutions stand beside it",
    "deberta": _RELATIVE,
    "deberta-v2": _RELATIVE,
    "eurobert": _ROTARY,
    "gemma3_text": _ROTARY,
    "mobilebert": "its queries and values come from different tensors",
    "modernbert": _ROTARY,
    "mpnet": _RELATIVE,
    "nomic_bert": _ROTARY,
    "roformer": _ROTARY,
    "squeezebert": "convolutions take the place of its matrix products",
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


@contextmanager
def _quiet() -> Iterator[None]:
    """The optimizer's loggers go by other names than its modules; what shapes it cannot infer it prints to stdout."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(before)


@_quiet()
def fuse(graph: Path, file: Path, config: Any, *, external_data: bool) -> Fusions:
    try:
        import onnx
        from onnxruntime.transformers import optimizer
        from onnxruntime.transformers.fusion_options import FusionOptions
    except ImportError as error:
        raise missing_package(error.name or "onnx", "optimizing", "build") from error

    family = _FUSION_FAMILY.get(config.model_type, _GENERAL)
    before = len(onnx.load(graph, load_external_data=False).graph.node)
    try:
        model = optimizer.optimize_model(
            str(graph),
            model_type=family,
            num_heads=int(getattr(config, "num_attention_heads", 0)),
            hidden_size=int(getattr(config, "hidden_size", 0)),
            optimization_options=FusionOptions(family),
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
