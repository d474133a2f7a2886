"""Resolve a plan and reject whatever can be rejected before the weights are read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hasten.backends.onnxruntime import stored_precision
from hasten.builder.resolved_plan import BuildPreview, ResolvedData, ResolvedModel, ResolvedPlan
from hasten.builder.sources.detect import detect_task
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.locate import find_model
from hasten.bundle.write import check_target
from hasten.core.errors import StageError, missing_package
from hasten.core.plan import Plan
from hasten.core.system.cache import cache_directory
from hasten.core.system.hardware import GPU_FAILURE_HINT, this_machine
from hasten.core.variant import CPU, Precision
from hasten.measure.data import read_data
from hasten.quantize.recipe import read_recipe


def preview(plan: Plan, output: Path | None = None, *, force: bool = False) -> BuildPreview:
    """Return what a build of the plan would do, without reading the weights."""
    return preflight(plan, output, force=force).preview


def preflight(
    plan: Plan,
    output: Path | None = None,
    *,
    force: bool = False,
    directory: Path | None = None,
    qdq_precision: Precision | None = None,
) -> ResolvedPlan:
    """Resolve the model, the data and the candidate variants of a plan, each once.

    `directory` holds the files of a model whose name in the plan is not an address. `qdq_precision` is what the
    quantizers of a module in memory round to.
    """
    if output is not None:
        check_target(output, force=force)
    data = ResolvedData(
        read_data(plan.data, plan.columns) if plan.data is not None else None,
        # Calibration needs no labels, so the label columns may be missing.
        read_data(plan.calibration, plan.columns, may_lack_columns=True) if plan.calibration is not None else None,
        read_recipe(Path(plan.recipe)) if plan.recipe is not None else None,
    )
    files = find_model(plan, with_weights=False, directory=directory)
    model = ResolvedModel(files, detect_task(files, plan), _precision(files), qdq_precision)
    machine = this_machine()
    candidates = model.family.pipeline.preflight(plan, model, data, machine)
    if machine.gpu_failure and plan.device != CPU:
        note = f"built for the CPU, since the CUDA driver fails: {machine.gpu_failure} ({GPU_FAILURE_HINT})"
        candidates = replace(candidates, notes=(note, *candidates.notes))
    target = output or cache_directory() / "bundles" / _cache_name(files, directory)
    if output is None:
        check_target(target, force=True)
    return ResolvedPlan(plan, model, data, candidates, target)


def _precision(files: ModelDirectory) -> Precision:
    # A graph on the hub is not downloaded yet, and one that cannot be read is rejected when it is loaded.
    graph = files.path / files.graph if files.graph is not None else None
    if graph is None or not graph.is_file():
        return Precision.FP32
    try:
        precision = stored_precision(graph)
    except ImportError as error:
        raise missing_package("onnx", "building", "build") from error
    except StageError:
        return Precision.FP32
    return precision if precision in (Precision.INT8, Precision.INT4) else Precision.FP32


def _cache_name(files: ModelDirectory, directory: Path | None) -> str:
    """Return a flattened hub id, the folder of a local model, or the name of a model in memory."""
    if directory is not None:
        return re.sub(r"[^\w.-]+", "-", files.id).strip("-.")
    return files.id.replace("/", "--") if files.revision else Path(files.id).name or "model"
