"""Find the tensors of a graph whose values leave the range of fp16 on sample inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from hasten.backends import DECODER, ENCODER
from hasten.core.errors import StageError
from hasten.core.tensors import IntArray
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.session import open_in_memory, tensor_types

# Half of the largest fp16 number: other inputs may produce larger values than the samples.
_LIMIT = float(np.finfo(np.float16).max) / 2
# Larger numbers stand for infinity in an attention mask. OpenVINO clips them to the largest fp16 number, and softmax
# turns that into the same zero (tests/contract/build/test_overflow.py).
_INFINITY = 1e8
_REDUCTIONS = ("ReduceMax", "ReduceMin")
_MAX_NAMED_OPERATORS = 3
# The inputs of one run of a graph.
Feeds: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Overflow:
    """An operator with an output or a weight that leaves the range of fp16."""

    operator: str
    tensor: str
    largest: float


@dataclass(frozen=True, slots=True)
class DecoderText:
    """The token ids that a decoder prefills at once and, for an encoder-decoder model, the encoder's prompt."""

    ids: IntArray
    prompt: IntArray | None = None


def find_overflows(graph: Path, batches: Iterable[Feeds]) -> tuple[Overflow, ...]:
    """Return the overflows of an fp32 graph on batches of inputs, in the order of its operators."""
    model = read_graph(graph, with_weights=False)
    nodes = list(model.graph.node)
    weights = dict(_weight_maxima(model, graph.parent))
    activations: dict[str, float] = {}
    for name, maximum in _activation_maxima(model, graph.parent, batches):
        activations[name] = max(maximum, activations.get(name, 0.0))
    overflows: dict[str, Overflow] = {}
    for node in nodes:
        maxima = [(name, weights.get(name, 0.0)) for name in node.input]
        maxima += [(name, activations.get(name, 0.0)) for name in node.output]
        for name, maximum in maxima:
            if maximum > _LIMIT:
                overflows.setdefault(name, Overflow(node.name or node.output[0], name, maximum))
    return tuple(overflows.values())


def find_decoder_overflows(graphs: Mapping[str, Path], texts: Sequence[DecoderText]) -> dict[str, tuple[Overflow, ...]]:
    """Return the overflows of each fp32 graph of a generative model."""
    overflows = {DECODER: find_overflows(graphs[DECODER], _decoder_feeds(graphs, texts))}
    if ENCODER in graphs:
        overflows[ENCODER] = find_overflows(graphs[ENCODER], _encoder_feeds(texts))
    return overflows


def describe_overflows(overflows: Sequence[Overflow]) -> str:
    """Summarise overflows in one line: the number of operators, the largest value, and the first operators."""
    operators = list(dict.fromkeys(overflow.operator for overflow in overflows))
    names = ", ".join(operators[:_MAX_NAMED_OPERATORS]) + (", …" if len(operators) > _MAX_NAMED_OPERATORS else "")
    count = "1 operator" if len(operators) == 1 else f"{len(operators)} operators"
    return f"{count} kept in fp32: values reach {max(overflow.largest for overflow in overflows):.1e} ({names})"


def _decoder_feeds(graphs: Mapping[str, Path], texts: Sequence[DecoderText]) -> Iterator[dict[str, Any]]:
    """Yield the decoder's inputs of one text after another, with an empty KV cache."""
    cache_shapes = [
        (entry.name, [size.dim_value for size in entry.type.tensor_type.shape.dim])
        for entry in read_graph(graphs[DECODER], with_weights=False).graph.input
        if entry.name.startswith("past.")
    ]
    encoded = _encoder_outputs(graphs[ENCODER], texts) if ENCODER in graphs else ({} for _ in texts)
    for text, encoder_outputs in zip(texts, encoded, strict=True):
        length = len(text.ids)
        feeds = {
            "input_ids": np.asarray(text.ids, np.int32)[None],
            "seqlens_k": np.array([length - 1], np.int32),
            "total_sequence_length": np.array(length, np.int32),
        }
        cache = {name: np.zeros((1, shape[1], length, shape[3]), np.float32) for name, shape in cache_shapes}
        yield feeds | cache | encoder_outputs


def _encoder_outputs(graph: Path, texts: Sequence[DecoderText]) -> Iterator[dict[str, Any]]:
    session = open_in_memory(read_graph(graph), graph.parent)
    names = [entry.name for entry in session.get_outputs()]
    for feeds in _encoder_feeds(texts):
        outputs = session.run(names, feeds)
        yield dict(zip(names, outputs, strict=True)) | {"cross_lengths": np.array([outputs[0].shape[2]], np.int32)}


def _encoder_feeds(texts: Sequence[DecoderText]) -> Iterator[dict[str, Any]]:
    for text in texts:
        yield {"input_ids": np.asarray(text.prompt, np.int32)[None]}


def _weight_maxima(model: Any, folder: Path) -> Iterator[tuple[str, float]]:
    from onnx import TensorProto, numpy_helper

    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            yield tensor.name, _maximum(numpy_helper.to_array(tensor, str(folder)))


def _maximum(values: Any) -> float:
    """Return the largest magnitude, ignoring a mask's infinity: large values beside it come from an earlier tensor."""
    magnitudes = np.abs(values)
    return float(magnitudes.max(initial=0.0, where=magnitudes < _INFINITY))


def _activation_maxima(model: Any, folder: Path, batches: Iterable[Feeds]) -> Iterator[tuple[str, float]]:
    """Yield the largest magnitude of every tensor in every batch; the graph reduces them, so memory stays constant."""
    names = _add_reductions(model, folder)
    try:
        session = open_in_memory(model, folder)
        input_names = [entry.name for entry in session.get_inputs()]
        for feeds in batches:
            results = session.run(None, {name: feeds[name] for name in input_names})
            yield from zip(names, map(_maximum, np.reshape(results, (-1, len(_REDUCTIONS)))), strict=True)
    except Exception as error:  # the binding raises its own unrelated classes
        raise StageError(f"the range of activations cannot be measured: {error}") from error


def _add_reductions(model: Any, folder: Path) -> list[str]:
    """Replace the outputs by the maximum and minimum of each float tensor; return the names of those tensors."""
    import onnx

    types = tensor_types(model, folder)
    names = [name for node in model.graph.node for name in node.output if types.get(name) == "tensor(float)"]
    del model.graph.output[:]
    for index, name in enumerate(names):
        for reduction in _REDUCTIONS:
            output = f"overflow/{index}/{reduction}"
            model.graph.node.append(onnx.helper.make_node(reduction, [name], [output], keepdims=0))
            model.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, []))
    return names
