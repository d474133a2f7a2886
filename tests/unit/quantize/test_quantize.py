"""Every quantization method: operators, what stays in float, and reproducible bytes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from hasten.backends import BACKENDS, Artifact, RunOptions  # noqa: E402
from hasten.backends.onnxruntime import stored_precision  # noqa: E402
from hasten.core.errors import InputError, PlanError, StageError, UnsupportedError  # noqa: E402
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec, pad  # noqa: E402
from hasten.core.variant import Precision, Variant  # noqa: E402
from hasten.onnx_graph import operators  # noqa: E402
from hasten.quantize.analysis.calibration import Calibration  # noqa: E402
from hasten.quantize.apply import make_graph  # noqa: E402
from hasten.quantize.methods.static import find_ranges, quantize_static  # noqa: E402
from hasten.quantize.recipe import Calibrator, Method, Recipe, read_recipe  # noqa: E402
from support.int8 import TARGET, recipe_here  # noqa: E402

WORDS, WIDTH, INNER = 40, 32, 64
SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),),
    (TensorSpec("logits", DType.FLOAT32, (BATCH, 3)),),
    max_length=64,
)
LONGEST = 20
ROWS = [[3, 17, 39, 5], [8], list(range(LONGEST)), [1, 1, 2, 30, 31]]
OPENVINO_METHODS = (Method.NNCF, Method.WEIGHTS)
CALIBRATION = Calibration(Batch.from_rows({"input_ids": ROWS}), SIGNATURE)
KEPT = "down"


def node(kind: str, inputs: list[str], output: str, name: str | None = None, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, [output], name=name or output, **attributes)


def save(file: Path, *, attention: bool = False, score_bias: bool = False) -> Path:
    """Save a graph of a lookup, a feed-forward layer with residual and a head; optionally with fused attention."""
    random = np.random.default_rng(5)
    shapes = {"words": (WORDS, WIDTH), "up_weight": (WIDTH, INNER), "down_weight": (INNER, WIDTH)}
    shapes |= {"head_weight": (3, WIDTH), "head_bias": (3,), "beside_weight": (WIDTH, WIDTH)}
    shapes |= {"qkv": (WIDTH, 3 * WIDTH), "qkv_bias": (3 * WIDTH,)} if attention else {}
    tensors = [numpy_helper.from_array(random.normal(size=s).astype(np.float32), name) for name, s in shapes.items()]
    tensors.append(numpy_helper.from_array(np.array(0), "first"))
    nodes = [node("Gather", ["words", "input_ids"], "embedded")]
    hidden = "embedded"
    if attention:
        bias = ["", "", "scores"] if score_bias else []
        attributes = {"domain": "com.microsoft", "num_heads": 4}
        nodes.append(node("Attention", ["embedded", "qkv", "qkv_bias", *bias], "attended", "attention", **attributes))
        # A matmul reads the same tensor as attention.
        nodes.append(node("MatMul", ["embedded", "beside_weight"], "beside"))
        nodes.append(node("Add", ["attended", "beside"], "hidden"))
        hidden = "hidden"
    if score_bias:
        tensors.append(numpy_helper.from_array(np.zeros((1, 4, LONGEST, LONGEST), np.float32), "scores"))
    nodes += [
        node("MatMul", [hidden, "up_weight"], "up"),
        node("Relu", ["up"], "active"),
        node("MatMul", ["active", "down_weight"], KEPT),
        node("Add", [hidden, KEPT], "sum"),
        node("Gather", ["sum", "first"], "pooled", axis=1),
        node("Gemm", ["pooled", "head_weight", "head_bias"], "logits", "head", transB=1),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT32, ["batch", "sequence"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    if not attention:
        tensors = [tensor for tensor in tensors if tensor.name != "beside_weight"]
    graph = helper.make_graph(nodes, "test", [ids], [logits], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)
    return file


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save(tmp_path / "plain.onnx")


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    return save(tmp_path / "fused.onnx", attention=True)


def recipe_for(method: Method, graph: Path, calibration: Calibration = CALIBRATION, **fields: Any) -> Recipe:
    """Return a complete recipe, with ranges or the digest of the rows if its method needs them."""
    backend = "openvino" if method in OPENVINO_METHODS else "onnxruntime"
    bits = fields.get("bits", 8)
    recipe = recipe_here(f"{backend}-int{bits}", method, **fields)
    if method is Method.STATIC:
        ranges = find_ranges(graph, calibration, Calibrator.MINMAX, recipe)
        return replace(recipe, calibrator=Calibrator.MINMAX, ranges=ranges)
    return replace(recipe, calibration=calibration.digest) if method is Method.NNCF else recipe


def quantize(method: Method, graph: Path, calibration: Calibration = CALIBRATION, **fields: Any) -> Path:
    kind = "xml" if method in OPENVINO_METHODS else "onnx"
    file = graph.with_name(f"{method}-{len(list(graph.parent.iterdir()))}.{kind}")
    make_graph(graph, file, recipe_for(method, graph, calibration, **fields), calibration, external_data=False)
    return file


def run(file: Path) -> np.ndarray:
    batch = CALIBRATION.rows.take(np.array([2]))
    if file.suffix == ".xml":
        artifact = Artifact(Variant.parse("openvino-int8"), SIGNATURE, file.parent, {"model": file.name})
        with BACKENDS.get("openvino").open(artifact, RunOptions(1)) as session:
            return session.run(batch)["logits"]
    return ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, pad(batch, SIGNATURE))[0]


def find(file: Path, name: str) -> Any:
    return next((node for node in onnx.load(file).graph.node if node.name == name), None)


def weights(file: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer}


def openvino_weights(file: Path) -> list[np.ndarray]:
    """Return the 8-bit matrices of OpenVINO's file; zero points are columns."""
    import openvino

    constants = [op for op in openvino.Core().read_model(file).get_ops() if op.get_type_name() == "Constant"]
    matrices = [op.data for op in constants if op.get_element_type().get_type_name() in ("i8", "u8")]
    return [matrix for matrix in matrices if matrix.ndim == 2 and matrix.shape[1] > 1]


