"""Time the variants of a bundle again, compared with the baseline if the model can still be loaded."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hasten.backends import BACKENDS, Artifact, SupportsTuning
from hasten.builder.sources.locate import find_model
from hasten.bundle import Bundle
from hasten.core.errors import HastenError, PlanError, UnsupportedError
from hasten.core.plan import Gate, Plan, Shapes
from hasten.core.progress import Progress, step
from hasten.core.report import Bench, Candidate, Status
from hasten.core.system.hardware import Machine, this_machine
from hasten.core.variant import CPU, CUDA, Precision
from hasten.families import family_of, family_of_bundle
from hasten.measure.encoder_gate import GRAPH
from hasten.measure.verify_bundle import verify_bundle

logger = logging.getLogger("hasten")


@dataclass(frozen=True, slots=True)
class BundleBench:
    """The timings of a bundle, and the variants that were not timed."""

    # For a generative model: decode.
    bench: Bench
    rejected: tuple[Candidate, ...]
    machine: Machine
    # Only for generative models.
    prefill: Bench | None = None


def bench_bundle(
    bundle: Bundle, shapes: Shapes, budget_s: float, threads: int | None, progress: Progress
) -> BundleBench:
    """Verify the variants and time those that pass on the full grid; return the others with their reasons."""
    pipeline = family_of_bundle(bundle).pipeline
    grid = pipeline.bench_shapes(bundle, shapes).grid()
    candidates = [c for c in verify_bundle(bundle, None, Gate(), [], threads, progress) if c.variant != GRAPH]
    passed = [c.variant for c in candidates if c.verdict is not None and c.verdict.passed]
    rejected = [candidate for candidate in candidates if candidate.variant not in passed]
    if not passed:
        raise UnsupportedError(f"no variant of {bundle.path} can be timed here: {rejected[0].reason}")
    artifacts = [bundle.artifact(bundle.entry(name)) for name in passed]
    for artifact in artifacts:
        backend = BACKENDS.get(artifact.variant.backend)
        if isinstance(backend, SupportsTuning):
            try:
                with step(progress, f"tune {artifact.variant}"):
                    backend.tune(artifact)
            except (HastenError, OSError) as error:
                logger.warning("%s is timed without tuning: %s", artifact.variant, error)
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        try:
            with step(progress, f"load {bundle.manifest.model.id}"):
                device = CUDA if any(artifact.variant.device == CUDA for artifact in artifacts) else CPU
                baseline = _baseline(bundle, Path(work), device)
        except HastenError as error:
            # Without the model, speed-ups are relative to the variant closest to it, and the table says so.
            fp32 = (artifact for artifact in artifacts if artifact.variant.precision is Precision.FP32)
            # A generative model has no graph that all variants are made from.
            baseline = bundle.graph() if bundle.manifest.graphs else next(fp32, artifacts[0])
            reason = f"{error} — compared with {baseline.variant} instead"
            rejected.append(Candidate(bundle.report.bench.baseline, Status.UNAVAILABLE, reason))
        contenders = [baseline, *(artifact for artifact in artifacts if artifact is not baseline)]
        measured = pipeline.bench(
            contenders, grid, pipeline.bench_rows(bundle), budget_s=budget_s, threads=threads, progress=progress
        )
    return BundleBench(measured.bench, tuple(rejected), this_machine(), measured.prefill)


def _baseline(bundle: Bundle, work: Path, device: str) -> Artifact:
    model, task = bundle.manifest.model, bundle.manifest.task
    if model.revision is None and not Path(model.id).is_dir():
        raise PlanError(f"{model.id} is no longer there")
    pooling = "+".join(task.pooling) or None
    plan = Plan(model.id, revision=model.revision, task=task.name, pooling=pooling, file_name=model.file)
    return make_baseline(plan, work, device=device)


def make_baseline(plan: Plan, work: Path, directory: Path | None = None, *, device: str = CPU) -> Artifact:
    """Return the unchanged model of a plan, ready to be opened; `directory` as in a build."""
    assert plan.task is not None
    files = find_model(plan, directory=directory)
    return family_of(plan.task).pipeline.baseline(files, plan, work, device)
