"""What a build would do, and all that can be refused before the weights are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hasten.builder.choose import GRAPH, MODULE, contenders
from hasten.builder.detect import detect_task, foresee
from hasten.builder.search import ladder
from hasten.builder.source import ModelDirectory, find_model
from hasten.bundle.write import check_target
from hasten.core.cache import cache_directory
from hasten.core.hardware import this_machine
from hasten.core.plan import Plan
from hasten.core.report import Candidate
from hasten.core.variant import Variant
from hasten.measure.data import Data, check_columns, read_data
from hasten.measure.rows import check_calibration, check_rows
from hasten.quantize.recipe import Recipe, read_recipe
from hasten.tasks import AnyTask


@dataclass(frozen=True, slots=True)
class Outline:
    """What a build would do, before it does it."""

    model: str
    task: str
    target: Path
    # The backend that runs the original.
    baseline: str
    contenders: tuple[str, ...]
    # What is tried after them while there is time.
    further: tuple[str, ...]
    unavailable: tuple[Candidate, ...]
    # What a person should know about the data.
    notes: tuple[str, ...] = ()


def outline(plan: Plan, output: Path | None = None, *, force: bool = False) -> Outline:
    """All that can be refused or resolved without the weights: `--dry-run`, and the first step of every build."""
    return look(plan, output, force=force, directory=None)[0]


@dataclass(frozen=True, slots=True)
class Given:
    """What the user brings beside the model, read once: a pipe cannot be read again."""

    data: Data | None
    calibration: Data | None
    recipe: Recipe | None


def look(plan: Plan, output: Path | None, *, force: bool, directory: Path | None) -> tuple[Outline, Given]:
    """The outline, and the rows that were read for it."""
    if output is not None:
        check_target(output, force=force)
    given = Given(
        read_data(plan.data, plan.columns) if plan.data is not None else None,
        # It needs no labels, so those of the columns may be missing.
        read_data(plan.calibration, plan.columns, may_lack_columns=True) if plan.calibration is not None else None,
        read_recipe(Path(plan.recipe)) if plan.recipe is not None else None,
    )
    model = find_model(plan, with_weights=False, directory=directory)
    baseline = MODULE if model.graph is None else GRAPH
    wanted, unavailable = contenders(plan, this_machine(), baseline, given.recipe)
    task = detect_task(model, plan)
    notes = _check_given(given, plan, model, task)
    target = output or cache_directory() / "bundles" / _cache_name(model, directory)
    further: list[Variant] = []
    if not plan.variants and given.recipe is None:
        further, missing = ladder(wanted)
        unavailable += missing
    names, later = (tuple(variant.name for variant in variants) for variants in (wanted, further))
    return Outline(model.id, task.name, target, baseline, names, later, tuple(unavailable), notes), given


def _check_given(given: Given, plan: Plan, model: ModelDirectory, task: AnyTask) -> tuple[str, ...]:
    """Refuse what no build could judge by, and say what it will not show."""
    check_columns(plan.columns, task)
    notes: tuple[str, ...] = ()
    if given.data is not None:
        spec = foresee(model, task, plan)
        rows = given.data.rows_for(spec, is_quiet=True) if spec is not None else given.data.rows
        notes += check_rows(task, spec, rows, plan.gate, plan.gate.needing_labels)
    if given.calibration is not None:
        notes += check_calibration(task, given.data, given.calibration)
    return notes


def _cache_name(model: ModelDirectory, directory: Path | None) -> str:
    """A hub id as it is, flattened; a local model by its folder, one that lies nowhere by its name."""
    if directory is not None:
        return re.sub(r"[^\w.-]+", "-", model.id).strip("-.")
    return model.id.replace("/", "--") if model.revision else Path(model.id).name or "model"
