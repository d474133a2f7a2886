"""What people see: progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from hasten.core.progress import Progress, Silent
from hasten.core.report import Bench, Candidate, Report, Status, Timing
from hasten.core.tensors import Shape
from hasten.measure.bench import BUSY_SHARE
from hasten.measure.verify import FP32_TOLERANCE, GRAPH, chance, points
from hasten.tasks import Row

# A log or a pipe has no width of its own; tables keep their columns there.
_LOG_WIDTH = 140
# Of a row that is only to be recognized.
_SHOWN_CHARACTERS = 90

out = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else _LOG_WIDTH)

_STYLES = {
    Status.CHOSEN: "bold green",
    Status.ELIGIBLE: "",
    Status.BASELINE: "dim",
    Status.INACCURATE: "red",
    Status.FAILED: "red",
    Status.UNAVAILABLE: "dim",
    Status.SKIPPED: "dim",
}
_MARKS = {Status.CHOSEN: "★", Status.INACCURATE: "✗", Status.FAILED: "✗", Status.UNAVAILABLE: "–", Status.SKIPPED: "–"}


class Display:
    """Progress bars for a person at a terminal; one line a finished stage for a log."""

    def __init__(self) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._open: list[tuple[TaskID, str, float]] = []

    def start(self, what: str, total: float | None = None) -> None:
        if not self._open:
            self._bars.start()
        shown = "  " * len(self._open) + what
        self._open.append((self._bars.add_task(shown, total=total, note=""), what, time.perf_counter()))

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        task = self._open[-1][0]
        if note is None:
            self._bars.update(task, advance=round(amount, 1))
        else:
            self._bars.update(task, advance=round(amount, 1), note=escape(note))

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        task, what, began = self._open.pop()
        self._bars.remove_task(task)
        if not self._open:
            self._bars.stop()
            mark = "[green]✓[/]" if ok else "[red]✗[/]"
            err.print(f"{mark} {what:<18} [cyan]{time.perf_counter() - began:6.1f} s[/]  [dim]{escape(note)}[/]")


def display(quiet: bool) -> Progress:
    """The progress to hand down, and hasten's own log lines on stderr."""
    handler = RichHandler(console=err, show_time=False, show_path=False)
    logger = logging.getLogger("hasten")
    logger.handlers[:] = [handler]
    logger.propagate = False
    return Silent() if quiet else Display()


def print_json(value: object) -> None:
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2)
    sys.stdout.write(text.decode() + "\n")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return tolist()


def print_report(report: Report) -> None:
    """The candidates at the optimal shape, then the finalists at the others."""
    timings = report.bench.timings
    optimal = timings[0].shape
    at_optimal = report.bench.at(optimal)
    sizes = {entry.variant: entry for entry in report.bench.footprints}
    # The end of a long path is the part that tells.
    model = "/".join(report.plan.model.rstrip("/").split("/")[-2:])
    table = plain_table(f"{model} at {optimal} (batch × tokens)")
    for name in (
        "",
        "variant",
        "answers like the original?",
        "p50",
        f"vs {report.bench.baseline}",
        "load",
        "memory",
        "size",
    ):
        justify: Literal["left", "right"] = "right" if name in ("p50", "load", "memory", "size") else "left"
        # Half a name names nothing: rather let the sentence beside it wrap.
        table.add_column(name, justify=justify, no_wrap=name == "variant")
    skipped: dict[str, list[str]] = {}
    for candidate in _by_speed(report.candidates, at_optimal):
        if candidate.status is Status.SKIPPED:
            skipped.setdefault(candidate.reason, []).append(candidate.variant)
            continue
        timing, size = at_optimal.get(candidate.variant), sizes.get(candidate.variant)
        table.add_row(
            _MARKS.get(candidate.status, "•" if candidate.variant in report.front else ""),
            candidate.variant,
            escape(_answers(candidate)),
            f"{timing.p50_ms:.2f} ms" if timing else "",
            _ratio(timing) if timing else "",
            f"{size.load_ms / 1e3:.2f} s" if size else "",
            _megabytes(size.peak_memory_bytes) if size else "",
            _megabytes(size.size_bytes) if size else "",
            style=_STYLES[candidate.status],
        )
    out.print(table)
    for reason, names in skipped.items():
        out.print(f"{', '.join(names)}: {escape(reason)}", style="dim", highlight=False)
    print_metrics(report.candidates)
    print_batches(report.candidates)
    print_shapes(report.bench, skip=optimal)
    out.print(f"[dim]{report.machine}[/]")
    print_notes(report.notes, report.candidates)
    print_busy(report.bench)


