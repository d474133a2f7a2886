"""What an engine of TensorRT is planned by: shapes, places, and the types of a graph. None of it needs TensorRT."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hasten.backends.tensorrt import BACKEND
from hasten.backends.tensorrt.engine import loading_error, write_whole
from hasten.backends.tensorrt.planning import (
    Order,
    Place,
    Profile,
    Record,
    dims,
    engine_name,
    fitting,
    profiles,
    read_record,
    timings_name,
)
from hasten.backends.tensorrt.typed import HALVES, stored_in, write_typed
from hasten.core.errors import StageError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.plan import Plan, PlanError, Range, Shapes
from hasten.core.tensors import BATCH, SEQUENCE, DType, Shape, TensorSpec
from hasten.core.variant import Precision, Variant

onnx: Any = pytest.importorskip("onnx")
FLOAT, FLOAT16, BFLOAT16, INT8 = (
    onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT8
)  # fmt: skip
FLOAT8 = onnx.TensorProto.FLOAT8E4M3FN
HERE = Place("NVIDIA H200", "9.0", "11.4.0")
ORDER = Order((Profile(Shape(1, 16), Shape(8, 128), Shape(32, 256)),), 2**30)


def shapes(batch: tuple[int, int, int], sequence: tuple[int, int, int]) -> Shapes:
    return Shapes(Range(*batch), Range(*sequence))


@pytest.mark.parametrize(
    ("asked", "limit", "expected"),
    [
        # What was asked for, and all the rest.
        (((1, 8, 32), (16, 128, 256)), 512, ["1×16 8×128 32×256", "1×1 1×512 32×512"]),
        # A model that takes less than was asked for.
        (((1, 8, 32), (16, 128, 256)), 64, ["1×16 8×64 32×64", "1×1 1×64 32×64"]),
        # All that it takes was asked for.
        (((1, 2, 4), (1, 16, 64)), 64, ["1×1 2×16 4×64"]),
        # transformer-deploy's default: one shape.
        (((1, 1, 1), (16, 16, 16)), 512, ["1×16 1×16 1×16", "1×1 1×512 1×512"]),
    ],
)
def test_profiles(asked: Any, limit: int, expected: list[str]) -> None:
    found = profiles(shapes(*asked), limit)
    assert [f"{one.min} {one.opt} {one.max}" for one in found] == expected


@pytest.mark.parametrize("limit", [8, 64, 300, 512])
def test_every_batch_that_may_come_fits_a_profile(limit: int) -> None:
    """No text within the model's limit is refused for its length, and no batch of the largest size."""
    spec = TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE))
    found = profiles(shapes((2, 4, 8), (16, 32, 256)), limit)
    ranges = [{spec.name: (dims(spec, one.min), dims(spec, one.max))} for one in found]
    for rows in (1, 2, 8):
        for length in {1, 15, 16, 17, 255, 256, 257, limit} & set(range(1, limit + 1)):
            assert fitting(ranges, {spec.name: dims(spec, Shape(rows, length))}) is not None
    assert fitting(ranges, {spec.name: (9, limit)}) is None
    assert fitting(ranges, {spec.name: (1, limit + 1)}) is None
    assert fitting(ranges, {spec.name: (limit,)}) is None


def test_the_profile_that_was_asked_for_comes_first() -> None:
    ranges = [{"a": ((1, 16), (4, 64))}, {"a": ((1, 1), (4, 512))}]
    assert [fitting(ranges, {"a": size}) for size in ((4, 64), (1, 15), (1, 65), (5, 16))] == [0, 1, 1, None]


def test_sizes_that_are_no_axis_stay() -> None:
    assert dims(TensorSpec("pixels", DType.FLOAT32, (BATCH, 3, SEQUENCE)), Shape(2, 7)) == (2, 3, 7)


