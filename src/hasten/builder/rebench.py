"""Timing a finished bundle again: its variants, its graph, and the original model where that can still be had."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hasten.backends import BACKENDS, Artifact, Tunes
from hasten.builder.original import ORIGINAL, save_original
from hasten.builder.paces import time_writing
from hasten.builder.written import load_writer
from hasten.bundle import Bundle
from hasten.core.errors import HastenError, PlanError, UnsupportedError
from hasten.core.generation import WRITING
from hasten.core.hardware import Machine, this_machine
from hasten.core.plan import Gate, Plan, Shapes
from hasten.core.progress import Progress, step
from hasten.core.report import Bench, Candidate, Status
from hasten.core.tensors import Batch
from hasten.core.variant import CPU, CUDA, Precision
from hasten.measure.bench import bench
from hasten.measure.reverify import reverify
from hasten.measure.verify import GRAPH
from hasten.measure.writing_lane import MOST_ROWS
from hasten.measure.writing_reference import as_batch, stored_sample
from hasten.tasks import TASKS

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class Rebench:
    # Of a model that writes, how it writes.
    bench: Bench
    refused: tuple[Candidate, ...]
    machine: Machine
    # Of a model that writes, how it reads.
    reading: Bench | None = None


def rebench(bundle: Bundle, shapes: Shapes, budget_s: float, threads: int | None, progress: Progress) -> Rebench:
    """Verify first, then time the full grid. Variants that fail or cannot run are named, not timed."""
    shapes = _fitting(bundle, shapes)
    candidates = [c for c in reverify(bundle, None, Gate(), [], threads, progress) if c.variant != GRAPH]
    passed = [c.variant for c in candidates if c.verdict is not None and c.verdict.passed]
    refused = [candidate for candidate in candidates if candidate.variant not in passed]
    if not passed:
        raise UnsupportedError(f"no variant of {bundle.path} can be timed here: {refused[0].reason}")
    artifacts = [bundle.artifact(bundle.entry(name)) for name in passed]
    for artifact in artifacts:
        backend = BACKENDS.get(artifact.variant.backend)
        if isinstance(backend, Tunes):
            try:
                with step(progress, f"tune {artifact.variant}"):
                    backend.tune(artifact)
            except (HastenError, OSError) as error:
                # It can be timed without.
                logger.warning("%s is timed as it is: %s", artifact.variant, error)
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        try:
            with step(progress, f"load {bundle.manifest.model.id}"):
                device = CUDA if any(artifact.variant.device == CUDA for artifact in artifacts) else CPU
                baseline = _original(bundle, Path(work), device)
        except HastenError as error:
            # Without the original the ratios are to what comes nearest to it, and the table says so.
            baseline = _nearest(bundle, artifacts)
            refused.append(
                Candidate(
                    bundle.report.bench.baseline,
                    Status.UNAVAILABLE,
                    f"{error} — compared with {baseline.variant} instead",
                )
            )
        contenders = [baseline, *(artifact for artifact in artifacts if artifact is not baseline)]
        grid, rows = shapes.grid(), token_rows(bundle)
        if bundle.manifest.generation is None:
            measured = bench(contenders, grid, rows, budget_s=budget_s, threads=threads, progress=progress)
            return Rebench(measured, tuple(refused), this_machine())
        paces = time_writing(contenders, grid, rows, budget_s=budget_s, threads=threads, progress=progress)
        return Rebench(paces.writing, tuple(refused), this_machine(), paces.reading)


def _fitting(bundle: Bundle, shapes: Shapes) -> Shapes:
    """What is asked for, as far as the model's limit allows it."""
    limit = bundle.manifest.signature.max_length
    if bundle.manifest.generation is not None:
        if shapes.batch.max > MOST_ROWS:
            raise PlanError(f"--batch-size {shapes.batch.max}: at most {MOST_ROWS} prompts are timed together")
        # The other half is for what is written.
        limit = max(1, limit // 2)
    return Shapes(shapes.batch, shapes.sequence.at_most(limit))


def _nearest(bundle: Bundle, artifacts: Sequence[Artifact]) -> Artifact:
    """The graph that every variant came from; of a model that writes, which has none, the fp32 variant if there."""
    if bundle.manifest.graphs:
        return bundle.graph()
    exact = (artifact for artifact in artifacts if artifact.variant.precision is Precision.FP32)
    return next(exact, artifacts[0])


def token_rows(bundle: Bundle) -> Batch:
    """The texts of a bundle's reference answers, as the model takes them."""
    if bundle.manifest.generation is not None:
        return as_batch([answer.prompt for answer in stored_sample(bundle).answers])
    task, spec = TASKS.get(bundle.manifest.task.name), bundle.manifest.task
    items = task.parse(list(bundle.reference().rows))
    return task.encode(items, bundle.tokenizer(), task.options(spec, {})).batch


def _original(bundle: Bundle, work: Path, device: str) -> Artifact:
    about = bundle.manifest
    if about.model.revision is None and not Path(about.model.id).is_dir():
        raise PlanError(f"{about.model.id} is no longer there")
    plan = Plan(
        about.model.id,
        revision=about.model.revision,
        task=about.task.name,
        pooling="+".join(about.task.pooling) or None,
        file_name=about.model.file,
    )
    return make_original(plan, work, device=device)


def make_original(plan: Plan, work: Path, directory: Path | None = None, *, device: str = CPU) -> Artifact:
    """The model that a plan names, unchanged, as what can be opened; `directory` as in a build."""
    from hasten.builder.choose import compared_with
    from hasten.builder.given import LoadedGraph, load_graph
    from hasten.builder.load import LoadedModel, load_model
    from hasten.builder.source import find_model

    model = find_model(plan, directory=directory)
    if plan.task in WRITING:
        moved = compared_with(ORIGINAL, device, this_machine())
        return save_original(load_writer(model, plan.task, plan), work / "original", moved)
    loaded: LoadedModel | LoadedGraph = (
        load_model(model, plan) if model.graph is None else load_graph(model, plan, work / "model.onnx")
    )
    (work / "original").mkdir()
    variant = compared_with(loaded.baseline, device, this_machine())
    return BACKENDS.get(variant.backend).make(loaded.source, variant, work / "original")