@pytest.mark.parametrize(
    ("method", "fields", "expected", "absent"),
    [
        (Method.DYNAMIC, {}, {"MatMulInteger": 4, "Attention": 1}, {"MatMul", "Gemm"}),
        (Method.DYNAMIC, {"attention": True}, {"MatMulInteger": 4, "QAttention": 1}, {"MatMul", "Gemm", "Attention"}),
        (Method.STATIC, {}, {"MatMul": 3, "Gemm": 1, "QuantizeLinear": 4, "Attention": 1}, {"DynamicQuantizeLinear"}),
        (Method.STATIC, {"attention": True}, {"QAttention": 1, "QuantizeLinear": 4}, {"Attention"}),
        (Method.BLOCKS, {"bits": 8}, {"MatMulNBits": 3, "Gemm": 1, "Attention": 1}, {"MatMul"}),
        (Method.BLOCKS, {"bits": 4}, {"MatMulNBits": 3, "Gemm": 1, "Attention": 1}, {"MatMul"}),
    ],
)
def test_method_produces_its_operators(
    fused: Path, method: Method, fields: dict[str, Any], expected: dict[str, int], absent: set[str]
) -> None:
    file = quantize(method, fused, **fields)
    counts = operators(file)
    assert {kind: counts.get(kind) for kind in expected} == expected
    assert not absent & set(counts)
    reference = run(fused)
    tolerance = 0.2 if fields.get("bits") == 4 else 0.05
    assert np.linalg.norm(run(file) - reference) < tolerance * np.linalg.norm(reference)
    assert not np.array_equal(run(file), reference)


def test_openvino_matmuls_are_quantized(plain: Path) -> None:
    file = quantize(Method.NNCF, plain)
    assert len(openvino_weights(file)) >= 3
    reference = run(plain)
    # Weights have seven bits instead of eight where sums saturate.
    tolerance = 0.1 if TARGET.saturates else 0.05
    assert np.linalg.norm(run(file) - reference) < tolerance * np.linalg.norm(reference)


@pytest.mark.parametrize("method", [Method.DYNAMIC, Method.STATIC, Method.BLOCKS])
def test_kept_matmul_stays_in_float(plain: Path, method: Method) -> None:
    file = quantize(method, plain, keep=(KEPT,))
    kept = find(file, KEPT)
    assert kept.op_type == "MatMul"
    # Its input is not the rounded one of another consumer.
    assert list(kept.input) == ["active", "down_weight"]
    np.testing.assert_array_equal(weights(file)["down_weight"], weights(plain)["down_weight"])
    assert "up_weight" not in weights(file)