def test_another_engine_has_another_name(tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    graph.write_bytes(b"graph")
    first = engine_name(graph, ORDER, HERE)
    assert engine_name(graph, replace(ORDER), replace(HERE)) == first
    others = {
        engine_name(graph, replace(ORDER, workspace_bytes=None), HERE),
        engine_name(graph, replace(ORDER, profiles=ORDER.profiles * 2), HERE),
        engine_name(graph, ORDER, replace(HERE, capability="8.9")),
        engine_name(graph, ORDER, replace(HERE, tensorrt="11.4.1")),
    }
    (tmp_path / "model.onnx.data").write_bytes(b"weights")
    others.add(engine_name(graph, ORDER, HERE))
    (tmp_path / "model.onnx.data").write_bytes(b"others")
    others.add(engine_name(graph, ORDER, HERE))
    assert len(others - {first}) == 6


def test_a_gpus_name_becomes_a_files() -> None:
    assert timings_name(Place("NVIDIA A100/SXM 80GB", "8.0", "10.13.3")) == "NVIDIA_A100_SXM_80GB-8.0-10.13.3.timings"


def test_the_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(HERE, ORDER, Precision.FP16, {"input_ids": DType.INT64}, {"logits": DType.FLOAT32})
    file = tmp_path / "model.json"
    file.write_bytes(msgspec.json.encode(record))
    assert read_record(file) == record
    for broken in (b"", b"{}", b"\xff", file.read_bytes()[:-3], file.read_bytes().replace(b"fp16", b"fp17")):
        file.write_bytes(broken)
        with pytest.raises(StageError, match="does not say what its engine is"):
            read_record(file)
    with pytest.raises(StageError):
        read_record(tmp_path / "nowhere.json")


def test_a_file_of_the_cache_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "new" / "timings"
    for content in (b"first", b"second"):
        write_whole(file, memoryview(content))
        assert file.read_bytes() == content
    assert [path.name for path in file.parent.iterdir()] == ["timings"]


@pytest.mark.parametrize(
    ("variant", "capability", "reason"),
    [
        ("tensorrt-fp16@cuda", "7.5", ""),
        ("tensorrt-fp16@cuda", "7.0", "fp16 needs compute capability 7.5; Card has 7.0"),
        ("tensorrt-bf16@cuda", "7.5", "bf16 needs compute capability 8.0; Card has 7.5"),
        ("tensorrt-bf16@cuda", "12.0", ""),
        ("tensorrt-fp8@cuda", "8.6", "fp8 needs compute capability 8.9; Card has 8.6"),
        ("tensorrt-int8@cuda", "9.0", ""),
        ("tensorrt-int4@cuda", "9.0", "it does not compute in int4"),
        ("tensorrt-fp16", "9.0", "it runs on 'cuda', not on 'cpu'"),
    ],
)
def test_what_runs_on_a_gpu(variant: str, capability: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.backends.find_spec", lambda _: object())
    monkeypatch.setattr("hasten.backends.tensorrt.loading_error", lambda: None)
    machine = replace(this_machine(), gpus=(Gpu("Card", 2**34, capability, "580"),))
    support = BACKEND.probe(machine, Variant.parse(variant))
    assert (support.ok, support.reason) == (not reason, reason)


def test_packages_without_their_libraries_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyPI has them: they are found, and do not load."""
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.setattr("hasten.backends.find_spec", lambda _: object())
    monkeypatch.setattr("hasten.backends.tensorrt.loading_error", loading_error.__wrapped__)
    machine = replace(this_machine(), gpus=(Gpu("Card", 2**34, "9.0", "580"),))
    assert BACKEND.probe(machine).reason == "TensorRT does not load: libnvinfer.so.11: no such file"


def test_without_a_gpu_nothing_is_offered() -> None:
    machine = replace(this_machine(), gpus=())
    assert BACKEND.variants(machine) == []
    assert BACKEND.probe(machine).reason == "there is no NVIDIA GPU here"


def test_a_workspace_of_nothing() -> None:
    with pytest.raises(PlanError, match="--workspace-size 0 is less than one MiB"):
        Plan("m", workspace_mib=0)


def graph_of(nodes: list[Any], weights: dict[str, Any], opset: int = 17) -> Any:
    """Of tokens [batch, sequence, 4] to an output of the same shape, or of what the nodes make of it."""
    tokens = onnx.helper.make_tensor_value_info("x", FLOAT, ["batch", "sequence", 4])
    mask = onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.INT64, ["batch", "sequence"])
    output = onnx.helper.make_tensor_value_info("y", FLOAT, ["rows", "columns", "values"])
    stored = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = onnx.helper.make_graph(nodes, "graph", [tokens, mask], [output], stored)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)


def node(operator: str, inputs: str, output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(operator, inputs.split(), [output], name=output, **attributes)


def written(model: Any, folder: Path, precision: Precision, beyond: frozenset[str] = frozenset()) -> Any:
    onnx.save_model(model, folder / "fp32.onnx")
    write_typed(folder / "fp32.onnx", folder / "typed.onnx", precision, beyond)
    return onnx.load(folder / "typed.onnx")


def types(model: Any) -> dict[str, int]:
    """Of every tensor that a node of ours makes, as ONNX itself infers them; casts between the two left out."""
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    kinds = {entry.name: entry.type.tensor_type.elem_type for entry in (*inferred.value_info, *inferred.output)}
    return {one.name: kinds[one.output[0]] for one in inferred.node if not one.name.endswith("/cast")}


def run(model: Any, feeds: dict[str, Any]) -> Any:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    # As it is: ONNX Runtime puts a norm together again across casts, and then refuses what it made.
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def tokens(seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], np.int64)
    return {"x": draw.normal(size=(2, 5, 4)).astype(np.float32), "mask": mask}


def attention() -> Any:
    """Scores of tokens among each other, with a mask's minus infinity, in the manner of an exported BERT."""
    draw = np.random.default_rng(1)
    nodes = [
        node("MatMul", "x wq", "q"),
        node("Transpose", "x", "k", perm=[0, 2, 1]),
        node("MatMul", "q k", "scores"),
        node("Div", "scores two", "scaled"),
        node("Unsqueeze", "mask axes", "wide_mask"),
        node("Cast", "wide_mask", "float_mask", to=FLOAT),
        node("Sub", "one float_mask", "masked"),
        node("Mul", "masked least", "infinity"),
        node("Add", "scaled infinity", "added"),
        node("Softmax", "added", "shares", axis=-1),
        node("MatMul", "shares x", "y"),
    ]
    weights = {
        "wq": draw.normal(size=(4, 4)).astype(np.float32),
        "two": np.float32(2.0),
        "one": np.float32(1.0),
        "axes": np.array([1], np.int64),
        "least": np.float32(np.finfo(np.float32).min),
    }
    return graph_of(nodes, weights)


@pytest.mark.parametrize(("precision", "half"), [(Precision.FP16, FLOAT16), (Precision.BF16, BFLOAT16)])
def test_softmax_and_its_mask_stay_in_fp32(precision: Precision, half: int, tmp_path: Path) -> None:
    typed = written(attention(), tmp_path, precision)
    found = types(typed)
    assert {found[name] for name in ("q", "k", "scores")} == {half}
    wide = ("scaled", "float_mask", "masked", "infinity", "added", "shares")
    assert {found[name] for name in wide} == {FLOAT}
    # Answers look as before: the last product is in half precision, and a cast gives it back.
    assert found["y"] == half
    assert typed.graph.output[0].type.tensor_type.elem_type == FLOAT
    assert {tensor.name: tensor.data_type for tensor in typed.graph.initializer if tensor.name.startswith("wq")} == {
        f"wq/{precision}": half
    }
    assert stored_in(typed) is precision


def test_masked_scores_come_out_right_in_fp16(tmp_path: Path) -> None:
    """-3.4e38 is minus infinity in fp16, and nothing times it is not a number."""
    typed = written(attention(), tmp_path, Precision.FP16)
    ours, theirs = run(typed, tokens()), run(attention(), tokens())
    assert np.abs(ours - theirs).max() < 5e-3
    assert np.abs(ours - theirs).max() > 0


def test_a_norm_that_is_written_out_stays_in_fp32(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x w", "before"),
        node("ReduceMean", "before", "mean", axes=[-1]),
        node("Sub", "before mean", "centred"),
        node("Pow", "centred two", "squares"),
        node("ReduceMean", "squares", "variance", axes=[-1]),
        node("Add", "variance epsilon", "above_zero"),
        node("Sqrt", "above_zero", "deviation"),
        node("Div", "centred deviation", "normed"),
        node("Mul", "normed gain", "scaled"),
        node("Add", "scaled bias", "whole"),
        node("MatMul", "whole w", "y"),
    ]
    weights = {
        "w": np.eye(4, dtype=np.float32) * 300,
        "two": np.float32(2),
        "epsilon": np.float32(1e-12),
        "gain": np.full(4, 1e-2, np.float32),
        "bias": np.ones(4, np.float32),
    }
    typed = written(graph_of(nodes, weights), tmp_path, Precision.FP16)
    found = types(typed)
    inside = ("mean", "centred", "squares", "variance", "above_zero", "deviation", "normed", "scaled", "whole")
    assert {found[name] for name in inside} == {FLOAT}
    assert (found["before"], found["y"]) == (FLOAT16, FLOAT16)
    # The squares are beyond fp16, and epsilon is nothing there.
    ours, theirs = run(typed, tokens()), run(graph_of(nodes, weights), tokens())
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


def test_whole_numbers_are_computed_in_fp32(tmp_path: Path) -> None:
    """As the buckets of relative positions are: in fp16, 2049 would be 2048."""
    nodes = [
        node("Cast", "mask", "floats", to=FLOAT),
        node("Add", "floats many", "sum"),
        node("Log", "sum", "log"),
        node("Mul", "log many", "scaled"),
        node("Cast", "scaled", "whole", to=onnx.TensorProto.INT64),
        node("Mod", "whole four", "buckets"),
        node("Gather", "table buckets", "looked_up"),
        node("MatMul", "looked_up w", "y"),
    ]
    weights = {
        "many": np.float32(2048.0),
        "four": np.int64(4),
        "table": np.eye(4, dtype=np.float32),
        "w": np.eye(4, dtype=np.float32),
    }
    typed = written(graph_of(nodes, weights), tmp_path, Precision.FP16)
    found = types(typed)
    assert {found[name] for name in ("floats", "sum", "log", "scaled")} == {FLOAT}
    assert {found[name] for name in ("looked_up", "y")} == {FLOAT16}
    assert (run(typed, tokens()) == run(graph_of(nodes, weights), tokens())).all()


def test_what_leaves_the_range_stays_in_fp32(tmp_path: Path) -> None:
    large = {"up": np.eye(4, dtype=np.float32) * 1e6, "down": np.eye(4, dtype=np.float32) * 1e-6}
    nodes = [
        node("MatMul", "x w", "first"),
        node("MatMul", "first up", "large"),
        node("MatMul", "large down", "small"),
        node("Tanh", "small", "y"),
    ]
    model = graph_of(nodes, {"w": np.eye(4, dtype=np.float32), **large})
    typed = written(model, tmp_path, Precision.FP16, frozenset({"large"}))
    assert {name: types(typed)[name] for name in ("first", "large", "small", "y")} == {
        "first": FLOAT16,
        "large": FLOAT,
        "small": FLOAT,
        "y": FLOAT16,
    }
    assert np.isfinite(run(typed, tokens())).all()


def test_a_weight_that_is_read_in_both_precisions_is_stored_in_both(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "product"), node("Add", "product b", "sum"), node("Softmax", "b", "soft", axis=-1)]
    nodes.append(node("Mul", "sum soft", "y"))
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.arange(4, dtype=np.float32)}
    typed = written(graph_of(nodes, weights), tmp_path, Precision.FP16)
    stored = {tensor.name: tensor.data_type for tensor in typed.graph.initializer}
    assert stored == {"w/fp16": FLOAT16, "b": FLOAT, "b/fp16": FLOAT16}