def print_busy(bench: Bench) -> None:
    if bench.others_share is not None and bench.others_share > BUSY_SHARE:
        out.print(f"[yellow]other processes used {bench.others_share:.0%} of the machine meanwhile: time it again[/]")


def print_shapes(bench: Bench, skip: Shape | None = None) -> None:
    """p50 and speed-up of each variant, a row a shape."""
    shapes = [shape for shape in dict.fromkeys(timing.shape for timing in bench.timings) if shape != skip]
    if not shapes:
        return
    names = list(dict.fromkeys(timing.variant for timing in bench.timings if timing.shape in shapes))
    table = plain_table("other shapes" if skip else "all shapes")
    table.add_column("batch × tokens")
    for name in names:
        table.add_column(name, justify="right")
    for shape in shapes:
        row = bench.at(shape)
        table.add_row(str(shape), *(_cell(row.get(name), bench.baseline) for name in names))
    out.print(table)


def print_timings(bench: Bench) -> None:
    """Everything that was timed, a row a shape and variant."""
    table = plain_table("timings")
    for name in ("batch × tokens", "variant", "p50", "p90", "p99", "sentences/s", f"vs {bench.baseline}"):
        justify: Literal["left", "right"] = "right" if name in ("p50", "p90", "p99", "sentences/s") else "left"
        table.add_column(name, justify=justify, no_wrap=name == "variant")
    last = None
    for timing in bench.timings:
        table.add_row(
            str(timing.shape) if timing.shape != last else "",
            timing.variant,
            f"{timing.p50_ms:.2f} ms",
            f"{timing.p90_ms:.2f} ms",
            f"{timing.p99_ms:.2f} ms" if timing.p99_ms is not None else f"({timing.samples} samples)",
            f"{timing.sentences_per_s:.0f}",
            _ratio(timing),
        )
        last = timing.shape
    out.print(table)


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """Where no variant may be used: how near each came, the nearest first, and why it was refused."""
    table = plain_table("candidates")
    for name in ("", "variant", "agreement", "flips", "metric", "drop"):
        table.add_column(name, justify="left" if name in ("", "variant") else "right", no_wrap=True)
    table.add_column("why not")
    for candidate in sorted(candidates, key=_nearness):
        verdict = candidate.verdict
        flips = verdict.agreement.flips if verdict is not None else None
        table.add_row(
            _MARKS.get(candidate.status, "✓"),
            candidate.variant,
            f"{verdict.agreement.value:.4f}" if verdict is not None else "",
            "" if flips is None else str(flips),
            f"{verdict.metric.value:.4f}" if verdict is not None and verdict.metric is not None else "",
            points(verdict.drop) if verdict is not None and verdict.drop is not None else "",
            escape(candidate.reason),
            style=_STYLES[candidate.status],
        )
    out.print(table)


def _nearness(candidate: Candidate) -> float:
    return 1.0 if candidate.verdict is None else -candidate.verdict.agreement.value


def print_verdicts(candidates: Sequence[Candidate], rows: Sequence[Row]) -> None:
    """What was proven, a row a variant, and the text on which each differs most."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict is not None]
    metric = next((verdict.metric for verdict in verdicts if verdict.metric is not None), None)
    # The graph is always judged on the stored rows; the others, which come after it, on these.
    table = plain_table(f"{len(rows)} rows")
    judged = ("metric", "drop") if metric is None else (metric.name, "drop")
    for name in ("", "variant", "agreement", "flips", "cosine", "max error", *judged):
        table.add_column(name, justify="left" if name in ("", "variant") else "right", no_wrap=name == "variant")
    table.add_column("the gate")
    for candidate in candidates:
        verdict = candidate.verdict
        if verdict is None:
            table.add_row("–", candidate.variant, *[""] * 6, escape(candidate.reason), style="dim")
            continue
        agreement = verdict.agreement
        table.add_row(
            "[green]✓[/]" if verdict.passed else "[red]✗[/]",
            candidate.variant,
            f"{agreement.value:.5f}",
            "" if agreement.flips is None else str(agreement.flips),
            "" if agreement.cosine_mean is None else f"{agreement.cosine_mean:.5f}",
            f"{agreement.max_error:.1e}",
            "" if verdict.metric is None else f"{verdict.metric.value:.4f}",
            "" if verdict.drop is None else points(verdict.drop) + chance(verdict.drop_interval),
            escape(candidate.reason),
        )
    out.print(table)
    print_metrics(candidates)
    print_batches(candidates)
    print_notes((), candidates)
    for verdict in verdicts:
        if verdict.variant != GRAPH and verdict.agreement.worst and verdict.agreement.max_error > FP32_TOLERANCE:
            row = json.dumps(rows[verdict.agreement.worst[0]], ensure_ascii=False)
            shown = row if len(row) <= _SHOWN_CHARACTERS else f"{row[:_SHOWN_CHARACTERS]}…"
            out.print(f"{verdict.variant} differs most on {shown}", style="dim", highlight=False, markup=False)


def print_metrics(candidates: Sequence[Candidate]) -> None:
    """Everything people know the task's answers by, a row a variant, where that is more than one number."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.variant != GRAPH]
    scored = [(verdict.variant, verdict.metric) for verdict in verdicts if verdict.metric is not None]
    reference = next((verdict.reference_metric for verdict in verdicts if verdict.reference_metric), None)
    if reference is None or not reference.also:
        return
    table = plain_table(f"metrics on {reference.rows} rows")
    for name in ("variant", reference.name, *reference.also):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for variant, metric in [("the reference", reference), *scored]:
        values = (metric.value, *(metric.also[name] for name in reference.also))
        table.add_row(variant, *(f"{value:.4f}" for value in values))
    out.print(table)


