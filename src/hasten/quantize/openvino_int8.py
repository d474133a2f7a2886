"""Int8 for OpenVINO, by its own quantizer: activations smoothed, ranges calibrated, products of activations too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hasten.core.errors import InputError, PlanError, StageError, missing_package
from hasten.core.tensors import IntArray
from hasten.graph import read_graph
from hasten.quantize.calibration import Calibration
from hasten.quantize.recipe import Recipe
from hasten.quantize.silence import silenced

# The first keeps NNCF from reporting, the second openvino_telemetry from leaving an identity in the home directory.
_NO_TELEMETRY = {"NNCF_CI": "1", "CI": "true"}


def quantize_nncf(graph: Path, file: Path, recipe: Recipe, calibration: Calibration) -> None:
    """From the portable graph to OpenVINO's own format: `file` is the .xml, its weights lie beside it."""
    if recipe.calibration != calibration.digest:
        raise PlanError(
            "the recipe was calibrated on other rows than these", hint="--calibration takes the file it was made with"
        )
    if not len(calibration.rows):
        raise InputError("there are no rows to calibrate on")
    nncf, openvino = _import()
    try:
        model = _numbered(openvino.Core().read_model(graph))
    except RuntimeError as error:
        raise StageError(f"OpenVINO cannot read {graph}: {error}") from error
    feeds = _Feeds(calibration, {name for entry in model.inputs for name in entry.get_names()})
    kept = nncf.IgnoredScope(names=list(_ignored(model, graph, recipe.keep)))
    fix = nncf.OverflowFix.ENABLE if recipe.reduce_range else nncf.OverflowFix.DISABLE
    try:
        with silenced():
            made = nncf.quantize(
                model,
                nncf.Dataset(feeds),
                model_type=nncf.ModelType.TRANSFORMER,
                target_device=nncf.TargetDevice.CPU,
                subset_size=sum(1 for _ in feeds),
                ignored_scope=kept,
                advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
            )
        openvino.save_model(_numbered(made), file, compress_to_fp16=False)
    except Exception as error:
        raise StageError(f"NNCF failed: {error}") from error


class _Feeds:
    """NNCF goes through the rows several times; each time they are made anew, one rectangle after another."""

    def __init__(self, calibration: Calibration, taken: Iterable[str]) -> None:
        self._calibration, self._taken = calibration, frozenset(taken)

    def __iter__(self) -> Iterator[dict[str, IntArray]]:
        for feed in self._calibration.feeds():
            yield {name: value for name, value in feed.items() if name in self._taken}


def _numbered(model: Any) -> Any:
    """Nodes without a name of their own go by a number that the process counts up; here by their place in the model."""
    for place, op in enumerate(model.get_ordered_ops()):
        if re.fullmatch(rf"{op.get_type_name()}[_.]\d+", op.get_friendly_name()):
            op.set_friendly_name(f"{op.get_type_name()}.{place}")
    model.set_friendly_name("model")
    return model


def _ignored(model: Any, graph: Path, keep: Iterable[str]) -> Iterator[str]:
    """What OpenVINO calls the products that stay in float."""
    products = {op.get_friendly_name() for op in model.get_ops() if op.get_type_name() == "MatMul"}
    outputs = {node.name: node.output[0] for node in read_graph(graph, with_weights=False).graph.node}
    for name in keep:
        # A Gemm is taken apart, and what gives an output of the model goes by the output's name.
        found = products.intersection((name, f"{name}/WithoutBiases", outputs.get(name, name)))
        if not found:
            raise PlanError(f"the recipe keeps {name} in float, but OpenVINO has no such product")
        yield from found


def _import() -> tuple[Any, Any]:
    with _environment(_NO_TELEMETRY), silenced():
        try:
            import nncf
            import openvino
        except ImportError as error:
            raise missing_package(error.name or "nncf", "int8 for OpenVINO", "nncf") from error
    return nncf, openvino


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