def test_an_output_that_is_read_again_keeps_its_type(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "y"), node("Tanh", "y", "z")]
    model = graph_of(nodes, {"w": np.eye(4, dtype=np.float32)})
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", FLOAT, ["rows", "columns", 4]))
    typed = written(model, tmp_path, Precision.FP16)
    assert [entry.type.tensor_type.elem_type for entry in typed.graph.output] == [FLOAT, FLOAT]
    assert np.abs(run(typed, tokens()) - tokens()["x"]).max() < 5e-3


def test_what_a_branch_reads_stays_in_fp32(tmp_path: Path) -> None:
    """Its own operators do: nobody looks into it."""
    branches = {}
    for name in ("then", "else"):
        out = onnx.helper.make_tensor_value_info(f"{name}_out", FLOAT, ["rows", "columns", 4])
        branches[f"{name}_branch"] = onnx.helper.make_graph(
            [onnx.helper.make_node("Tanh" if name == "then" else "Relu", ["product"], [f"{name}_out"])], name, [], [out]
        )
    nodes = [node("MatMul", "x w", "product"), node("If", "is_so", "chosen", **branches)]
    nodes.append(node("MatMul", "chosen w", "y"))
    model = graph_of(nodes, {"w": np.eye(4, dtype=np.float32), "is_so": np.array(True)})
    typed = written(model, tmp_path, Precision.FP16)
    found = types(typed)
    assert (found["product"], found["chosen"], found["y"]) == (FLOAT, FLOAT, FLOAT16)
    assert np.abs(run(typed, tokens()) - run(model, tokens())).max() < 5e-3


