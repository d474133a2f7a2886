"""The command `hasten stress URL`."""

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

    from hasten.stress.load import LoadResult, LoadStatus
    from hasten.stress.sweep import Sweep

_BAR_WIDTH, _DRAWING_WIDTH = 60, 120
_MAX_RATE, _MAX_CLIENTS = 1e6, 10_000
# Beyond this share of late requests the client, not the server, is measured.
_MAX_LATE_SHARE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hasten stress`."""
    parser.add_argument(
        "url", help="address of the server, as http://127.0.0.1:8000, with an optional path (default: /predict)"
    )
    parser.add_argument("--rate", type=float, default=50.0, metavar="N", help="requests per second (default: 50)")
    parser.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="run N clients that each wait for an answer before the next request, instead of a fixed --rate",
    )
    parser.add_argument("--duration", default="10s", metavar="TIME", help="duration of a run (default: 10s)")
    parser.add_argument(
        "--data", metavar="FILE", help="file of rows to send: jsonl, csv, parquet, … (default: a built-in sample)"
    )
    parser.add_argument(
        "--columns", metavar="NAME=COLUMN,…", help="columns of the file to use as fields: text=sentence"
    )
    parser.add_argument("--model", default="", help="model to address, if the server has several")
    parser.add_argument("--timeout", default="30s", metavar="TIME", help="time to wait for an answer (default: 30s)")
    parser.add_argument("--api-key", metavar="KEY", help="API key to send")
    parser.add_argument("--sweep", action="store_true", help="find the highest rate whose p99 meets --slo-p99")
    parser.add_argument(
        "--slo-p99", default="50ms", metavar="TIME", help="objective for the p99 latency with --sweep (default: 50ms)"
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write the latency histogram to an SVG file")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed for arrival times")


def main(args: argparse.Namespace) -> int:
    """Run `hasten stress`."""
    from hasten.core.errors import PlanError
    from hasten.core.plan import parse_columns, parse_duration
    from hasten.measure.data import read_data, sample_texts
    from hasten.stress.bodies import body
    from hasten.stress.client import StressTarget
    from hasten.stress.load import closed_loop, load
    from hasten.stress.sweep import sweep

    if not 0 < args.rate <= _MAX_RATE:
        raise PlanError(f"--rate must be more than 0 and at most {_MAX_RATE:.0f}")
    if args.clients is not None and not 0 < args.clients <= _MAX_CLIENTS:
        raise PlanError(f"--clients must be between 1 and {_MAX_CLIENTS}")
    if args.clients is not None and args.sweep:
        raise PlanError("--sweep searches for a rate, and --clients has none", hint="leave one of them out")
    if args.columns is not None and args.data is None:
        raise PlanError("--columns needs a file of rows", hint="add --data FILE")
    if args.plot is not None and not args.plot.absolute().parent.is_dir():
        raise PlanError(f"--plot: there is no directory {args.plot.parent}")
    seconds, timeout_s = parse_duration(args.duration), parse_duration(args.timeout)
    # A bare number is in milliseconds, as in the output.
    objective_ms = parse_duration(args.slo_p99, "ms") * 1e3
    columns = parse_columns(args.columns) if args.columns is not None else {}
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    target = StressTarget.parse(args.url, "/predict", headers)
    rows = read_data(args.data, columns).rows if args.data else [{"text": text} for text in sample_texts()]
    bodies = [body(target.path, row, args.model) for row in rows]
    requests = [target.request(content) for content in bodies]
    target.probe(bodies[0], timeout_s)
    _allow_connections()
    progress = console.display(args.quiet)

    async def run_at(rate: float) -> LoadResult:
        shown = 0.0

        def show(status: LoadStatus) -> None:
            nonlocal shown
            now = min(status.elapsed_s, seconds)
            note = f"{status.answered} answered, {status.in_flight} in flight, {status.errors} errors"
            progress.advance(now - shown, note)
            shown = now

        options: Any = {"timeout_s": timeout_s, "seed": args.seed, "on_progress": show}
        if args.clients is not None:
            progress.start(f"{args.clients} clients", seconds)
            run = await closed_loop(target, requests, args.clients, seconds, **options)
        else:
            progress.start(f"{rate:.0f} requests/s", seconds)
            run = await load(target, requests, rate, seconds, **options)
        progress.finish(f"p99 {run.p99_ms:.1f} ms, {run.errors} errors", ok=run.errors == 0)
        return run

    work: Coroutine[Any, Any, LoadResult | Sweep]
    work = sweep(run_at, args.rate, objective_ms) if args.sweep else run_at(args.rate)
    result = _with_uvloop(work)
    if args.plot is not None:
        _draw(result, args.plot)
    if args.json:
        console.print_json(result)
    else:
        _print(console.out, result)
    return 0 if _has_passed(result) else ServeError.exit_code


def _has_passed(result: LoadResult | Sweep) -> bool:
    """Return whether a rate met the objective, or each request of a run was answered or rejected with 429."""
    from hasten.stress.load import LoadResult

    if not isinstance(result, LoadResult):
        return result.best is not None
    return result.sent == sum(result.statuses.get(status, 0) for status in (200, 429))


def _allow_connections() -> None:
    """Raise the limit of open files, which shells set low: each request in flight has a connection."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _with_uvloop(work: Coroutine[Any, Any, LoadResult | Sweep]) -> LoadResult | Sweep:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    result: LoadResult | Sweep = uvloop.run(work)
    return result


def _print(out: Console, result: LoadResult | Sweep) -> None:
    from hasten.stress.sweep import Sweep, meets

    runs = result.runs if isinstance(result, Sweep) else (result,)
    names = ("requests/s", "answered/s", "p50", "p90", "p99", "p99.9", "max", "errors")
    table = plain_table(right=names)
    for run in sorted(runs, key=lambda run: run.rate):
        times = [*run.percentiles_ms.values(), run.max_ms]
        style = "" if not isinstance(result, Sweep) or meets(run, result.objective_ms) else "dim"
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
    if shown.late > _MAX_LATE_SHARE:
        out.print(f"[yellow]{shown.late:.0%} of the requests were sent late: this client is the bottleneck[/]")
    if shown.fairness is not None:
        out.print(f"fairness {shown.fairness:.2f}: answers of the slowest client over those of the median client")
    if isinstance(result, Sweep):
        rate = f"{result.best.rate:.0f} requests/s meet" if result.best else "no rate that was tried meets"
        out.print(f"{rate} p99 ≤ {result.objective_ms:g} ms")


def _plot(out: Console, run: LoadResult) -> None:
    """Print the latency histogram."""
    from rich.text import Text

    highest = max((bar.count for bar in run.histogram), default=0)
    for bar in run.histogram:
        drawn = "█" * round(_BAR_WIDTH * bar.count / highest) or ("▏" if bar.count else "")
        out.print(Text(f"{bar.up_to_ms:9.2f} ms  {drawn} {bar.count or ''}"))


def _draw(result: LoadResult | Sweep, file: Path) -> None:
    from rich.console import Console

    from hasten.core.errors import translate_os_errors

    drawing = Console(record=True, width=_DRAWING_WIDTH, file=io.StringIO(), highlight=False)
    _print(drawing, result)
    with translate_os_errors(f"drawing {file}"):
        drawing.save_svg(str(file), title="hasten stress")
