"""Pruning keeps the answers: each rule for propagating a selected token, on small graphs that are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.builder.passes.prune import prune  # noqa: E402

WIDTH = 8


class Graph:
    """A graph from `hidden` (rows, tokens, 8) to `picked`, one token of the result of the test's nodes."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.random = np.random.default_rng(3)

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{kind}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=names[0], **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, values: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.random.normal(scale=0.3, size=shape).astype(np.float32))

    def matmul(self, name: str, width: int = WIDTH) -> str:
        return self.add("MatMul", name, self.weight(WIDTH, width))

    def save(self, result: str, file: Path, *, axis: int = 1, position: int = 0, output: str | None = None) -> None:
        picked = self.add("Gather", result, self.constant(np.int64(position)), axis=axis)
        self.nodes.append(helper.make_node("Identity", [picked], ["picked"]))
        outputs = [helper.make_tensor_value_info("picked", TensorProto.FLOAT, ["batch", None])]
        if output is not None:
            outputs.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
        hidden = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", "sequence", WIDTH])
        graph = helper.make_graph(self.nodes, "test", [hidden], outputs, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

        onnx.save_model(model, file)


def softmax(graph: Graph, name: str) -> str:
    return graph.add("Softmax", graph.matmul(name), axis=-1)


def norm(graph: Graph, name: str) -> str:
    normed = graph.add("LayerNormalization", graph.matmul(name), graph.weight(WIDTH), graph.weight(WIDTH), axis=-1)
    return graph.add("Erf", normed)


def decomposed_norm(graph: Graph, name: str) -> str:
    """Add LayerNorm as separate operators, as older exports do."""
    projected = graph.matmul(name)
    centred = graph.add("Sub", projected, graph.add("ReduceMean", projected, axes=[-1], keepdims=1))
    variance = graph.add("ReduceMean", graph.add("Mul", centred, centred), axes=[-1], keepdims=1)
    return graph.add("Div", centred, graph.add("Sqrt", graph.add("Add", variance, graph.constant(np.float32(1e-6)))))


def gated(graph: Graph, name: str) -> str:
    """Add a feed-forward layer of which one half gates the other."""
    halves = graph.add("Split", graph.matmul(name, 2 * WIDTH), outputs=2, axis=-1)
    return graph.add("Mul", halves[0], graph.add("Sigmoid", halves[1]))


def residual(graph: Graph, name: str) -> str:
    return graph.add("Add", name, graph.add("Add", graph.matmul(name), graph.weight(WIDTH)))


def positions(graph: Graph, name: str) -> str:
    """Add position embeddings, sliced from a table to the length of the text."""
    length = graph.add("Gather", graph.add("Shape", name), graph.constant(np.array([1])), axis=0)
    table = graph.add("Slice", graph.weight(1, 64, WIDTH), graph.constant(np.array([0])), length, graph.constant([1]))
    return graph.matmul(graph.add("Add", name, table))


def attention(graph: Graph, name: str) -> str:
    shape = [graph.add("Gather", graph.add("Shape", name), graph.constant(np.array([axis])), axis=0) for axis in (0, 1)]
    heads = graph.add("Concat", *shape, graph.constant(np.array([2])), graph.constant(np.array([WIDTH // 2])), axis=0)
    query, key, value = (graph.add("Reshape", graph.matmul(name), heads) for _ in range(3))
    query, value = (graph.add("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 2, 3, 1]))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
    merged = graph.add("Concat", *shape, graph.constant(np.array([-1])), axis=0)
    return residual(graph, graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), merged))


def heads_in_batch(graph: Graph, name: str) -> str:
    """Merge heads and rows into one axis, as DeBERTa does, with a constant reshape target."""
    split = graph.add("Reshape", graph.matmul(name), graph.constant(np.array([0, 0, 2, -1])))
    turned = graph.add("Transpose", split, perm=[0, 2, 1, 3])
    rows = graph.add("Shape", turned)
    three = graph.add("Slice", rows, graph.constant([2]), graph.constant([4]))
    shape = graph.add("Concat", graph.constant(np.array([-1])), three, axis=0)
    flat = graph.add("Reshape", turned, shape)
    scores = graph.add("MatMul", flat, graph.add("Transpose", flat, perm=[0, 2, 1]))
    index = graph.add("Cast", graph.add("Mul", scores, graph.constant(np.float32(0))), to=TensorProto.INT64)
    gathered = graph.add("GatherElements", scores, index, axis=2)
    mixed = graph.add("Reshape", graph.add("MatMul", gathered, flat), rows)
    back = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
    return graph.matmul(graph.add("Reshape", back, graph.constant(np.array([0, 0, -1]))))


def rotated(graph: Graph, name: str) -> str:
    """Swap the two halves of each head, as rotary embeddings do."""
    projected = graph.matmul(name)
    ends = [graph.constant(np.array([value])) for value in (0, WIDTH // 2, WIDTH, 2)]
    first = graph.add("Slice", projected, ends[0], ends[1], ends[3])
    second = graph.add("Slice", projected, ends[1], ends[2], ends[3])
    return graph.add("Concat", graph.add("Neg", second), first, axis=-1)


def unsqueezed(graph: Graph, name: str) -> str:
    axes = graph.constant(np.array([1]))
    return graph.add("Squeeze", graph.add("Unsqueeze", graph.matmul(name), axes), axes)


def unbound(graph: Graph, name: str) -> str:
    """Select the queries from a packed projection by index."""
    packed = graph.add("Reshape", graph.matmul(name, 3 * WIDTH), graph.constant(np.array([0, 0, 3, WIDTH])))
    return graph.matmul(graph.add("Gather", packed, graph.constant(np.int64(0)), axis=2))


def clipped(graph: Graph, name: str) -> str:
    low, high = graph.constant(np.float32(-0.5)), graph.constant(np.float32(0.5))
    return graph.add("Where", graph.add("Greater", name, low), graph.add("Clip", graph.matmul(name), low, high), high)


def quantized(graph: Graph, name: str) -> str:
    """Quantize to int8 and back, with one scale and with one scale per feature."""
    for scales, axis in ((np.float32(0.02), {}), (np.full(WIDTH, 0.02, np.float32), {"axis": 2})):
        pair = graph.constant(scales), graph.constant(np.zeros_like(scales, np.int8))
        int8 = graph.add("QuantizeLinear", graph.matmul(name), *pair, **axis)
        name = graph.add("DequantizeLinear", int8, *pair, **axis)
    return name


BODIES: dict[str, tuple[Callable[[Graph, str], str], int]] = {
    "softmax": (softmax, 1),
    "norm": (norm, 1),
    "decomposed norm": (decomposed_norm, 1),
    "gate": (gated, 1),
    "residual": (residual, 1),
    "positions": (positions, 1),
    "attention": (attention, 4),
    "heads in the batch": (heads_in_batch, 3),
    "rotary": (rotated, 1),
    "unsqueeze": (unsqueezed, 1),
    "unbind": (unbound, 2),
    "clip": (clipped, 1),
    "quantization": (quantized, 2),
}


def run(file: Path, hidden: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {"hidden": hidden})


def max_matmul_rows(file: Path, hidden: np.ndarray) -> int:
    """Return the largest number of rows of any matmul of activations and weights."""
    model = onnx.load(file)
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [node.output[0] for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return max(int(np.prod(result.shape[:-1])) for result in session.run(names, {"hidden": hidden}))


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("name", BODIES)
def test_pruned_graph_gives_the_same_answers(tmp_path: Path, name: str, position: int) -> None:
    body, matmuls = BODIES[name]
    graph = Graph()
    graph.save(body(graph, "hidden"), tmp_path / "whole.onnx", position=position)
    pruning = prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx")
    assert pruning.matmuls >= matmuls
    onnx.checker.check_model(onnx.load(tmp_path / "pruned.onnx"))
    for rows, tokens in ((1, 1), (1, 9), (3, 1), (3, 7)):
        hidden = np.random.default_rng(tokens).normal(size=(rows, tokens, WIDTH)).astype(np.float32)
        ours, theirs = run(tmp_path / "pruned.onnx", hidden), run(tmp_path / "whole.onnx", hidden)
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["softmax", "norm", "decomposed norm", "gate", "residual", "rotary", "unsqueeze", "quantization"]
)
def test_pruned_matmuls_compute_one_row(tmp_path: Path, name: str) -> None:
    graph = Graph()
    graph.save(BODIES[name][0](graph, "hidden"), tmp_path / "whole.onnx")
    prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx")
    hidden = np.ones((3, 7, WIDTH), np.float32)
    assert max_matmul_rows(tmp_path / "whole.onnx", hidden) == 21
    assert max_matmul_rows(tmp_path / "pruned.onnx", hidden) == 3


def mixed_tokens(graph: Graph, name: str) -> str:
    return graph.add("Softmax", graph.matmul(name), axis=1)


def mean_subtracted(graph: Graph, name: str) -> str:
    projected = graph.matmul(name)
    return graph.add("Sub", projected, graph.add("ReduceMean", projected, axes=[1], keepdims=1))


def cumulative(graph: Graph, name: str) -> str:
    return graph.add("CumSum", graph.matmul(name), graph.constant(np.array(1)))


@pytest.mark.parametrize("body", [mixed_tokens, mean_subtracted, cumulative], ids=lambda body: body.__name__)
def test_operators_that_mix_tokens_are_not_pruned(tmp_path: Path, body: Callable[[Graph, str], str]) -> None:
    graph = Graph()
    graph.save(body(graph, "hidden"), tmp_path / "whole.onnx")
    pruning = prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx")
    assert pruning.matmuls == 0
    hidden = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(run(tmp_path / "pruned.onnx", hidden)[0], run(tmp_path / "whole.onnx", hidden)[0])


def test_graph_output_is_not_pruned(tmp_path: Path) -> None:
    graph = Graph()
    projected = graph.matmul("hidden")
    graph.save(projected, tmp_path / "whole.onnx", output=projected)
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx").matmuls == 0


def test_selecting_different_tokens_prevents_pruning(tmp_path: Path) -> None:
    graph = Graph()
    projected = graph.matmul("hidden")
    last = graph.add("Gather", projected, graph.constant(np.int64(-1)), axis=1)
    graph.nodes.append(helper.make_node("Identity", [last], ["last"]))
    graph.save(projected, tmp_path / "whole.onnx", output="last")
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx").matmuls == 0


def test_input_dependent_selection_is_not_pruned(tmp_path: Path) -> None:
    """`hidden[:, length - 1]` is not a constant position."""
    graph = Graph()
    projected = graph.matmul("hidden")
    length = graph.add("Gather", graph.add("Shape", "hidden"), graph.constant(np.int64(1)), axis=0)
    last = graph.add("Gather", projected, graph.add("Sub", length, graph.constant(np.int64(1))), axis=1)
    graph.nodes.append(helper.make_node("Identity", [last], ["last"]))
    graph.save(graph.add("Erf", "hidden"), tmp_path / "whole.onnx", output="last")
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx").matmuls == 0


def test_selection_along_features_is_not_pruned(tmp_path: Path) -> None:
    graph = Graph()
    graph.save(graph.matmul("hidden"), tmp_path / "whole.onnx", axis=2)
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx").matmuls == 0


def test_selecting_two_tokens_is_not_pruned(tmp_path: Path) -> None:
    graph = Graph()
    projected = graph.matmul("hidden")
    both = graph.add("Gather", projected, graph.constant(np.array([0, 1])), axis=1)
    graph.nodes.append(helper.make_node("Identity", [both], ["both"]))
    graph.save(graph.add("Erf", "hidden"), tmp_path / "whole.onnx", output="both")
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx").matmuls == 0


def test_older_opset_is_not_pruned_and_noted(tmp_path: Path) -> None:
    graph = Graph()
    graph.save(graph.matmul("hidden"), tmp_path / "whole.onnx")
    model = onnx.load(tmp_path / "whole.onnx")
    model.opset_import[0].version = 11
    onnx.save_model(model, tmp_path / "old.onnx")
    pruning = prune(tmp_path / "old.onnx", tmp_path / "pruned.onnx")
    assert pruning.notes() == ("not pruned: opset 11 is older than 13",)
    hidden = np.ones((2, 5, WIDTH), np.float32)
    np.testing.assert_array_equal(run(tmp_path / "pruned.onnx", hidden)[0], run(tmp_path / "old.onnx", hidden)[0])
