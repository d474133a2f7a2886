"""Each rule by which a wish for one token travels upstream, on graphs made by hand and really run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.builder.prune import prune  # noqa: E402

WIDTH = 8


class Graph:
    """A graph from `hidden` (rows, tokens, 8) to `picked`, one token of what the test puts between."""

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

    def product(self, name: str, width: int = WIDTH) -> str:
        return self.add("MatMul", name, self.weight(WIDTH, width))

    def save(self, result: str, file: Path, *, axis: int = 1, place: int = 0, output: str | None = None) -> None:
        picked = self.add("Gather", result, self.constant(np.int64(place)), axis=axis)
        self.nodes.append(helper.make_node("Identity", [picked], ["picked"]))
        outputs = [helper.make_tensor_value_info("picked", TensorProto.FLOAT, ["batch", None])]
        if output is not None:
            outputs.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, None))
        hidden = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", "sequence", WIDTH])
        graph = helper.make_graph(self.nodes, "test", [hidden], outputs, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

        onnx.save_model(model, file)


def softmax_of(graph: Graph, name: str) -> str:
    return graph.add("Softmax", graph.product(name), axis=-1)


def norm_of(graph: Graph, name: str) -> str:
    norm = graph.add("LayerNormalization", graph.product(name), graph.weight(WIDTH), graph.weight(WIDTH), axis=-1)
    return graph.add("Erf", norm)


def old_norm_of(graph: Graph, name: str) -> str:
    """LayerNorm in its parts, as older exports have it."""
    projected = graph.product(name)
    centred = graph.add("Sub", projected, graph.add("ReduceMean", projected, axes=[-1], keepdims=1))
    variance = graph.add("ReduceMean", graph.add("Mul", centred, centred), axes=[-1], keepdims=1)
    return graph.add("Div", centred, graph.add("Sqrt", graph.add("Add", variance, graph.constant(np.float32(1e-6)))))


def gated(graph: Graph, name: str) -> str:
    """A feed-forward half of which gates the other half."""
    halves = graph.add("Split", graph.product(name, 2 * WIDTH), outputs=2, axis=-1)
    return graph.add("Mul", halves[0], graph.add("Sigmoid", halves[1]))


def residual(graph: Graph, name: str) -> str:
    return graph.add("Add", name, graph.add("Add", graph.product(name), graph.weight(WIDTH)))


def positions(graph: Graph, name: str) -> str:
    """Something that depends on the position, cut from a table as long as the text."""
    length = graph.add("Gather", graph.add("Shape", name), graph.constant(np.array([1])), axis=0)
    table = graph.add("Slice", graph.weight(1, 64, WIDTH), graph.constant(np.array([0])), length, graph.constant([1]))
    return graph.product(graph.add("Add", name, table))


def attention(graph: Graph, name: str) -> str:
    shape = [graph.add("Gather", graph.add("Shape", name), graph.constant(np.array([axis])), axis=0) for axis in (0, 1)]
    heads = graph.add("Concat", *shape, graph.constant(np.array([2])), graph.constant(np.array([WIDTH // 2])), axis=0)
    query, key, value = (graph.add("Reshape", graph.product(name), heads) for _ in range(3))
    query, value = (graph.add("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 2, 3, 1]))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
    merged = graph.add("Concat", *shape, graph.constant(np.array([-1])), axis=0)
    return residual(graph, graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), merged))


def heads_in_batch(graph: Graph, name: str) -> str:
    """DeBERTa's way: heads and rows in one axis, the target of the reshape a constant."""
    split = graph.add("Reshape", graph.product(name), graph.constant(np.array([0, 0, 2, -1])))
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
    return graph.product(graph.add("Reshape", back, graph.constant(np.array([0, 0, -1]))))


