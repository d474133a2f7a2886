"""hasten stress URL"""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.cli import console
from hasten.cli.tables import plain_table
from hasten.core.errors import ServeError

if TYPE_CHECKING:
    from rich.console import Console

    from hasten.stress.load import Run, Standing
    from hasten.stress.sweep import Sweep

_BAR_WIDTH, _DRAWING_WIDTH = 60, 120
_MOST_RATE = 1e6
# The share of requests sent late beyond which the numbers are the client's.
_MOST_LATE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="http://127.0.0.1:8000, or with the path to ask (default: /predict)")
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="requests a second (default: 50)")
    parser.add_argument("--duration", default="10s", metavar="TIME", help="of a run (default: 10s)")
    parser.add_argument(
        "--lengths", metavar="FILE", help="rows to ask, as --data of build (default: a built-in sample)"
    )
    parser.add_argument("--columns", metavar="NAME=COLUMN,…", help="what the file calls them: text=sentence")
    parser.add_argument("--model", default="", help="where the server has several")
    parser.add_argument("--timeout", default="30s", metavar="TIME", help="give a request up after this (default: 30s)")
    parser.add_argument("--key", metavar="KEY", help="an API key")
    parser.add_argument("--sweep", action="store_true", help="find the highest rate that keeps the objective")
    parser.add_argument("--objective", default="50ms", metavar="TIME", help="for p99, with --sweep (default: 50ms)")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the times into a file")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments at which requests come")


def main(args: argparse.Namespace) -> int:
    from hasten.core.errors import PlanError
    from hasten.core.plan import parse_columns, parse_duration
    from hasten.measure.data import read_data, sample_texts
    from hasten.stress.bodies import body
    from hasten.stress.client import Target
    from hasten.stress.load import load
    from hasten.stress.sweep import sweep

    if not 0 < args.rate <= _MOST_RATE:
        raise PlanError(f"a rate is more than 0 and at most {_MOST_RATE:.0f}")
    if args.columns is not None and args.lengths is None:
        raise PlanError("--columns is about a file of rows, and there is none", hint="--lengths FILE")
    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise PlanError(f"there is no directory {args.plot.parent} to draw into")
    seconds, timeout_s = parse_duration(args.duration), parse_duration(args.timeout)
    # A bare number is of milliseconds, as the times that are shown.
    objective_ms = parse_duration(args.objective, "ms") * 1e3
    columns = parse_columns(args.columns) if args.columns is not None else {}
    target = Target.parse(args.url, "/predict", {"authorization": f"Bearer {args.key}"} if args.key else {})
    rows = read_data(args.lengths, columns).rows if args.lengths else [{"text": text} for text in sample_texts()]
    bodies = [body(target.path, row, args.model) for row in rows]
    requests = [target.request(one) for one in bodies]
    target.probe(bodies[0], timeout_s)
    _allow_connections()
    progress = console.display(args.quiet)

    async def run_at(rate: float) -> Run:
        shown = 0.0

        def tell(standing: Standing) -> None:
            nonlocal shown
            now = min(standing.elapsed_s, seconds)
            note = f"{standing.answered} answered, {standing.under_way} under way, {standing.errors} errors"
            progress.advance(now - shown, note)
            shown = now

        progress.start(f"{rate:.0f} requests/s", seconds)
        run = await load(target, requests, rate, seconds, timeout_s=timeout_s, seed=args.seed, on_progress=tell)
        progress.finish(f"p99 {run.p99_ms:.1f} ms, {run.errors} errors", ok=run.errors == 0)
        return run

    work: Coroutine[Any, Any, Run | Sweep]
    work = sweep(run_at, args.rate, objective_ms) if args.sweep else run_at(args.rate)
    result = _with_uvloop(work)
    if args.plot is not None:
        _draw(result, args.plot)
    if args.json:
        console.print_json(result)
    else:
        _print(console.out, result)
    return 0 if _is_borne(result) else ServeError.exit_code


def _is_borne(result: Run | Sweep) -> bool:
    """Whether a rate keeps the objective, or a run had an answer to every request, be it that there are too many."""
    from hasten.stress.load import Run

    if not isinstance(result, Run):
        return result.best is not None
    return result.sent == sum(result.statuses.get(status, 0) for status in (200, 429))


def _allow_connections() -> None:
    """Each request under way has a connection, and shells allow few files."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _with_uvloop(work: Coroutine[Any, Any, Run | Sweep]) -> Run | Sweep:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: Run | Sweep = uvloop.run(work)
    return result


def _print(out: Console, result: Run | Sweep) -> None:
    from hasten.stress.sweep import Sweep, keeps

    runs = result.runs if isinstance(result, Sweep) else (result,)
    table = plain_table("")
    for title in ("requests/s", "answered/s", "p50", "p90", "p99", "p99.9", "max", "errors"):
        table.add_column(title, justify="right")
    for run in sorted(runs, key=lambda run: run.rate):
        times = [*run.percentiles_ms.values(), run.max_ms]
        style = "" if not isinstance(result, Sweep) or keeps(run, result.objective_ms) else "dim"
        table.add_row(
            f"{run.rate:.0f}",
            f"{run.per_second:.0f}",
            *(f"{time:.1f} ms" if run.answered else "–" for time in times),
            run.describe_errors() or "0",
            style=style,
        )
    out.print(table)
    shown = result.best or result.runs[-1] if isinstance(result, Sweep) else result
    _plot(out, shown)
    if shown.late > _MOST_LATE:
        out.print(f"[yellow]{shown.late:.0%} of the requests were sent late: this machine asks no faster[/]")
    if isinstance(result, Sweep):
        kept = f"{result.best.rate:.0f} requests/s keep" if result.best else "no rate that was tried keeps"
        out.print(f"{kept} p99 within {result.objective_ms:g} ms", highlight=False)


def _plot(out: Console, run: Run) -> None:
    """How many requests took how long."""
    from rich.text import Text

    most = max((bar.count for bar in run.histogram), default=0)
    for bar in run.histogram:
        drawn = "█" * round(_BAR_WIDTH * bar.count / most) or ("▏" if bar.count else "")
        out.print(Text(f"{bar.up_to_ms:9.2f} ms  {drawn} {bar.count or ''}"))


def _draw(result: Run | Sweep, file: Path) -> None:
    from rich.console import Console

    from hasten.core.errors import translate_os_errors

    drawing = Console(record=True, width=_DRAWING_WIDTH, file=io.StringIO())
    _print(drawing, result)
    with translate_os_errors(f"drawing {file}"):
        drawing.save_svg(str(file), title="hasten stress")
