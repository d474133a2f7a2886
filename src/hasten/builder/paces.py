"""How fast models read prompts, and how fast they write after them: two benchmarks of the same contenders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.backends import Artifact
from hasten.builder.original import ORIGINAL
from hasten.core.progress import Progress
from hasten.core.report import Bench
from hasten.core.tensors import Batch, Shape
from hasten.measure.bench import bench

_LANE, _LANE_OF_ORIGINAL = "hasten.measure.writing_lane", "hasten.builder.original"
# Of the time there is: a prompt is read once, and as many tokens written after it as it takes.
_READING = 0.25


@dataclass(frozen=True, slots=True)
class Paces:
    # A run is a whole prompt.
    reading: Bench
    # A run is one more token in every row.
    writing: Bench


def time_writing(
    contenders: Sequence[Artifact],
    shapes: Sequence[Shape],
    rows: Batch,
    *,
    budget_s: float,
    threads: int | None,
    progress: Progress,
) -> Paces:
    """Shapes are prompts together × their tokens; reading is timed for one of each length, as decoders read them."""

    def timed(what: str, shapes: Sequence[Shape], share: float) -> Bench:
        return bench(
            contenders,
            shapes,
            rows,
            budget_s=share * budget_s,
            threads=threads,
            commands={artifact.variant.name: _command(artifact, what) for artifact in contenders},
            progress=progress,
        )

    alone = list(dict.fromkeys(Shape(1, shape.sequence) for shape in shapes))
    return Paces(timed("read", alone, _READING), timed("write", shapes, 1 - _READING))


def _command(artifact: Artifact, what: str) -> tuple[str, ...]:
    return sys.executable, "-m", _LANE_OF_ORIGINAL if artifact.variant.backend == ORIGINAL.backend else _LANE, what