def rotated(graph: Graph, name: str) -> str:
    """Halves swapped, as rotary embeddings do."""
    projected = graph.product(name)
    ends = [graph.constant(np.array([value])) for value in (0, WIDTH // 2, WIDTH, 2)]
    first = graph.add("Slice", projected, ends[0], ends[1], ends[3])
    second = graph.add("Slice", projected, ends[1], ends[2], ends[3])
    return graph.add("Concat", graph.add("Neg", second), first, axis=-1)


def unsqueezed(graph: Graph, name: str) -> str:
    axes = graph.constant(np.array([1]))
    return graph.add("Squeeze", graph.add("Unsqueeze", graph.product(name), axes), axes)


def unbound(graph: Graph, name: str) -> str:
    """Queries taken from a packed projection by their number."""
    packed = graph.add("Reshape", graph.product(name, 3 * WIDTH), graph.constant(np.array([0, 0, 3, WIDTH])))
    return graph.product(graph.add("Gather", packed, graph.constant(np.int64(0)), axis=2))


def bounded(graph: Graph, name: str) -> str:
    low, high = graph.constant(np.float32(-0.5)), graph.constant(np.float32(0.5))
    return graph.add("Where", graph.add("Greater", name, low), graph.add("Clip", graph.product(name), low, high), high)


def rounded(graph: Graph, name: str) -> str:
    """To eight bits and back: by one scale, and by one for each feature."""
    for scales, axis in ((np.float32(0.02), {}), (np.full(WIDTH, 0.02, np.float32), {"axis": 2})):
        pair = graph.constant(scales), graph.constant(np.zeros_like(scales, np.int8))
        eight_bits = graph.add("QuantizeLinear", graph.product(name), *pair, **axis)
        name = graph.add("DequantizeLinear", eight_bits, *pair, **axis)
    return name


BODIES: dict[str, tuple[Callable[[Graph, str], str], int]] = {
    "softmax": (softmax_of, 1),
    "norm": (norm_of, 1),
    "norm in parts": (old_norm_of, 1),
    "gate": (gated, 1),
    "residual": (residual, 1),
    "positions": (positions, 1),
    "attention": (attention, 4),
    "heads in the batch": (heads_in_batch, 3),
    "rotary": (rotated, 1),
    "unsqueeze": (unsqueezed, 1),
    "unbind": (unbound, 2),
    "bounds": (bounded, 1),
    "rounding": (rounded, 2),
}


def run(file: Path, hidden: np.ndarray) -> list[np.ndarray]:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {"hidden": hidden})


def rows_of(file: Path, hidden: np.ndarray) -> int:
    """The most rows any product of activations and weights is computed for."""
    model = onnx.load(file)
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [node.output[0] for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return max(int(np.prod(result.shape[:-1])) for result in session.run(names, {"hidden": hidden}))


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("name", BODIES)
def test_one_token_is_computed_and_the_answer_stays(tmp_path: Path, name: str, place: int) -> None:
    body, products = BODIES[name]
    graph = Graph()
    graph.save(body(graph, "hidden"), tmp_path / "whole.onnx", place=place)
    pruning = prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False)
    assert pruning.products >= products
    onnx.checker.check_model(onnx.load(tmp_path / "pruned.onnx"))
    for rows, tokens in ((1, 1), (1, 9), (3, 1), (3, 7)):
        hidden = np.random.default_rng(tokens).normal(size=(rows, tokens, WIDTH)).astype(np.float32)
        ours, theirs = run(tmp_path / "pruned.onnx", hidden), run(tmp_path / "whole.onnx", hidden)
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["softmax", "norm", "norm in parts", "gate", "residual", "rotary", "unsqueeze", "rounding"]
)
def test_products_of_one_row_are_left(tmp_path: Path, name: str) -> None:
    graph = Graph()
    graph.save(BODIES[name][0](graph, "hidden"), tmp_path / "whole.onnx")
    prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False)
    hidden = np.ones((3, 7, WIDTH), np.float32)
    assert rows_of(tmp_path / "whole.onnx", hidden) == 21
    assert rows_of(tmp_path / "pruned.onnx", hidden) == 3


