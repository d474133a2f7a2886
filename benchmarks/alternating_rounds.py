"""Time contenders in alternating rounds, over several runs with fresh processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hasten.backends import Artifact
from hasten.cli import console
from hasten.core.tensors import Batch, Shape
from hasten.measure.bench import bench

SHAPES = [Shape(1, 16), Shape(1, 128), Shape(8, 128)]
RUNS = 12


def time_alternating(
    contenders: Sequence[Artifact],
    shape: Shape,
    batch: Batch,
    budget_s: float,
    commands: Mapping[str, Sequence[str]],
    runs: int = RUNS,
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the median of every round at one shape in ms, by contender."""
    return time_shapes(contenders, [shape], batch, budget_s, commands, runs)[shape]


def time_shapes(
    contenders: Sequence[Artifact],
    shapes: Sequence[Shape],
    batch: Batch,
    budget_s: float,
    commands: Mapping[str, Sequence[str]],
    runs: int,
) -> dict[Shape, dict[str, npt.NDArray[np.float64]]]:
    """Return the median of every round in ms, by shape and contender; the first shape gets half of the budget.

    Each run has fresh processes: where the system puts the threads and pages of a process is chance that lasts as long
    as the process (the same contender was seen at 2.5 and at 4.5 ms), so one run proves little.
    """
    rounds: dict[Shape, dict[str, list[float]]] = {
        shape: {artifact.variant.name: [] for artifact in contenders} for shape in shapes
    }
    for _ in range(runs):
        measured = bench(
            contenders,
            shapes,
            batch,
            budget_s=budget_s / runs,
            threads=None,
            progress=console.display(quiet=False),
            commands=commands,
        )
        for timing in measured.timings:
            rounds[timing.shape][timing.variant] += timing.round_medians_ms
    return {
        shape: {name: np.asarray(times) for name, times in by_contender.items()}
        for shape, by_contender in rounds.items()
    }