def test_an_operator_that_onnx_does_not_have_in_bf16_stays_in_fp32(tmp_path: Path) -> None:
    """Conv is one, before opset 22."""
    nodes = [node("Transpose", "x", "across", perm=[0, 2, 1]), node("Conv", "across w", "y")]
    weights = {"w": np.ones((2, 4, 1), np.float32)}
    for opset, precision, kind in (
        (17, Precision.BF16, FLOAT),
        (17, Precision.FP16, FLOAT16),
        (22, Precision.BF16, BFLOAT16),
    ):
        assert types(written(graph_of(nodes, weights, opset), tmp_path, precision))["y"] == kind


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceL2"])
def test_reductions_with_axes_among_their_inputs_are_followed(operator: str, tmp_path: Path) -> None:
    """As opset 18 has them: BART finds the last token of a text so."""
    nodes = [
        node("MatMul", "x w", "product"),
        node(operator, "product last", "reduced", keepdims=0),
        node("Unsqueeze", "reduced last", "row"),
        node("Mul", "row w_2", "y"),
    ]
    weights = {"w": np.eye(4, dtype=np.float32), "last": np.array([2]), "w_2": np.full((1, 1, 4), 2, np.float32)}
    model = graph_of(nodes, weights, opset=19)
    typed = written(model, tmp_path, Precision.FP16)
    assert {one.name: one.op_type for one in typed.graph.node}["reduced"] == operator
    assert types(typed)["product"] == FLOAT16
    np.testing.assert_allclose(run(typed, tokens()), run(model, tokens()), rtol=2e-3)


