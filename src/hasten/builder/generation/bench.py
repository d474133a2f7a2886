"""Benchmark prefill and decode of generative models."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hasten.backends import Artifact
from hasten.builder.generation.baseline import BASELINE
from hasten.builder.pipeline import PhaseBench
from hasten.core.progress import Progress
from hasten.core.report import Bench
from hasten.core.tensors import Batch, Shape
from hasten.measure.bench import bench

_WORKER, _BASELINE_WORKER = "hasten.measure.bench_worker", "hasten.builder.generation.baseline"
# Decode gets the larger part of the budget: a prompt is prefilled once, and every further token is a decode step.
_PREFILL_SHARE = 0.25


def bench_generation(
    contenders: Sequence[Artifact],
    shapes: Sequence[Shape],
    rows: Batch,
    *,
    budget_s: float,
    threads: int | None,
    progress: Progress,
) -> PhaseBench:
    """Time prefill and decode at shapes of prompts × tokens.

    A prefill run is one whole prompt, as decoders run it; a decode run is one more token in every row.
    """

    def run(mode: str, shapes: Sequence[Shape], share: float) -> Bench:
        return bench(
            contenders,
            shapes,
            rows,
            budget_s=share * budget_s,
            threads=threads,
            commands={artifact.variant.name: _command(artifact, mode) for artifact in contenders},
            progress=progress,
        )

    prompts = list(dict.fromkeys(Shape(1, shape.sequence) for shape in shapes))
    prefill = run("prefill", prompts, _PREFILL_SHARE)
    return PhaseBench(run("decode", shapes, 1 - _PREFILL_SHARE), prefill)


def _command(artifact: Artifact, mode: str) -> tuple[str, ...]:
    worker = _BASELINE_WORKER if artifact.variant.backend == BASELINE.backend else _WORKER
    return sys.executable, "-m", worker, mode
