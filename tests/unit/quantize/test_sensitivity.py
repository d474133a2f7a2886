"""One session measures what quantizing any of a graph's operators costs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from hasten.core.report import Agreement  # noqa: E402
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Outputs, Signature, TensorSpec  # noqa: E402
from hasten.metrics.statistics import relative_error  # noqa: E402
from hasten.onnx_graph import operators  # noqa: E402
from hasten.quantize.methods.dynamic import quantize_dynamic  # noqa: E402
from hasten.quantize.recipe import Method, Recipe  # noqa: E402
from hasten.quantize.sensitivity import SensitivityReference, measure_sensitivity, open_switchable  # noqa: E402
from support.models.small_graphs import WIDTH, WORDS, Graph, gated, run  # noqa: E402

SIGNATURE = Signature(
    (TensorSpec("input_ids", DType.INT64, (BATCH, SEQUENCE)),),
    (TensorSpec("result", DType.FLOAT32, (BATCH, SEQUENCE, WIDTH)),),
    8,
)
NAMES = ("words", "gate", "up", "second")


def recipe(keep: Collection[str] = ()) -> Recipe:
    return Recipe(
        variant="onnxruntime-int8", method=Method.DYNAMIC, target="avx512_vnni", reduce_range=True, keep=tuple(keep)
    )


def make_graph(folder: Path) -> Path:
    graph = Graph()
    # The quantizer hands a quantized lookup to a matmul as it is, and both would be switched together.
    graph.hidden = graph.norm(graph.hidden)
    onnx.save_model(graph.model(gated(graph)), folder / "model.onnx")
    return folder / "model.onnx"


def make_rows() -> Batch:
    ids = np.random.default_rng(5).integers(0, WORDS, (3, 6))
    return Batch({"input_ids": ids.reshape(-1).astype(np.int32)}, np.full(3, 6, np.int32))


def run_quantized(graph: Path, names: Collection[str]) -> Any:
    """Return the outputs of a graph in which only these operators are quantized."""
    file = graph.with_name("alone.onnx")
    quantize_dynamic(graph, file, recipe([name for name in NAMES if name not in names]), external_data=False)
    return run(onnx.load(file)).reshape(-1, WIDTH)


def reference_of(graph: Path) -> SensitivityReference:
    exact = run(onnx.load(graph)).reshape(-1, WIDTH)

    def agreement_of(outputs: Outputs) -> Agreement:
        error = relative_error(outputs["result"], exact)
        return Agreement("cosine", 1 - error, len(exact), error, error, 1.0)

    return SensitivityReference(make_rows(), SIGNATURE, agreement_of)


class RecordingProgress:
    def __init__(self) -> None:
        self.steps: list[str | None] = []

    def start(self, name: str, total: float | None = None) -> None:
        self.total = total

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        self.steps.append(note)

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        self.is_finished = ok


@pytest.mark.parametrize("names", [(), ("words",), ("gate",), ("up", "second"), NAMES])
def test_switched_operators_equal_a_graph_quantized_for_them(tmp_path: Path, names: tuple[str, ...]) -> None:
    graph = make_graph(tmp_path)
    switchable = open_switchable(graph, recipe(), SIGNATURE, external_data=False)
    assert set(switchable.names) == set(NAMES)
    outputs = switchable.outputs(make_rows(), names)["result"]
    np.testing.assert_allclose(outputs, run_quantized(graph, names), rtol=1e-4, atol=1e-5)
    exact = run(onnx.load(graph)).reshape(-1, WIDTH)
    assert (relative_error(outputs, exact) > 1e-4) == bool(names)


def test_operators_that_the_recipe_keeps_have_no_switch(tmp_path: Path) -> None:
    graph = make_graph(tmp_path)
    assert "DynamicQuantizeLinear" not in operators(graph)
    switchable = open_switchable(graph, recipe(["up"]), SIGNATURE, external_data=False)
    assert set(switchable.names) == {"words", "gate", "second"}


def test_sensitivity_is_sorted_and_stops_at_the_deadline(tmp_path: Path) -> None:
    graph = make_graph(tmp_path)
    switchable, reference = open_switchable(graph, recipe(), SIGNATURE, external_data=False), reference_of(graph)
    progress = RecordingProgress()
    sensitivity = measure_sensitivity(switchable, reference, progress=progress)
    exact = run(onnx.load(graph)).reshape(-1, WIDTH)
    alone = {name: relative_error(run_quantized(graph, {name}), exact) for name in NAMES}
    assert sensitivity.errors == pytest.approx(alone, rel=1e-3)
    assert sensitivity.names == tuple(sorted(NAMES, key=lambda name: -alone[name]))
    assert (progress.total, progress.is_finished, sorted(map(str, progress.steps))) == (4, True, sorted(NAMES))
    assert measure_sensitivity(switchable, reference, until=0.0).errors == {}


def test_smallest_number_of_float_operators_is_found_by_bisection(tmp_path: Path) -> None:
    graph = make_graph(tmp_path)
    sensitivity = measure_sensitivity(
        open_switchable(graph, recipe(), SIGNATURE, external_data=False), reference_of(graph)
    )
    agreements = [sensitivity.agreement_with_float(count) for count in range(len(NAMES) + 1)]
    assert agreements == sorted(agreements)
    assert agreements[-1] == pytest.approx(1, abs=1e-5)
    assert sensitivity.smallest_float_count((agreements[1] + agreements[2]) / 2) == 2
    assert sensitivity.smallest_float_count(agreements[0]) == 1
    # With all of them in float it would be the float graph.
    assert sensitivity.smallest_float_count(1.1) == len(NAMES) - 1
