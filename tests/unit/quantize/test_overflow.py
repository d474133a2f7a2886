"""Detection of values beyond the range of fp16, on small graphs with known values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hasten.core.errors import StageError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, IntArray, Signature, TensorSpec
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.overflow import Overflow, describe_overflows, find_overflows

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE)),),
    (TensorSpec("out", DType.FLOAT32, (BATCH, SEQUENCE)),),
    max_length=4096,
)


def graph_of(file: Path, *nodes: tuple[str, list[str], str], external: bool = False, **constants: object) -> Path:
    """Save a graph of nodes (operator, inputs, output); `ids` is the input as floats."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    all_nodes = [helper.make_node("Cast", ["input_ids"], ["ids"], name="cast", to=TensorProto.FLOAT)]
    all_nodes += [helper.make_node(kind, inputs, [output], name=f"make {output}") for kind, inputs, output in nodes]
    graph = helper.make_graph(
        all_nodes,
        "graph",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save_model(model, file, save_as_external_data=external, location="weights.data", size_threshold=0)
    return file


def rows(*values: list[int]) -> Iterator[dict[str, IntArray]]:
    return Calibration(Batch.from_rows({"input_ids": list(values)}), SIGNATURE).feeds()


@pytest.mark.parametrize("external", [False, True])
def test_largest_value_of_all_batches_is_reported(tmp_path: Path, external: bool) -> None:
    graph = graph_of(
        tmp_path / "graph.onnx",
        ("Mul", ["ids", "factor"], "far"),
        ("Div", ["far", "factor"], "out"),
        factor=[-1000.0],
        external=external,
    )
    # Several batches: the longest rows come first, the extreme value is in the last batch.
    batches = rows(*([[1, 2, 3]] * 500), [90])
    assert find_overflows(graph, batches) == (Overflow("make far", "far", 90000.0),)


def test_values_beyond_half_the_range_are_overflows(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Neg", ["ids"], "out"))
    assert find_overflows(graph, rows([32752])) == ()
    assert [overflow.operator for overflow in find_overflows(graph, rows([32753]))] == ["cast", "make out"]


def test_infinity_of_a_mask_is_not_an_overflow(tmp_path: Path) -> None:
    lowest = float(np.finfo(np.float32).min)
    graph = graph_of(
        tmp_path / "graph.onnx", ("Mul", ["ids", "lowest"], "mask"), ("Softmax", ["mask"], "out"), lowest=[lowest]
    )
    assert find_overflows(graph, rows([0, 1, 1])) == ()


def test_weight_out_of_range_is_reported_with_its_consumer(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Mul", ["ids", "large"], "out"), large=[70000.0])
    assert find_overflows(graph, rows([0])) == (Overflow("make out", "large", 70000.0),)


def test_empty_tensor_is_not_an_overflow(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Compress", ["ids", "none"], "few"), ("Neg", ["few"], "out"))
    import onnx

    model = onnx.load(graph)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, bool), "none"))
    onnx.save(model, graph)
    assert find_overflows(graph, rows([1, 2, 3])) == ()


def test_failing_graph_is_a_stage_error(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Mul", ["ids", "three"], "out"), three=[1.0, 2.0, 3.0])
    with pytest.raises(StageError, match="the range of activations cannot be measured"):
        find_overflows(graph, rows([1, 2]))


def test_description_names_the_first_operators() -> None:
    first = Overflow("a", "x", 123456.0)
    assert describe_overflows([first]) == "1 operator kept in fp32: values reach 1.2e+05 (a)"
    more = [Overflow(name, name, 7e4) for name in "bcd"]
    assert describe_overflows([first, *more]) == "4 operators kept in fp32: values reach 1.2e+05 (a, b, c, …)"
