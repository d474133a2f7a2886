"""Token types are folded only if every reader of the word embeddings reads the sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.builder.passes.fold import fold_types  # noqa: E402

WORDS, TYPES = np.arange(20, dtype=np.float32).reshape(5, 4), np.array([[0.5, 1, 2, 3], [9, 9, 9, 9]], np.float32)


def save(file: Path, nodes: list[Any], *constants: tuple[str, Any], outputs: tuple[str, ...] = ("sum",)) -> None:
    tables = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants]
    tables += [numpy_helper.from_array(WORDS, "words"), numpy_helper.from_array(TYPES, "types")]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "test", [ids], infos, tables)
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)


def zero_types() -> list[Any]:
    """Return the nodes of exported graphs for types: zeros in the shape of the ids, and their lookup."""
    return [
        helper.make_node("Shape", ["ids"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"], value=numpy_helper.from_array(np.zeros(1, np.int64))),
        helper.make_node("Gather", ["types", "zeros"], ["typed"]),
    ]


def run(file: Path) -> list[np.ndarray]:
    session = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": np.array([[0, 3, 4], [1, 1, 2]])})


@pytest.mark.parametrize("order", [("worded", "typed"), ("typed", "worded")])
def test_folding_is_exact(tmp_path: Path, order: tuple[str, str]) -> None:
    nodes = [helper.make_node("Gather", ["words", "ids"], ["worded"]), *zero_types()]
    save(tmp_path / "whole.onnx", [*nodes, helper.make_node("Add", order, ["sum"])])
    assert fold_types(tmp_path / "whole.onnx", tmp_path / "folded.onnx")
    np.testing.assert_array_equal(run(tmp_path / "folded.onnx")[0], run(tmp_path / "whole.onnx")[0])
    kinds = [node.op_type for node in onnx.load(tmp_path / "folded.onnx").graph.node]
    assert kinds == ["Gather"]


def other_reader() -> list[Any]:
    """Return a second reader of the word table, as the head of a masked language model is."""
    return [helper.make_node("Identity", ["words"], ["other"])]


def other_reader_in_subgraph() -> list[Any]:
    def branch(name: str) -> Any:
        inner = helper.make_node("Identity", ["words"], [name])
        return helper.make_graph([inner], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5, 4])])

    return [helper.make_node("If", ["yes"], ["other"], then_branch=branch("a"), else_branch=branch("b"))]


@pytest.mark.parametrize("reader", [other_reader, other_reader_in_subgraph], ids=lambda reader: reader.__name__)
def test_table_with_another_reader_is_not_folded(tmp_path: Path, reader: Any) -> None:
    nodes = [helper.make_node("Gather", ["words", "ids"], ["worded"]), *zero_types()]
    nodes += [helper.make_node("Add", ["worded", "typed"], ["sum"]), *reader()]
    save(tmp_path / "whole.onnx", nodes, ("yes", np.array(True)), outputs=("sum", "other"))
    assert not fold_types(tmp_path / "whole.onnx", tmp_path / "folded.onnx")
    for ours, theirs in zip(run(tmp_path / "folded.onnx"), run(tmp_path / "whole.onnx"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_position_embeddings_are_not_folded(tmp_path: Path) -> None:
    """Positions have one row where the types have all: folded, the sum would lose its rows."""
    nodes = [helper.make_node("Gather", ["words", "positions"], ["worded"]), *zero_types()]
    save(
        tmp_path / "whole.onnx", [*nodes, helper.make_node("Add", ["worded", "typed"], ["sum"])],
        ("positions", np.array([[0, 1, 2]])),
    )  # fmt: skip
    assert not fold_types(tmp_path / "whole.onnx", tmp_path / "folded.onnx")
    np.testing.assert_array_equal(run(tmp_path / "folded.onnx")[0], run(tmp_path / "whole.onnx")[0])


def test_nonzero_types_are_not_folded(tmp_path: Path) -> None:
    ones = helper.make_node(
        "ConstantOfShape", ["shape"], ["zeros"], value=numpy_helper.from_array(np.ones(1, np.int64))
    )
    nodes = [helper.make_node("Gather", ["words", "ids"], ["worded"]), *zero_types()]
    nodes[2] = ones
    save(tmp_path / "whole.onnx", [*nodes, helper.make_node("Add", ["worded", "typed"], ["sum"])])
    assert not fold_types(tmp_path / "whole.onnx", tmp_path / "folded.onnx")