def print_batches(candidates: Sequence[Candidate]) -> None:
    """How variants did at each batch size, where that makes a difference to their answers."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.verdict.by_batch]
    if not verdicts:
        return
    table = plain_table("in batches of different size")
    for name in ("variant", "batch", "agreement", "flips", "drop"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for verdict in verdicts:
        for entry in verdict.by_batch:
            table.add_row(
                verdict.variant if entry is verdict.by_batch[0] else "",
                str(entry.size),
                f"{entry.agreement:.5f}",
                "" if entry.flips is None else str(entry.flips),
                "" if entry.drop is None else points(entry.drop),
            )
    out.print(table)


def print_notes(notes: Sequence[str], candidates: Sequence[Candidate]) -> None:
    """What a person should know before believing the numbers."""
    # What was refused needs no grain of salt.
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.verdict.passed]
    for note in (*notes, *(f"{verdict.variant}: {note}" for verdict in verdicts for note in verdict.notes)):
        out.print(note, style="yellow", highlight=False, markup=False)


def print_footprints(bench: Bench) -> None:
    table = plain_table("footprint")
    has_gpu = any(entry.gpu_memory_bytes is not None for entry in bench.footprints)
    for name in ("variant", "load", "memory", "size", *(["GPU memory"] if has_gpu else [])):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for entry in bench.footprints:
        table.add_row(
            entry.variant,
            f"{entry.load_ms / 1e3:.2f} s",
            _megabytes(entry.peak_memory_bytes),
            _megabytes(entry.size_bytes),
            *([] if entry.gpu_memory_bytes is None else [_megabytes(entry.gpu_memory_bytes)]),
        )
    out.print(table)


def plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _by_speed(candidates: Sequence[Candidate], timings: dict[str, Timing]) -> list[Candidate]:
    last = float("inf")
    return sorted(candidates, key=lambda c: timings[c.variant].p50_ms if c.variant in timings else last)


def _answers(candidate: Candidate) -> str:
    verdict = candidate.verdict
    if verdict is None:
        return candidate.reason
    if not verdict.passed:
        return f"no: {verdict.reason}"
    drop = (
        "" if verdict.drop is None or verdict.metric is None else f", {verdict.metric.name} {verdict.metric.value:.4f}"
    )
    agreement = verdict.agreement
    flips = "" if agreement.flips is None else f", {agreement.flips} of {agreement.rows} flipped"
    return f"yes: {agreement.measure} {agreement.value:.5f}{flips}{drop}"


def _ratio(timing: Timing) -> str:
    low, high = timing.speedup.low, timing.speedup.high
    if low == high == 1.0:
        return "1×"
    if not timing.has_interval:
        return f"{timing.speedup.value:.2f}× (too few rounds for an interval)"
    if not timing.is_significant:
        return f"{timing.speedup.value:.2f}× (no significant difference)"
    return f"{timing.speedup.value:.2f}× ({low:.2f}–{high:.2f})"


def _cell(timing: Timing | None, baseline: str) -> str:
    if timing is None:
        return ""
    ratio = "" if timing.variant == baseline else f"  {timing.speedup.value:.2f}×"
    return f"{timing.p50_ms:.2f} ms{ratio}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
