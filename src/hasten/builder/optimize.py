"""Fusing what ONNX Runtime has one operator for: attention, LayerNorm, GELU, embeddings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hasten.core.errors import StageError, missing_package

# What an architecture needs beyond the general case: the family whose fusion patterns fit it.
_FUSION_FAMILY: dict[str, str] = {}
_GENERAL = "bert"


@dataclass(frozen=True, slots=True)
class Fusions:
    """Operators that replaced many, by name, and how many layers there are to fuse."""

    counts: dict[str, int]
    layers: int
    nodes_before: int
    nodes_after: int

    @property
    def attention(self) -> int:
        return self.counts.get("Attention", 0) + self.counts.get("MultiHeadAttention", 0)

    def notes(self) -> tuple[str, ...]:
        listed = ", ".join(f"{count}× {name}" for name, count in self.counts.items() if name != "Attention")
        return (
            f"attention fused in {self.attention} of {self.layers} layers",
            f"fused: {listed or 'nothing else'}",
            f"{self.nodes_before} → {self.nodes_after} operators",
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
    return Fusions(counts, layers, before, len(model.model.graph.node))