def quantized(kind: int, *, from_float: bool, opset: int = 19) -> Any:
    """Pairs of operators as quantizers write them: weights stored as bytes, or rounded on the way."""
    stored = onnx.helper.tensor_dtype_to_np_dtype(kind)
    weights = {"scale": np.float32(0.1), "zero": np.zeros((), stored)}
    weights["w"] = np.eye(4, dtype=np.float32) if from_float else np.eye(4).astype(stored)
    nodes = [node("QuantizeLinear", "x scale zero", "bytes"), node("DequantizeLinear", "bytes scale zero", "floats")]
    if from_float:
        nodes.append(node("QuantizeLinear", "w scale zero", "w_bytes"))
    nodes.append(node("DequantizeLinear", f"{'w_bytes' if from_float else 'w'} scale zero", "w_floats"))
    nodes += [node("MatMul", "floats w_floats", "product"), node("Tanh", "product", "y")]
    return graph_of(nodes, weights, opset)


@pytest.mark.parametrize("from_float", [True, False])
@pytest.mark.parametrize(("kind", "precision"), [(INT8, Precision.INT8), (FLOAT8, Precision.FP8)])
def test_beside_eight_bits_stands_fp16(kind: int, precision: Precision, from_float: bool, tmp_path: Path) -> None:
    """What is dequantized has the type of its scale, and so has the product behind it: no cast between them."""
    model = quantized(kind, from_float=from_float)
    assert stored_in(model) is precision
    typed = written(model, tmp_path, precision)
    assert stored_in(typed) is precision
    found = types(typed)
    assert found["bytes"] == kind
    assert {found[name] for name in ("floats", "w_floats", "product", "y")} == {FLOAT16}
    operators = [one.op_type for one in typed.graph.node]
    assert operators == ["Cast", *(one.op_type for one in model.graph.node), "Cast"]
    stored = {tensor.name: tensor for tensor in typed.graph.initializer}
    assert stored.keys() == {"scale/fp16", "zero", "w/fp16" if from_float else "w"}
    assert stored["scale/fp16"].data_type == FLOAT16
    if not from_float:
        assert stored["w"] == next(tensor for tensor in model.graph.initializer if tensor.name == "w")


