"""Conversion to fp16: positions stay exact, and named tensors stay in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package 'onnx' is not installed")

from hasten.backends import MODEL  # noqa: E402
from hasten.onnx_graph import operators  # noqa: E402
from hasten.quantize.methods.fp16 import convert_to_fp16  # noqa: E402

ROWS = 4000


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Look up row `position` of a table, rotate it by the angle `position`, and multiply it with a matrix."""
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    weights = {
        "table": random.normal(size=(ROWS, 8)).astype(np.float32),
        "matrix": random.normal(size=(8, 8)).astype(np.float32),
        "half": np.float32(0.5),
        "axis": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["ids"], ["doubled"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["doubled", "half"], ["position"]),
        # Both consumers of the position stay in fp32.
        helper.make_node("Cast", ["position"], ["row"], to=TensorProto.INT64),
        helper.make_node("Sin", ["position"], ["angle"]),
        helper.make_node("Gather", ["table", "row"], ["words"]),
        helper.make_node("Unsqueeze", ["angle", "axis"], ["rotation"]),
        helper.make_node("Mul", ["words", "rotation"], ["rotated"]),
        helper.make_node("MatMul", ["rotated", "matrix"], ["out"]),
    ]
    inner = helper.make_graph(
        nodes,
        "positions",
        [helper.make_tensor_value_info("ids", TensorProto.INT32, ["rows"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["rows", 8])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(inner, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    created = tmp_path / "fp16"
    created.mkdir()
    return created


def run_exactly(graph: Path, ids: list[int]) -> Any:
    """Run a graph with onnx's reference implementation: ONNX Runtime drops fp16 casts on CPUs."""
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(str(graph)).run(["out"], {"ids": np.array(ids, np.int32)})[0]


def test_positions_beyond_2048_stay_distinct(graph: Path, folder: Path) -> None:
    converted = convert_to_fp16({MODEL: graph}, folder, {})[MODEL]
    ids = [0, 14, 4098, 6006, 7778]
    expected, actual = run_exactly(graph, ids), run_exactly(converted, ids)
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() < 1e-2 * np.abs(expected).max()
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(converted).graph.initializer}
    assert weights["table"] == weights["matrix"] == onnx.TensorProto.FLOAT16


def test_overflow_tensors_stay_in_fp32(graph: Path, folder: Path) -> None:
    converted = convert_to_fp16({MODEL: graph}, folder, {MODEL: frozenset({"rotated"})})[MODEL]
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(converted).graph.initializer}
    assert weights["table"] == onnx.TensorProto.FLOAT16
    # Only a node that stays in fp32 reads it.
    assert weights["matrix"] == onnx.TensorProto.FLOAT
    assert operators(converted)["MatMul"] == 1
    ids = [3, 5001]
    assert np.abs(run_exactly(converted, ids) - run_exactly(graph, ids)).max() < 1e-2
