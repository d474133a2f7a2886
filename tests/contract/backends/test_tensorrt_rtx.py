"""Test NVIDIA's real parser and builder, which need no GPU: `pip install 'hasten[tensorrt-rtx]'`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hasten.backends import Dialect
from hasten.backends.tensorrt.engine import build
from hasten.backends.tensorrt.engine_spec import EngineSpec, Profile
from hasten.backends.tensorrt.library import TENSORRT_RTX
from hasten.backends.tensorrt.typed_graph import write_typed
from hasten.core.errors import StageError
from hasten.core.tensors import Shape
from hasten.core.variant import Precision

REAL: Any = pytest.importorskip("tensorrt_rtx_bindings")
onnx: Any = pytest.importorskip("onnx")

SPEC = EngineSpec((Profile(Shape(1, 1), Shape(2, 16), Shape(4, 64)),))
# Names of the fake that are not NVIDIA's.
OWN_NAMES = {"NUMPY", "STREAM", "session"}
OWN_ATTRIBUTES = {"graph", "inputs", "logger", "network", "outputs", "profiles", "shapes"}


@pytest.fixture
def graph(tiny_classifier: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path) -> tuple[Path, Any]:
    """Return the portable graph of XLNet, which has an operator that the parser rejects, and its signature."""
    loaded = load_tiny(tiny_classifier("xlnet"))
    return make_graphs(loaded, tmp_path)[Dialect.ONNX], loaded.signature


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16])
def test_real_builder_takes_typed_graph(precision: Precision, graph: tuple[Path, Any], tmp_path: Path) -> None:
    plain, signature = graph
    typed, plan = tmp_path / "typed.onnx", tmp_path / "model.plan"
    write_typed(plain, typed, precision)
    build(TENSORRT_RTX, typed, signature, SPEC, plan)
    assert plan.stat().st_size > 2**20


@pytest.mark.slow
def test_refusal_of_real_parser_is_reported(graph: tuple[Path, Any], tmp_path: Path) -> None:
    plain, signature = graph
    with pytest.raises(
        StageError, match=r"TensorRT for RTX cannot read .*Eyelike does not work for dynamically shaped"
    ):
        build(TENSORRT_RTX, plain, signature, SPEC, tmp_path / "model.plan")


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
        ("ParserError", "desc"),
    ):
        assert hasattr(getattr(REAL, name), attribute), f"{name}.{attribute}"