def test_an_older_quantized_graph_is_taken_as_it_comes(tmp_path: Path) -> None:
    """Before opset 19 scales are fp32: a cast behind them would take the product out of eight bits."""
    model = quantized(INT8, from_float=False, opset=17)
    typed = written(model, tmp_path, Precision.INT8)
    assert [one.op_type for one in typed.graph.node] == [one.op_type for one in model.graph.node]
    assert list(typed.graph.initializer) == list(model.graph.initializer)


def two_products(second: Any) -> Any:
    """Of the same eight bits, behind a norm and before a softmax; each with a scale for each channel of its weights."""
    draw = np.random.default_rng(3)
    nodes = [
        node("LayerNormalization", "x gain", "normed", axis=-1),
        node("Mul", "normed gain", "scaled"),
        node("QuantizeLinear", "scaled scale zero", "bytes"),
        node("DequantizeLinear", "bytes scale zero", "floats"),
        *(node("DequantizeLinear", f"w_{name} scale_{name} zeros", f"floats_{name}", axis=1) for name in "ab"),
        *(node("MatMul", f"floats floats_{name}", name) for name in "ab"),
        node("Add", "a b", "sum"),
        node("Softmax", "sum", "shares", axis=-1),
        node("QuantizeLinear", "shares small zero", "share_bytes"),
        node("DequantizeLinear", "share_bytes small zero", "share_floats"),
        node("Transpose", "share_floats", "turned", perm=[0, 2, 1]),
        node("MatMul", "turned floats", "y"),
    ]
    weights = {f"w_{name}": draw.integers(-127, 128, (4, 4)).astype(np.int8) for name in "ab"}
    scales = {"scale": np.float32(0.02), "small": np.float32(1 / 127), "scale_a": np.full(4, 0.01, np.float32)}
    zeros = {"zero": np.int8(0), "zeros": np.zeros(4, np.int8)}
    gain = {"gain": np.ones(4, np.float32), "scale_b": np.asarray(second, np.float32)}
    return graph_of(nodes, weights | scales | zeros | gain, opset=19)


