"""Builds that time nothing: a real benchmark starts a PyTorch process, ten seconds here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hasten.backends import Artifact
    from hasten.core.report import Bench, Timing
    from hasten.core.tensors import Shape


@contextmanager
def untimed(speeds: dict[str, float] | None = None) -> Iterator[None]:
    """Of builds inside it, `speeds` says what each variant would have taken, in ms."""
    from hasten.core.report import Bench, Footprint

    def timed(contenders: Sequence[Artifact], shapes: Sequence[Shape], *_: object, **__: object) -> Bench:
        names = [artifact.variant.name for artifact in contenders]
        timings = tuple(_timing(name, shape, (speeds or {}).get(name, 1.0)) for shape in shapes for name in names)
        return Bench(names[0], timings, tuple(Footprint(name, 1.0, 1, 1) for name in names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.builder.build.bench", timed)
        patch.setattr("hasten.builder.paces.bench", timed)
        yield


def _timing(variant: str, shape: Shape, ms: float) -> Timing:
    from hasten.core.report import Timing
    from hasten.core.statistics import Interval

    return Timing(
        variant=variant,
        shape=shape,
        samples=1,
        p50_ms=ms,
        p90_ms=ms,
        p99_ms=None,
        sentences_per_s=shape.batch * 1e3 / ms,
        speedup=Interval(1.0, 1.0, 1.0),
        round_medians_ms=(ms,),
    )
