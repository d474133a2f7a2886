"""Quantize for OpenVINO with NNCF: statically, with smoothing and calibrated ranges, or the weights alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hasten.core.errors import InputError, PlanError, StageError, missing_package
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.quiet import quiet_logging
from hasten.quantize.recipe import Recipe

# NNCF_CI stops NNCF from sending reports; CI stops openvino_telemetry from storing an id in the home directory.
_NO_TELEMETRY = {"NNCF_CI": "1", "CI": "true"}


def quantize_nncf(graph: Path, file: Path, recipe: Recipe, calibration: Calibration) -> None:
    """Quantize a portable graph to OpenVINO's format: `file` is the .xml, the weights are written beside it."""
    if recipe.calibration != calibration.digest:
        raise PlanError(
            "the recipe was calibrated on other rows", hint="pass the file it was made with to --calibration"
        )
    if not len(calibration.rows):
        raise InputError("there are no rows to calibrate on")
    nncf, openvino = _import()
    model = _read(graph)
    # A list, since NNCF iterates it several times.
    feeds = list(calibration.feeds({name for entry in model.inputs for name in entry.get_names()}))
    ignored = nncf.IgnoredScope(names=list(_ignored(model, graph, recipe.keep)))
    fix = nncf.OverflowFix.ENABLE if recipe.reduce_range else nncf.OverflowFix.DISABLE
    try:
        with quiet_logging():
            quantized = nncf.quantize(
                model,
                nncf.Dataset(feeds),
                model_type=nncf.ModelType.TRANSFORMER,
                target_device=nncf.TargetDevice.CPU,
                subset_size=len(feeds),
                ignored_scope=ignored,
                advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=fix),
            )
        openvino.save_model(_with_stable_names(quantized), file, compress_to_fp16=False)
    except Exception as error:
        raise StageError(f"NNCF failed: {error}") from error


def compress_weights(graph: Path, file: Path, recipe: Recipe) -> None:
    """Quantize the weights of a portable graph to int8, with a scale and a zero point for each output channel."""
    nncf, openvino = _import()
    model = _read(graph)
    ignored = nncf.IgnoredScope(names=list(_ignored(model, graph, recipe.keep)))
    try:
        with quiet_logging():
            compressed = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=ignored)
        openvino.save_model(_with_stable_names(compressed), file, compress_to_fp16=False)
    except Exception as error:
        raise StageError(f"NNCF failed: {error}") from error


def _read(graph: Path) -> Any:
    """Return OpenVINO's model of a portable graph."""
    _, openvino = _import()
    try:
        return _with_stable_names(openvino.Core().read_model(graph))
    except RuntimeError as error:
        raise StageError(f"OpenVINO cannot read {graph}: {error}") from error


def _with_stable_names(model: Any) -> Any:
    """Name unnamed nodes by their position in the model: OpenVINO numbers them by a counter of the process."""
    for index, op in enumerate(model.get_ordered_ops()):
        if re.fullmatch(rf"{op.get_type_name()}[_.]\d+", op.get_friendly_name()):
            op.set_friendly_name(f"{op.get_type_name()}.{index}")
    model.set_friendly_name("model")
    return model


def _ignored(model: Any, graph: Path, keep: Iterable[str]) -> Iterator[str]:
    """Yield OpenVINO's names of the matmuls that stay in float."""
    matmuls = {op.get_friendly_name() for op in model.get_ops() if op.get_type_name() == "MatMul"}
    outputs = {node.name: node.output[0] for node in read_graph(graph, with_weights=False).graph.node}
    for name in keep:
        # OpenVINO splits a Gemm, and names the node that computes a model output after the output.
        matches = matmuls.intersection((name, f"{name}/WithoutBiases", outputs.get(name, name)))
        if not matches:
            raise PlanError(f"the recipe keeps {name} in float, but OpenVINO has no such matmul")
        yield from matches


def _import() -> tuple[Any, Any]:
    before = {name: os.environ.get(name) for name in _NO_TELEMETRY}
    os.environ.update(_NO_TELEMETRY)
    try:
        with quiet_logging():
            import nncf
            import openvino
    except ImportError as error:
        raise missing_package(error.name or "nncf", "int8 for OpenVINO", "nncf") from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return nncf, openvino
