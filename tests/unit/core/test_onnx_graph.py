"""Graphs are written and merged with their weights one at a time, in the encoding of protobuf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.onnx_graph import has_external_data, merge_weights, read_graph, write_graph  # noqa: E402


def small_model() -> Any:
    """Return a model with weights of several types and encodings, an empty one among them."""
    weights = [
        numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), "weight"),
        numpy_helper.from_array(np.arange(4, dtype=np.int64), "shift"),
        numpy_helper.from_array(np.zeros((0, 4), np.float32), "empty"),
        helper.make_tensor("listed", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0]),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"], "product"),
        helper.make_node("Cast", ["shift"], ["shift_float"], to=TensorProto.FLOAT),
        helper.make_node("Sum", ["product", "shift_float", "listed"], ["sum"]),
        helper.make_node("Concat", ["sum", "empty"], ["y"], axis=0),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", None]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], weights, doc_string="kept")
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="tests")


@pytest.mark.parametrize("external", [False, True])
def test_written_graph_equals_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool) -> None:
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 16)
    file, expected = tmp_path / "model.onnx", small_model()
    write_graph(small_model(), file, external_data=external)
    assert has_external_data(file) == external
    merge_weights(file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    model = read_graph(file)
    onnx.checker.check_model(model, full_check=True)
    assert [(each.name, each.dims) for each in model.graph.initializer] == [
        (each.name, each.dims) for each in expected.graph.initializer
    ]
    for ours, theirs in zip(model.graph.initializer, expected.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(ours), numpy_helper.to_array(theirs))
    del model.graph.initializer[:], expected.graph.initializer[:]
    assert model == expected


def test_large_graph_keeps_its_weights_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 16)
    monkeypatch.setattr("hasten.onnx_graph.EXTERNAL_DATA_BYTES", 0)
    write_graph(small_model(), tmp_path / "model.onnx", external_data=True)
    merge_weights(tmp_path / "model.onnx")
    assert has_external_data(tmp_path / "model.onnx")
