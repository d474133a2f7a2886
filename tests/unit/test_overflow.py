"""How large values become, on a graph of a few nodes whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hasten.core.errors import StageError
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.quantize.calibration import Calibration
from hasten.quantize.overflow import Overflow, describe, overflows

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE)),),
    (TensorSpec("out", DType.FLOAT32, (BATCH, SEQUENCE)),),
    max_length=4096,
)


def graph_of(file: Path, *nodes: tuple[str, list[str], str], external: bool = False, **constants: object) -> Path:
    """Nodes by operator, inputs and output; `ids` are the input as floats."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    made = [helper.make_node("Cast", ["input_ids"], ["ids"], name="cast", to=TensorProto.FLOAT)]
    made += [helper.make_node(kind, inputs, [output], name=f"make {output}") for kind, inputs, output in nodes]
    graph = helper.make_graph(
        made,
        "graph",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save_model(model, file, save_as_external_data=external, location="weights.data", size_threshold=0)
    return file


def rows(*values: list[int]) -> Calibration:
    return Calibration(Batch.from_rows({"input_ids": list(values)}), SIGNATURE)


@pytest.mark.parametrize("external", [False, True])
def test_the_largest_of_all_batches_is_told(tmp_path: Path, external: bool) -> None:
    graph = graph_of(
        tmp_path / "graph.onnx",
        ("Mul", ["ids", "factor"], "far"),
        ("Div", ["far", "factor"], "out"),
        factor=[-1000.0],
        external=external,
    )
    # Of several batches: the longest comes first, the extreme is in the last.
    many = rows(*([[1, 2, 3]] * 500), [90])
    assert overflows(graph, many) == (Overflow("make far", "far", 90000.0),)


def test_half_the_range_is_left_for_other_texts(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Neg", ["ids"], "out"))
    assert overflows(graph, rows([32752])) == ()
    assert [one.operator for one in overflows(graph, rows([32753]))] == ["cast", "make out"]


def test_a_mask_is_not_computed(tmp_path: Path) -> None:
    lowest = float(np.finfo(np.float32).min)
    graph = graph_of(
        tmp_path / "graph.onnx", ("Mul", ["ids", "lowest"], "mask"), ("Softmax", ["mask"], "out"), lowest=[lowest]
    )
    assert overflows(graph, rows([0, 1, 1])) == ()


def test_a_weight_out_of_range_is_told_with_what_reads_it(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Mul", ["ids", "large"], "out"), large=[70000.0])
    assert overflows(graph, rows([0])) == (Overflow("make out", "large", 70000.0),)


def test_an_empty_tensor_has_no_largest(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Compress", ["ids", "none"], "few"), ("Neg", ["few"], "out"))
    import onnx

    model = onnx.load(graph)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(3, bool), "none"))
    onnx.save(model, graph)
    assert overflows(graph, rows([1, 2, 3])) == ()


def test_a_graph_that_fails_is_an_error(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "graph.onnx", ("Mul", ["ids", "three"], "out"), three=[1.0, 2.0, 3.0])
    with pytest.raises(StageError, match="how large values become cannot be measured"):
        overflows(graph, rows([1, 2]))


def test_the_line_for_people() -> None:
    one = Overflow("a", "x", 123456.0)
    assert describe([one]) == "1 operator kept in fp32: values reach 1.2e+05 (a)"
    more = [Overflow(name, name, 7e4) for name in "bcd"]
    assert describe([one, *more]) == "4 operators kept in fp32: values reach 1.2e+05 (a, b, c, …)"
