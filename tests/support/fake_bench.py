"""Replace the benchmark of builds: a real one starts a PyTorch process, which takes ten seconds."""

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
def fake_benchmark(speeds: dict[str, float] | None = None) -> Iterator[None]:
    """Let builds inside this context report the latencies in `speeds`, in ms, without running anything."""
    from hasten.core.report import Bench, Footprint

    def fake_bench(contenders: Sequence[Artifact], shapes: Sequence[Shape], *_: object, **__: object) -> Bench:
        names = [artifact.variant.name for artifact in contenders]
        timings = tuple(_timing(name, shape, (speeds or {}).get(name, 1.0)) for shape in shapes for name in names)
        return Bench(names[0], timings, tuple(Footprint(name, 1.0, 1, 1) for name in names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.builder.encoder_build.bench", fake_bench)
        patch.setattr("hasten.builder.generation.bench.bench", fake_bench)
        yield


def _timing(variant: str, shape: Shape, ms: float) -> Timing:
    from hasten.core.report import Interval, Timing

    return Timing(
        variant=variant,
        shape=shape,
        samples=1,
        p50_ms=ms,
        p90_ms=ms,
        p99_ms=None,
        rows_per_s=shape.batch * 1e3 / ms,
        speedup=Interval(1.0, 1.0, 1.0),
        round_medians_ms=(ms,),
    )