def test_norms_and_softmax_around_eight_bits_stay_in_fp32(tmp_path: Path) -> None:
    model = two_products([0.01, 0.02, 0.03, 0.04])
    typed = written(model, tmp_path, Precision.INT8)
    found = types(typed)
    assert {name for name, kind in found.items() if kind == FLOAT} == {"normed", "sum", "shares"}
    assert {name for name, kind in found.items() if kind == INT8} == {"bytes", "share_bytes"}
    ours, theirs = run(typed, tokens()), run(model, tokens())
    assert 0 < np.abs(ours - theirs).max() < 2e-2 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("second", "beyond"),
    [
        # In fp16 the last of them would be nothing, or off by more than eight bits can tell.
        ([0.01, 0.02, 0.03, 1e-14], frozenset()),
        ([0.01, 0.02, 0.03, 3e-7], frozenset()),
        ([0.01, 0.02, 0.03, 0.04], frozenset({"b"})),
    ],
)
def test_who_shares_eight_bits_stays_in_fp32_together(second: Any, beyond: frozenset[str], tmp_path: Path) -> None:
    """A cast between what is dequantized and its product would have the product computed in float."""
    model = two_products(second)
    typed = written(model, tmp_path, Precision.INT8, beyond)
    found = types(typed)
    assert {found[name] for name in ("floats", "floats_a", "floats_b", "a", "b", "share_floats", "y")} == {FLOAT}
    # One where the pair begins, and one back.
    assert [one.output[0] for one in typed.graph.node if one.op_type == "Cast"] == ["normed/fp16", "scaled/fp32"]
    assert np.abs(run(typed, tokens()) - run(model, tokens())).max() < 2e-2
    assert stored_in(typed) is Precision.INT8


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.FP8])
def test_a_graph_of_another_precision_is_refused(precision: Precision, tmp_path: Path) -> None:
    """What computes in int8 must not be called something else, nor the other way round."""
    with pytest.raises(StageError, match=f"int8 weights does not become one in {precision}"):
        written(quantized(INT8, from_float=False), tmp_path, precision)
    with pytest.raises(StageError, match="fp32 weights does not become one in int8") as caught:
        written(attention(), tmp_path, Precision.INT8)
    assert "tensorrt-fp16@cuda takes it" in str(caught.value.hint)


@pytest.mark.parametrize("operator", ["MatMulInteger", "FusedMatMul"])
def test_operators_that_tensorrt_has_not_are_refused(operator: str, tmp_path: Path) -> None:
    """ONNX Runtime's dynamic int8, and what it fuses."""
    domain = "com.microsoft" if operator == "FusedMatMul" else ""
    model = graph_of([node(operator, "x w", "y", domain=domain)], {"w": np.eye(4, dtype=np.float32)})
    with pytest.raises(StageError, match=f"TensorRT has no operator {operator}"):
        written(model, tmp_path, Precision.INT8)


def test_where_nothing_can_be_in_fp16_the_graph_says_so(tmp_path: Path) -> None:
    onnx.save_model(attention(), tmp_path / "fp32.onnx")
    found = [
        write_typed(tmp_path / "fp32.onnx", tmp_path / "typed.onnx", Precision.FP16, beyond)
        for beyond in (frozenset(), frozenset({"q"}))
    ]
    assert found == [Precision.FP16, Precision.FP32]


def test_shapes_are_written_into_the_graph(tmp_path: Path) -> None:
    typed = written(attention(), tmp_path, Precision.FP32)
    found = {
        entry.name: [size.dim_param or size.dim_value for size in entry.type.tensor_type.shape.dim]
        for entry in typed.graph.value_info
    }
    assert found["q"] == ["batch", "sequence", 4]
    assert found["scores"] == ["batch", "sequence", "sequence"]


def test_the_limits_are_those_of_the_types() -> None:
    import ml_dtypes

    assert HALVES[Precision.FP16] == np.finfo(np.float16).max
    assert HALVES[Precision.BF16] == float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
