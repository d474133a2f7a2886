"""hasten stress URL"""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hasten.cli import console

if TYPE_CHECKING:
    from rich.console import Console

    from hasten.stress.load import Run
    from hasten.stress.sweep import Sweep

Result = TypeVar("Result")

_BAR_WIDTH, _BARS, _DRAWING_WIDTH = 60, 20, 120
# A few requests to see whether anyone is there.
_FIRST_RATE, _FIRST_S = 20.0, 0.5
# The share of requests sent late beyond which the numbers are the client's.
_MOST_LATE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="http://127.0.0.1:8000, or with the path to ask (default: /predict)")
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="requests a second (default: 50)")
    parser.add_argument("--duration", default="10s", metavar="TIME", help="of a run (default: 10s)")
    parser.add_argument(
        "--lengths", metavar="FILE", help="rows to ask, as --data of build (default: a built-in sample)"
    )
    parser.add_argument("--model", default="", help="where the server has several")
    parser.add_argument("--timeout", default="30s", metavar="TIME", help="give a request up after this (default: 30s)")
    parser.add_argument("--key", metavar="KEY", help="an API key")
    parser.add_argument("--sweep", action="store_true", help="find the highest rate that keeps the objective")
    parser.add_argument(
        "--objective", type=float, default=50.0, metavar="MS", help="for p99, with --sweep (default: 50)"
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the times into a file")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments at which requests come")


def main(args: argparse.Namespace) -> int:
    from hasten.core.errors import PlanError, UnavailableError
    from hasten.core.plan import parse_duration
    from hasten.measure.data import read_data, sample_texts
    from hasten.stress.bodies import body
    from hasten.stress.client import Target
    from hasten.stress.load import load
    from hasten.stress.sweep import sweep

    if args.rate <= 0 or args.objective <= 0:
        raise PlanError("a rate and an objective are more than zero")
    target = Target.parse(args.url, "/predict")
    rows = read_data(args.lengths).rows if args.lengths else [{"text": text} for text in sample_texts()]
    headers = {"authorization": f"Bearer {args.key}"} if args.key else {}
    requests = [target.request(body(target.path, row, args.model), headers) for row in rows]
    seconds, timeout_s = parse_duration(args.duration), parse_duration(args.timeout)
    progress = console.display(args.quiet)

    async def run_at(rate: float) -> Run:
        progress.start(f"{rate:.0f} requests/s", seconds)
        run = await load(
            target,
            requests,
            rate,
            seconds,
            timeout_s=timeout_s,
            seed=args.seed,
            on_progress=lambda elapsed, open_: progress.advance(elapsed, f"{open_} under way"),
        )
        progress.finish(f"p99 {run.p99_ms:.1f} ms, {run.errors} errors")
        return run

    async def work() -> Run | Sweep:
        first = await load(target, requests, _FIRST_RATE, _FIRST_S, timeout_s=timeout_s)
        if not first.answered:
            raise UnavailableError(
                f"{args.url} gives no answers: {first.describe_errors()}", hint="is it running, and is the path right?"
            )
        return await (sweep(run_at, args.rate, args.objective) if args.sweep else run_at(args.rate))

    result = _with_uvloop(work())
    if args.json:
        console.print_json(result)
    else:
        _print(console.out, result)
    if args.plot is not None:
        _draw(result, args.plot)
    return 0


def _with_uvloop(work: Coroutine[None, None, Result]) -> Result:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _print(out: Console, result: Run | Sweep) -> None:
    from hasten.stress.sweep import Sweep, keeps

    runs = result.runs if isinstance(result, Sweep) else (result,)
    table = console.plain_table("")
    for title in ("requests/s", "answered/s", "p50", "p90", "p99", "p99.9", "max", "errors"):
        table.add_column(title, justify="right")
    for run in sorted(runs, key=lambda run: run.rate):
        times = [*run.percentiles.values(), run.max_ms]
        style = "" if not isinstance(result, Sweep) or keeps(run, result.objective_ms) else "dim"
        table.add_row(
            f"{run.rate:.0f}",
            f"{run.per_second:.0f}",
            *(f"{time:.1f} ms" for time in times),
            run.describe_errors() or "0",
            style=style,
        )
    out.print(table)
    shown = _shown(result)
    _plot(out, shown)
    if shown.late > _MOST_LATE:
        out.print(f"[yellow]{shown.late:.0%} of the requests were sent late: this machine asks no faster[/]")
    if isinstance(result, Sweep):
        kept = f"{result.best.rate:.0f} requests/s keep" if result.best else "no rate that was tried keeps"
        out.print(f"{kept} p99 within {result.objective_ms:g} ms", highlight=False)


def _shown(result: Run | Sweep) -> Run:
    from hasten.stress.load import Run

    return result if isinstance(result, Run) else result.best or result.runs[-1]


def _plot(out: Console, run: Run) -> None:
    """How many requests took how long, in steps of equal ratio."""
    import numpy as np
    from rich.text import Text

    times = np.array(run.times_ms)
    if not len(times):
        return
    edges = np.geomspace(max(times.min(), 1e-3), times.max() * 1.001, _BARS + 1)
    counts, _ = np.histogram(times, edges)
    for place, count in enumerate(counts):
        bar = "█" * round(_BAR_WIDTH * count / counts.max()) or ("▏" if count else "")
        out.print(Text(f"{edges[place]:9.2f} ms  {bar} {count or ''}"))


def _draw(result: Run | Sweep, file: Path) -> None:
    from rich.console import Console

    from hasten.core.errors import translate_os_errors

    drawing = Console(record=True, width=_DRAWING_WIDTH, file=io.StringIO())
    _print(drawing, result)
    with translate_os_errors(f"drawing {file}"):
        drawing.save_svg(str(file), title="hasten stress")