def mixed_tokens(graph: Graph, name: str) -> str:
    return graph.add("Softmax", graph.product(name), axis=1)


def meaned(graph: Graph, name: str) -> str:
    projected = graph.product(name)
    return graph.add("Sub", projected, graph.add("ReduceMean", projected, axes=[1], keepdims=1))


def summed_up(graph: Graph, name: str) -> str:
    return graph.add("CumSum", graph.product(name), graph.constant(np.array(1)))


@pytest.mark.parametrize("body", [mixed_tokens, meaned, summed_up], ids=lambda body: body.__name__)
def test_what_mixes_tokens_stays_whole(tmp_path: Path, body: Callable[[Graph, str], str]) -> None:
    graph = Graph()
    graph.save(body(graph, "hidden"), tmp_path / "whole.onnx")
    pruning = prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False)
    assert pruning.products == 0
    hidden = np.random.default_rng(1).normal(size=(2, 5, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(run(tmp_path / "pruned.onnx", hidden)[0], run(tmp_path / "whole.onnx", hidden)[0])


def test_what_is_an_output_too_stays_whole(tmp_path: Path) -> None:
    graph = Graph()
    projected = graph.product("hidden")
    graph.save(projected, tmp_path / "whole.onnx", output=projected)
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False).products == 0


def test_two_different_tokens_need_the_whole(tmp_path: Path) -> None:
    graph = Graph()
    projected = graph.product("hidden")
    last = graph.add("Gather", projected, graph.constant(np.int64(-1)), axis=1)
    graph.nodes.append(helper.make_node("Identity", [last], ["last"]))
    graph.save(projected, tmp_path / "whole.onnx", output="last")
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False).products == 0


def test_a_pick_that_depends_on_the_input_is_none(tmp_path: Path) -> None:
    """`hidden[:, length - 1]` is not one place."""
    graph = Graph()
    projected = graph.product("hidden")
    length = graph.add("Gather", graph.add("Shape", "hidden"), graph.constant(np.int64(1)), axis=0)
    last = graph.add("Gather", projected, graph.add("Sub", length, graph.constant(np.int64(1))), axis=1)
    graph.nodes.append(helper.make_node("Identity", [last], ["last"]))
    graph.save(graph.add("Erf", "hidden"), tmp_path / "whole.onnx", output="last")
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False).products == 0


def test_a_feature_is_not_a_token(tmp_path: Path) -> None:
    graph = Graph()
    graph.save(graph.product("hidden"), tmp_path / "whole.onnx", axis=2)
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False).products == 0


def test_two_tokens_at_once_are_not_one(tmp_path: Path) -> None:
    graph = Graph()
    projected = graph.product("hidden")
    both = graph.add("Gather", projected, graph.constant(np.array([0, 1])), axis=1)
    graph.nodes.append(helper.make_node("Identity", [both], ["both"]))
    graph.save(graph.add("Erf", "hidden"), tmp_path / "whole.onnx", output="both")
    assert prune(tmp_path / "whole.onnx", tmp_path / "pruned.onnx", external_data=False).products == 0


def test_a_graph_of_an_older_opset_stays_whole_and_says_so(tmp_path: Path) -> None:
    graph = Graph()
    graph.save(graph.product("hidden"), tmp_path / "whole.onnx")
    model = onnx.load(tmp_path / "whole.onnx")
    model.opset_import[0].version = 11
    onnx.save_model(model, tmp_path / "old.onnx")
    pruning = prune(tmp_path / "old.onnx", tmp_path / "pruned.onnx", external_data=False)
    assert pruning.notes() == ("not pruned: opset 11 is older than 13",)
    hidden = np.ones((2, 5, WIDTH), np.float32)
    np.testing.assert_array_equal(run(tmp_path / "pruned.onnx", hidden)[0], run(tmp_path / "old.onnx", hidden)[0])
