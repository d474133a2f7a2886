"""Test NVIDIA's real parser and builder, which need no GPU: `pip install 'hasten[tensorrt-rtx]'`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hasten.backends import Dialect
from hasten.backends.tensorrt.engine import build
from hasten.backends.tensorrt.engine_spec import EngineSpec, Profile
from hasten.backends.tensorrt.library import TENSORRT_RTX
from hasten.backends.tensorrt.typed_graph import write_typed
from hasten.core.errors import StageError
from hasten.core.tensors import Batch, Shape
from hasten.core.variant import Precision
from hasten.quantize.analysis.calibration import Calibration

REAL: Any = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra tensorrt-rtx")
onnx: Any = pytest.importorskip("onnx")

SPEC = EngineSpec((Profile(Shape(1, 1), Shape(2, 16), Shape(4, 64)),), workspace_bytes=2**28)
Graph = Callable[[str], tuple[Path, Any]]
# Names of the fake that are not NVIDIA's.
OWN_NAMES = {"NUMPY", "STREAM", "session"}
OWN_ATTRIBUTES = {"graph", "inputs", "logger", "network", "outputs", "profiles", "shapes"}


@pytest.fixture
def graph(tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path) -> Graph:
    """Return the portable graph of a tiny classifier, and its signature."""

    def export(architecture: str) -> tuple[Path, Any]:
        loaded = load_tiny(tiny_classifier(architecture))
        return make_graphs(loaded, tmp_path)[Dialect.ONNX], loaded.signature

    return export


# XLNet has EyeLike, and transformers' X-MOD selects rows by value: the parser rejects both.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        ("bert", Precision.FP32),
        ("bert", Precision.BF16),
        ("deberta-v2", Precision.FP16),
        ("xlnet", Precision.FP16),
        ("xmod", Precision.FP16),
    ],
)
def test_real_builder_takes_typed_graph(architecture: str, precision: Precision, graph: Graph, tmp_path: Path) -> None:
    plain, signature = graph(architecture)
    typed, plan = tmp_path / "typed.onnx", tmp_path / "model.plan"
    write_typed(plain, typed, precision)
    build(TENSORRT_RTX, typed, signature, SPEC, plan)
    assert plan.stat().st_size > 2**20


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_real_builder_takes_quantizers_of_module(
    precision: Precision, tiny_classifier: Any, load_tiny: Any, tmp_path: Path
) -> None:
    from hasten.builder.search.qdq_module import FP16_SCALES, calibrate_module, export_quantized

    loaded = load_tiny(tiny_classifier("bert"))
    values = {spec.name: np.zeros(48, np.int32) for spec in loaded.signature.inputs}
    batch = Batch(values | {"input_ids": np.arange(5, 53, dtype=np.int32)}, np.array([7, 41], np.int32))
    module = calibrate_module(loaded, Calibration(batch, loaded.signature), precision)
    exported, typed, plan = (tmp_path / name for name in ("model.onnx", "typed.onnx", "model.plan"))
    export_quantized(loaded, module, exported, FP16_SCALES)
    assert write_typed(exported, typed, precision) is precision
    build(TENSORRT_RTX, typed, loaded.signature, SPEC, plan)
    assert plan.stat().st_size > 2**20


@pytest.mark.slow
def test_refusal_of_real_parser_is_reported(graph: Graph, tmp_path: Path) -> None:
    plain, signature = graph("xlnet")
    with pytest.raises(
        StageError, match=r"TensorRT for RTX cannot read .*Eyelike does not work for dynamically shaped"
    ):
        build(TENSORRT_RTX, plain, signature, SPEC, tmp_path / "model.plan")


@pytest.mark.slow
def test_refusal_of_real_builder_is_reported(graph: Graph, tmp_path: Path) -> None:
    plain, signature = graph("bert")
    spec = replace(SPEC, workspace_bytes=1)
    with pytest.raises(StageError, match=r"TensorRT for RTX cannot build an engine from .*: .*Error Code"):
        build(TENSORRT_RTX, plain, signature, spec, tmp_path / "model.plan")
    assert not (tmp_path / "model.plan").exists()


def test_fake_has_names_and_parameters_of_real_module(standin: ModuleType) -> None:
    """All our calls run on the fake, so that a call that NVIDIA's module lacks cannot go unnoticed."""
    checked = 0
    for name, fake in vars(standin).items():
        if not isinstance(fake, type) or fake.__module__ != standin.__name__ or name in OWN_NAMES:
            continue
        real = getattr(REAL, name)
        for attribute, member in vars(fake).items():
            if attribute.startswith("_") or attribute in OWN_ATTRIBUTES:
                continue
            assert hasattr(real, attribute), f"{name}.{attribute}"
            checked += 1
            if inspect.isfunction(member) and name != "ILogger":
                documented = getattr(real, attribute).__doc__
                for parameter in list(inspect.signature(member).parameters)[1:]:
                    assert re.search(rf"\b{parameter}: ", documented), f"{name}.{attribute}({parameter})"
    assert checked > 30
    for name, attribute in (
        ("ICudaEngine", "num_io_tensors"),
        ("ICudaEngine", "num_optimization_profiles"),
        ("ITensor", "name"),
        ("OnnxParser", "get_error"),
        ("OnnxParser", "num_errors"),
        ("ParserError", "desc"),
    ):
        assert hasattr(getattr(REAL, name), attribute), f"{name}.{attribute}"
