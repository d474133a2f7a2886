"""Fuse attention, LayerNorm, GELU and embeddings into ONNX Runtime's operators."""

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
from hasten.core.system.memory_limit import free_memory
from hasten.onnx_graph import attribute, has_external_data, read_graph, write_graph

# The only model type of ONNX Runtime's optimizer whose patterns match an encoder's attention. Where they do not
# (relative positions, rotary embeddings, one matmul for query, key and value), those of other types do not either:
# docs/reference/support.md lists the fused layers.
_MODEL_TYPE = "bert"

_DOMAIN = "com.microsoft"

# Operators that remain if a fusion failed, and the pattern they belong to.
_UNFUSED_OPERATORS = {"Softmax": "attention", "Erf": "GELU"}

_RELATIVE = "a relative position bias is added to its scores"
_ROTARY = "rotary embeddings turn its queries and keys"
# Why attention is not fused: it differs from the plain attention of the fused operator.
_UNFUSED_REASONS = {
    "bart": "ONNX Runtime's fusion would lose the mask of its decoder",
    "convbert": "convolutions stand beside it",
    "deberta": _RELATIVE,
    "deberta-v2": _RELATIVE,
    "eurobert": _ROTARY,
    "gemma3_text": _ROTARY,
    "gte": _ROTARY,
    "jina_embeddings_v3": _ROTARY,
    "llama": _ROTARY,
    "luke": "words and entities attend to each other in one",
    "mistral": _ROTARY,
    "mobilebert": "its queries and values come from different tensors",
    "modernbert": _ROTARY,
    "mpnet": _RELATIVE,
    "nomic_bert": _ROTARY,
    "nystromformer": "it is approximated, or convolutions stand beside it",
    "qwen3": _ROTARY,
    "roformer": _ROTARY,
    "squeezebert": "convolutions replace its matmuls",
    "t5": _RELATIVE,
    "umt5": _RELATIVE,
    "xlnet": _RELATIVE,
}
_UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Fusions:
    """The fused operators by name, and the number of layers."""

    counts: dict[str, int]
    layers: int
    unfused: tuple[Unfused, ...] = ()

    @property
    def attention(self) -> int:
        """Return the number of fused attention operators."""
        return self.counts.get("Attention", 0) + self.counts.get("MultiHeadAttention", 0)

    def notes(self) -> tuple[str, ...]:
        """Return the lines for the report."""
        listed = ", ".join(f"{count}× {name}" for name, count in self.counts.items() if name != "Attention")
        return f"attention fused in {self.attention} of {self.layers} layers", f"fused: {listed or 'nothing else'}"


def fuse(graph: Path, file: Path, config: Any, *, pads_left: bool = False) -> Fusions:
    """Write the fused graph and return the fusions."""
    try:
        import onnx
        from onnxruntime.transformers import optimizer
        from onnxruntime.transformers.fusion_options import FusionOptions
    except ImportError as error:
        raise missing_package(error.name or "onnx", "optimizing", "build") from error

    options = FusionOptions(_MODEL_TYPE)
    # By default it counts the mask's ones and attends to that number of positions from the first.
    options.use_raw_attention_mask(pads_left)
    # It mistakes a decoder's causal mask for a padding mask.
    options.enable_attention = not getattr(config, "is_encoder_decoder", False)
    source = read_graph(graph, with_weights=False)
    options.enable_embed_layer_norm = not _has_shifted_positions(source.graph)
    _order_sums(source.graph)
    heads = int(getattr(config, "num_attention_heads", 0))
    try:
        with _quiet_optimizer(), _weights_from(graph.parent):
            model = optimizer.optimize_model(
                source,
                model_type=_MODEL_TYPE,
                num_heads=heads,
                hidden_size=int(config.hidden_size) if heads else 0,
                optimization_options=options,
                # The session repeats the general passes when it loads, adapted to its machine.
                opt_level=0,
            )
        counts = {name: count for name, count in model.get_fused_operator_statistics().items() if count}
        model.topological_sort()
        if all(entry.domain != _DOMAIN for entry in model.model.opset_import):
            model.model.opset_import.add(domain=_DOMAIN, version=1)
        onnx.load_external_data_for_model(model.model, str(graph.parent))
        write_graph(model.model, file, external_data=has_external_data(graph))
    except Exception as error:
        raise StageError(f"ONNX Runtime's optimizer failed on {config.model_type}: {error}") from error
    layers = int(getattr(config, "num_hidden_layers", 0))
    fusions = Fusions(counts, layers, unfused(model.model.graph.node, config.model_type))
    # The optimizer's objects refer to each other, and the weights would stay in memory until the next collection.
    del model, source
    free_memory()
    return fusions


def unfused(nodes: Iterable[Any], model_type: str) -> tuple[Unfused, ...]:
    """Return the nodes of attention and GELU that are not fused, with the reason if it is known."""
    reasons = {"attention": _UNFUSED_REASONS.get(model_type, _UNKNOWN)}
    return tuple(
        Unfused(pattern, node.name or node.output[0], reasons.get(pattern, _UNKNOWN))
        for node in nodes
        if (pattern := _UNFUSED_OPERATORS.get(node.op_type))
    )


def _has_shifted_positions(graph: Any) -> bool:
    """Return whether positions are a constant that does not start at zero (YOSO): fused embeddings count from zero."""
    from onnx import numpy_helper

    constants = {node.output[0]: attribute(node, "value", None) for node in graph.node if node.op_type == "Constant"}
    constants |= {tensor.name: tensor for tensor in graph.initializer}
    sliced = (constants.get(node.input[0]) for node in graph.node if node.op_type == "Slice")
    rows = (numpy_helper.to_array(tensor) for tensor in sliced if tensor is not None and len(tensor.dims) == 2)
    return any(row.shape[0] == 1 and row[0, 0] != 0 for row in rows)


def _order_sums(graph: Any) -> None:
    """Put the later computed term first in additions of two sums.

    The fusion patterns follow only the first term, and it must be the attention's output, not the layer's input: ALBERT
    and Megatron-BERT have it last, and their first layer was not fused.
    """
    order = {output: index for index, node in enumerate(graph.node) for output in node.output}
    sums = {node.output[0] for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type == "Add" and sums.issuperset(node.input) and order[node.input[0]] < order[node.input[1]]:
            node.input[:] = [node.input[1], node.input[0]]


@contextmanager
def _weights_from(folder: Path) -> Iterator[None]:
    """Let the optimizer read weights one by one from an external file: it makes ten copies of those in the graph."""
    from onnx import TensorProto, numpy_helper

    original = numpy_helper.to_array

    def to_array(tensor: Any, base_dir: str = "") -> Any:
        # The optimizer does not pass a folder, and no other caller has weights in the working directory.
        return original(tensor, base_dir or (str(folder) if tensor.data_location == TensorProto.EXTERNAL else ""))

    numpy_helper.to_array = to_array
    try:
        yield
    finally:
        numpy_helper.to_array = original


@contextmanager
def _quiet_optimizer() -> Iterator[None]:
    """Silence the optimizer: it prints when shape inference fails, and logs to the root logger."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(level)
