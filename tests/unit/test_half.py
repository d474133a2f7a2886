"""Graphs made in fp16: what fp16 cannot tell apart is computed in fp32, and casts stand once where several read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package 'onnx' is not installed")

from hasten.graph import operators  # noqa: E402
from hasten.quantize.half import halve  # noqa: E402

ROWS = 4000


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Row number `place` of a table, turned by the angle `place`, and multiplied with a matrix."""
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0)
    weights = {
        "table": draw.normal(size=(ROWS, 8)).astype(np.float32),
        "matrix": draw.normal(size=(8, 8)).astype(np.float32),
        "half": np.float32(0.5),
        "axis": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["ids"], ["doubled"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["doubled", "half"], ["place"]),
        # Two that read the same, both of which stay in fp32.
        helper.make_node("Cast", ["place"], ["row"], to=TensorProto.INT64),
        helper.make_node("Sin", ["place"], ["angle"]),
        helper.make_node("Gather", ["table", "row"], ["words"]),
        helper.make_node("Unsqueeze", ["angle", "axis"], ["turn"]),
        helper.make_node("Mul", ["words", "turn"], ["turned"]),
        helper.make_node("MatMul", ["turned", "matrix"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "places",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, ["rows"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["rows", 8])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    file = tmp_path / "places.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


def answer(graph: Path, ids: list[int]) -> Any:
    """By onnx's own interpreter, in the very types that a graph names: ONNX Runtime's CPU leaves out casts."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(str(graph)).run(["out"], {"ids": np.array(ids, np.int32)})[0]


def test_places_are_told_apart(places: Path, tmp_path: Path) -> None:
    halved = tmp_path / "halved.onnx"
    halve(places, halved, frozenset(), external_data=False)
    ids = [0, 14, 4098, 6006, 7778]
    expected, found = answer(places, ids), answer(halved, ids)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(halved).graph.initializer}
    assert weights["table"] == weights["matrix"] == onnx.TensorProto.FLOAT16


def test_what_is_named_stays_in_fp32(places: Path, tmp_path: Path) -> None:
    halved = tmp_path / "halved.onnx"
    halve(places, halved, frozenset({"turned"}), external_data=False)
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(halved).graph.initializer}
    assert weights["table"] == onnx.TensorProto.FLOAT16
    # It is read by what stays alone.
    assert weights["matrix"] == onnx.TensorProto.FLOAT
    assert operators(halved)["MatMul"] == 1
    ids = [3, 5001]
    assert np.abs(answer(halved, ids) - answer(places, ids)).max() < 1e-2