@pytest.mark.parametrize("method", list(Method))
def test_kept_head_stays_in_float(plain: Path, method: Method) -> None:
    """Quantizers split a Gemm, and rename its parts."""
    file = quantize(method, plain, keep=("head",))
    if method in OPENVINO_METHODS:
        shapes = {weight.shape for weight in openvino_weights(file)}
        assert shapes >= {(WIDTH, INNER), (INNER, WIDTH), (WORDS, WIDTH)}
        assert len(openvino_weights(quantize(method, plain))) == len(openvino_weights(file)) + 1
    else:
        kept = weights(file)["head_weight"]
        assert kept.dtype == np.float32


def test_kept_attention_stays_in_float(fused: Path) -> None:
    for method in (Method.DYNAMIC, Method.STATIC):
        assert find(quantize(method, fused, attention=True, keep=("attention",)), "attention").op_type == "Attention"


def test_unknown_kept_node_is_rejected(plain: Path) -> None:
    for method in Method:
        with pytest.raises(PlanError, match="no_such_node"):
            quantize(method, plain, keep=("no_such_node",))


@pytest.mark.parametrize("method", [Method.DYNAMIC, Method.STATIC])
def test_attention_with_bias_is_not_quantized(tmp_path: Path, method: Method) -> None:
    """Its quantized form does not take a bias, and would ignore it."""
    graph = save(tmp_path / "graph.onnx", attention=True, score_bias=True)
    # The bias is a constant, so all rows have one length.
    rows = Calibration(CALIBRATION.rows.take(np.array([2])), SIGNATURE)
    assert operators(quantize(method, graph, rows, attention=True)).get("Attention") == 1


@pytest.mark.parametrize("method", [Method.DYNAMIC, Method.STATIC, Method.NNCF])
def test_reduced_range_weights_have_seven_bits(fused: Path, plain: Path, method: Method) -> None:
    graph = plain if method is Method.NNCF else fused
    largest = {}
    for is_reduced in (False, True):
        file = quantize(method, graph, reduce_range=is_reduced, attention=method is not Method.NNCF)
        if method is Method.NNCF:
            matrices = [weight for weight in openvino_weights(file) if weight.shape != (WORDS, WIDTH)]
        else:
            matrices = [value for value in weights(file).values() if value.dtype == np.int8 and value.ndim == 2]
        assert len(matrices) >= 3
        largest[is_reduced] = max(int(np.abs(value.astype(int)).max()) for value in matrices)
    assert largest[False] > 100
    assert largest[True] <= 64


def test_static_leaves_residuals_exact(plain: Path) -> None:
    """The first matmul reads the rounded tensor, the residual addition the exact one."""
    file = quantize(Method.STATIC, plain)
    assert find(file, "sum").input[0] == "embedded"
    assert find(file, "up").input[0] != "embedded"


def test_static_activation_type_depends_on_the_cpu(plain: Path) -> None:
    recipe = recipe_for(Method.STATIC, plain)
    for target, kind in {"arm64": np.int8, "amx": np.uint8}.items():
        file = plain.with_name(f"{target}.onnx")
        quantize_static(plain, file, replace(recipe, target=target), external_data=False)
        assert weights(file)["active_zero_point"].dtype == kind
        assert np.linalg.norm(run(file) - run(plain)) < 0.05 * np.linalg.norm(run(plain))


