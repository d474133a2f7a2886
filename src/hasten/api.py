"""`hasten.build`: the keyword arguments people type, turned into a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from hasten.bundle import Bundle
from hasten.core.errors import PlanError
from hasten.core.plan import Gate, Keep, Plan, Range, Shapes
from hasten.core.progress import Progress


def build(
    model: str | Path,
    output: str | Path | None = None,
    *,
    task: str | None = None,
    revision: str | None = None,
    pooling: str | None = None,
    batch_size: int | Sequence[int] = (1, 8, 32),
    seq_len: int | Sequence[int] = (16, 128, 256),
    variants: str | Sequence[str] = (),
    data: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    min_agreement: float | None = None,
    max_drop: float | None = None,
    metric: str | None = None,
    bench_budget_s: float = 30.0,
    threads: int | None = None,
    keep: Literal["best", "all"] = "best",
    force: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Make the model fast, prove that it still answers the same, and write the bundle.

    Without `output` the bundle goes to the cache (`HASTEN_CACHE`) and replaces the one of the same name there.
    """
    from hasten.builder.build import build as run

    if keep not in list(Keep):
        raise PlanError(f"keep is '{keep}'", hint=f"one of {', '.join(Keep)}")
    plan = Plan(
        model=str(model),
        revision=revision,
        task=task,
        pooling=pooling,
        shapes=Shapes(
            Range.of("batch_size", _numbers(batch_size)),
            Range.of("seq_len", _numbers(seq_len)),
        ),
        variants=(variants,) if isinstance(variants, str) else tuple(variants),
        data=str(data) if data is not None else None,
        columns=dict(columns or {}),
        gate=Gate(min_agreement, max_drop, metric),
        bench_budget_s=bench_budget_s,
        threads=threads,
        keep=Keep(keep),
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    return run(plan, Path(output).expanduser() if output is not None else None, force=force, progress=progress)


def _numbers(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