@pytest.mark.parametrize("method", [Method.DYNAMIC, Method.STATIC, Method.BLOCKS])
def test_weights_may_be_stored_beside_the_graph(
    plain: Path, tmp_path: Path, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.onnx_graph._INLINE_BYTES", 1024)
    (tmp_path / "out").mkdir()
    external, file = tmp_path / "out" / "model.onnx", quantize(method, plain)
    make_graph(plain, external, recipe_for(method, plain), CALIBRATION, external_data=True)
    assert sorted(path.name for path in external.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    np.testing.assert_array_equal(run(external), run(file))


REPRODUCE = """
import json, sys
from pathlib import Path
from hasten.core.tensors import Batch, DType, Signature, TensorSpec
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.apply import make_graph
from hasten.quantize.recipe import read_recipe
connected = []
sys.addaudithook(lambda event, _: connected.append(event) if event == "socket.connect" else None)
arguments = json.loads(sys.argv[1])
signature = Signature((TensorSpec("input_ids", DType.INT32, ("batch", "sequence")),), (), max_length=64)
calibration = Calibration(Batch.from_rows({"input_ids": arguments["rows"]}), signature)
for graph, file, recipe in arguments["work"]:
    make_graph(Path(graph), Path(file), read_recipe(Path(recipe)), calibration, external_data=False)
import nncf.telemetry
print(json.dumps([type(nncf.telemetry.telemetry).__name__, connected]))
"""


@pytest.mark.slow
def test_recipes_reproduce_the_same_bytes_and_send_no_telemetry(plain: Path, fused: Path, tmp_path: Path) -> None:
    """Recipes are read from files with another hash seed; NNCF must not send telemetry, as it does outside of tests."""
    pytest.importorskip("nncf")
    recipes = {
        "dynamic": (fused, recipe_for(Method.DYNAMIC, fused, attention=True)),
        "static": (fused, recipe_for(Method.STATIC, fused, attention=True, keep=("beside",))),
        "blocks": (plain, recipe_for(Method.BLOCKS, plain, bits=4)),
        "nncf": (plain, recipe_for(Method.NNCF, plain)),
    }
    work, home = [], tmp_path / "home"
    home.mkdir()
    for name, (graph, recipe) in recipes.items():
        kind = "xml" if recipe.method is Method.NNCF else "onnx"
        recipe.write(tmp_path / f"{name}.toml")
        assert read_recipe(tmp_path / f"{name}.toml") == recipe
        for folder in ("here", "there"):
            (tmp_path / folder).mkdir(exist_ok=True)
        make_graph(graph, tmp_path / "here" / f"{name}.{kind}", recipe, CALIBRATION, external_data=False)
        work.append([str(graph), str(tmp_path / "there" / f"{name}.{kind}"), str(tmp_path / f"{name}.toml")])
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NNCF_CI", "TF_BUILD")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPRODUCE, json.dumps({"rows": ROWS, "work": work})],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONHASHSEED": "7", "HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout) == ["MagicMock", []]
    # ONNX Runtime and openvino_telemetry would each store an id of the user.
    assert list(home.iterdir()) == []
    here = {file.name: digest(file) for file in (tmp_path / "here").iterdir()}
    assert len(here) == 5
    assert here == {file.name: digest(file) for file in (tmp_path / "there").iterdir()}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("method", list(Method))
def test_quantizers_print_nothing(plain: Path, method: Method, capfd: pytest.CaptureFixture[str]) -> None:
    quantize(method, plain)
    assert capfd.readouterr() == ("", "")


def test_minmax_ranges_cover_all_rows(plain: Path) -> None:
    model = onnx.load(plain)
    model.graph.output.append(helper.make_tensor_value_info("active", TensorProto.FLOAT, None))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = [session.run(["active"], feed)[0] for feed in CALIBRATION.feeds()]
    recipe = recipe_for(Method.STATIC, plain)
    assert set(recipe.ranges) == {"embedded", "active", "pooled"}
    low, high = recipe.ranges["active"]
    assert low == 0
    assert high == pytest.approx(max(float(batch.max()) for batch in values), rel=1e-5)


@pytest.mark.parametrize("calibrator", [Calibrator.ENTROPY, Calibrator.PERCENTILE])
def test_entropy_and_percentile_ranges_lie_within_minmax(plain: Path, calibrator: Calibrator) -> None:
    recipe = recipe_for(Method.STATIC, plain)
    ranges = find_ranges(plain, CALIBRATION, calibrator, recipe)
    assert set(ranges) == set(recipe.ranges)
    for name, (low, high) in ranges.items():
        assert recipe.ranges[name][0] - 1e-6 <= low < high <= recipe.ranges[name][1] + 1e-6


@pytest.mark.parametrize("calibrator", list(Calibrator))
def test_calibration_holds_one_batch_at_a_time(
    plain: Path, calibrator: Calibrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime drops the activations it collected before the next batch."""
    from onnxruntime.quantization.calibrate import HistogramCalibrater, MinMaxCalibrater

    kind = MinMaxCalibrater if calibrator is Calibrator.MINMAX else HistogramCalibrater
    collect, batch_counts = kind.collect_data, []

    def watched(self: Any, reader: Any) -> None:
        read: list[Any] = []
        monkeypatch.setattr(reader, "get_next", counting(reader.get_next, read))
        assert self.intermediate_outputs == []
        collect(self, reader)
        batch_counts.append(len(read))

    monkeypatch.setattr(kind, "collect_data", watched)
    many = Calibration(Batch.from_rows({"input_ids": [[1] * 64] * 100}), SIGNATURE)
    assert find_ranges(plain, many, calibrator, Recipe(variant="onnxruntime-int8", method=Method.STATIC, target="amx"))
    assert batch_counts == [1] * len(list(many.feeds()))
    assert len(batch_counts) > 5


def counting(read: Callable[[], Any], batches: list[Any]) -> Callable[[], Any]:
    def counted() -> Any:
        feed = read()
        batches.extend([feed] if feed else [])
        return feed

    return counted


def test_static_without_ranges_or_rows_is_rejected(plain: Path, tmp_path: Path) -> None:
    recipe = recipe_for(Method.STATIC, plain)
    without = replace(recipe, ranges={name: limits for name, limits in recipe.ranges.items() if name != "active"})
    with pytest.raises(PlanError, match="active"):
        make_graph(plain, tmp_path / "out.onnx", without, None, external_data=False)
    with pytest.raises(InputError, match="no rows"):
        find_ranges(plain, CALIBRATION.first(0), Calibrator.MINMAX, recipe)
    with pytest.raises(InputError, match="no rows"):
        find_ranges(plain, CALIBRATION.first(0), Calibrator.ENTROPY, recipe)


def test_non_finite_activations_are_reported(plain: Path) -> None:
    model = onnx.load(plain)
    for tensor in model.graph.initializer:
        if tensor.name == "up_weight":
            tensor.CopyFrom(numpy_helper.from_array(np.full((WIDTH, INNER), np.inf, np.float32), tensor.name))
    onnx.save_model(model, plain)
    with pytest.raises(StageError, match="active"):
        recipe_for(Method.STATIC, plain)


@pytest.mark.parametrize(("bits", "precision"), [(8, Precision.INT8), (4, Precision.INT4)])
def test_stored_precision_of_blocks_follows_their_bits(plain: Path, bits: int, precision: Precision) -> None:
    assert stored_precision(quantize(Method.BLOCKS, plain, bits=bits)) is precision
    assert stored_precision(quantize(Method.BLOCKS, plain, bits=bits, keep=("up", KEPT))) is Precision.FP32


def test_embeddings_do_not_make_a_graph_int8(plain: Path) -> None:
    assert stored_precision(quantize(Method.DYNAMIC, plain)) is Precision.INT8
    assert stored_precision(quantize(Method.DYNAMIC, plain, keep=("up", KEPT, "head"))) is Precision.FP32


@pytest.mark.parametrize(
    "fields", [{"bits": 3}, {"block_size": 24}, {"block_size": 8}, {"block_size": 0}, {"block_size": 2**40}]
)
def test_unsupported_block_formats_are_rejected(plain: Path, tmp_path: Path, fields: dict[str, int]) -> None:
    recipe = replace(recipe_for(Method.BLOCKS, plain), **fields)
    with pytest.raises(PlanError, match="not supported"):
        make_graph(plain, tmp_path / "out.onnx", recipe, None, external_data=False)


def test_nncf_needs_the_rows_of_the_recipe(plain: Path, tmp_path: Path) -> None:
    recipe = recipe_for(Method.NNCF, plain)
    for rows in (None, CALIBRATION.first(2)):
        with pytest.raises(PlanError, match="calibrat"):
            make_graph(plain, tmp_path / "out.xml", recipe, rows, external_data=False)


def test_missing_nncf_is_reported(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_for(Method.NNCF, plain)
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(UnsupportedError, match=r"hasten\[nncf\]"):
        make_graph(plain, tmp_path / "out.xml", recipe, CALIBRATION, external_data=False)


@pytest.mark.parametrize("method", list(Method))
def test_broken_graph_is_a_stage_error(plain: Path, tmp_path: Path, method: Method) -> None:
    recipe = recipe_for(method, plain)
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    with pytest.raises(StageError):
        make_graph(tmp_path / "broken.onnx", tmp_path / "out.onnx", recipe, CALIBRATION, external_data=False)
