"""What people see: progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.logging import RichHandler

from hasten.cli.tables import Column, Line, fitted_table
from hasten.core.display import LOG_WIDTH, Display, err
from hasten.core.progress import Progress, Silent
from hasten.core.report import AtBatch, Bench, Candidate, Footprint, Report, Status, Timing, Verdict
from hasten.core.tensors import Shape
from hasten.measure.bench import BUSY_SHARE
from hasten.measure.verify import FP32_TOLERANCE, GRAPH, chance, points
from hasten.tasks import Row

# Of a row that is only to be recognized.
_SHOWN_CHARACTERS = 90

out = Console(width=None if sys.stdout.isatty() else LOG_WIDTH)

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
_USED = (Status.CHOSEN, Status.ELIGIBLE, Status.BASELINE)
_REFUSED = (Status.INACCURATE, Status.FAILED, Status.UNAVAILABLE)
_MARK, _VARIANT = Column("", is_left=True), Column("variant", is_left=True)


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
    """What may be used, at the optimal shape; what may not, and why; then the finalists at the other shapes."""
    optimal = report.bench.timings[0].shape
    candidates = _by_speed(report.candidates, report.bench.at(optimal))
    _print_used(report, candidates, optimal)
    refused = [candidate for candidate in candidates if candidate.status in _REFUSED]
    columns = (_MARK, _VARIANT, Column("why not", is_text=True))
    _print("not used", columns, [_line(candidate, candidate.reason) for candidate in refused])
    skipped: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.status is Status.SKIPPED:
            skipped.setdefault(candidate.reason, []).append(candidate.variant)
    for reason, names in skipped.items():
        out.print(f"{', '.join(names)}: {reason}", style="dim", highlight=False, markup=False)
    print_metrics(report.candidates)
    print_batches([candidate for candidate in candidates if candidate not in refused])
    print_timings(report.bench, "other shapes", skip=optimal)
    out.print(f"[dim]{report.machine}[/]")
    print_notes(report.notes, report.candidates)
    print_busy(report.bench)


def _print_used(report: Report, candidates: Sequence[Candidate], shape: Shape) -> None:
    used = [candidate for candidate in candidates if candidate.status in _USED]
    verdicts = [candidate.verdict for candidate in used if candidate.verdict is not None]
    measure = next((verdict.agreement.measure for verdict in verdicts), "agreement")
    columns = (
        *(_MARK, _VARIANT, Column(measure, spare=1), Column("flips", spare=3), Column(_metric(verdicts), spare=2)),
        *(Column("p50"), Column("speed"), Column("interval", spare=4)),
        *(Column("load", spare=7), Column("memory", spare=5), Column("size", spare=6)),
    )
    timings = report.bench.at(shape)
    sizes = {entry.variant: entry for entry in report.bench.footprints}
    lines = []
    for candidate in used:
        name, verdict = candidate.variant, candidate.verdict
        mark = "•" if name in report.front and candidate.status is not Status.CHOSEN else None
        answers = ("original", "", "") if verdict is None else _answers(verdict)
        times = _times(timings[name]) if name in timings else ("", "", "")
        lines.append(_line(candidate, *answers, *times, *_costs(sizes.get(name)), mark=mark))
    # The end of a long path is the part that tells.
    model = "/".join(report.plan.model.rstrip("/").split("/")[-2:])
    _print(f"{model} at {shape} (batch × tokens), vs {report.bench.baseline}", columns, lines)
    if (lossless := report.lossless) not in (None, report.chosen):
        slower = timings[lossless].p50_ms / timings[report.chosen].p50_ms
        out.print(
            f"the fastest that loses nothing: {lossless}, {slower:.2f}× as long as what was chosen", highlight=False
        )


def print_busy(bench: Bench) -> None:
    if bench.others_share is not None and bench.others_share > BUSY_SHARE:
        out.print(f"[yellow]other processes used {bench.others_share:.0%} of the machine meanwhile: time it again[/]")


def print_timings(
    bench: Bench, title: str = "timings", skip: Shape | None = None, tokens: Callable[[Shape], int] | None = None
) -> None:
    """Everything that was timed, a row a shape and variant; `tokens` says what a row counts for where not as one."""
    columns = (
        *(Column("shape", is_left=True), _VARIANT, Column("p50"), Column("speed"), Column("interval", spare=1)),
        *(Column("p90", spare=3), Column("p99", spare=2)),
        Column("sentences/s", spare=4) if tokens is None else Column("tokens/s"),
    )
    lines, last = [], None
    for timing in bench.timings:
        if timing.shape != skip:
            shape = str(timing.shape) if timing.shape != last else ""
            p99 = _ms(timing.p99_ms) if timing.p99_ms is not None else f"({timing.samples} samples)"
            rate = timing.sentences_per_s * (1 if tokens is None else tokens(timing.shape))
            rest = (_ms(timing.p90_ms), p99, f"{rate:.0f}")
            lines.append(Line((shape, timing.variant, *_times(timing), *rest)))
            last = timing.shape
    _print(f"{title} (batch × tokens), vs {bench.baseline}", columns, lines)


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """Where no variant may be used: how near each came, the nearest first, and why it was refused."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict is not None]
    columns = (
        *(_MARK, _VARIANT, Column("agreement"), Column("flips", spare=2), Column(_metric(verdicts), spare=3)),
        *(Column("drop", spare=1), Column("why not", is_text=True)),
    )
    lines = []
    for candidate in sorted(candidates, key=_nearness):
        verdict = candidate.verdict
        numbers = ("", "", "", "") if verdict is None else (*_answers(verdict), _drop(verdict.drop))
        mark = "✓" if candidate.status in _USED else None
        lines.append(_line(candidate, *numbers, candidate.reason, mark=mark))
    _print("candidates", columns, lines)


def _nearness(candidate: Candidate) -> float:
    return 1.0 if candidate.verdict is None else -candidate.verdict.agreement.value


def print_verdicts(candidates: Sequence[Candidate], rows: Sequence[Row]) -> None:
    """What was proven, a row a variant, and the text on which each differs most."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict is not None]
    columns = (
        *(_MARK, _VARIANT, Column("agreement"), Column("flips", spare=3), Column(_metric(verdicts), spare=2)),
        *(Column("drop", spare=1), Column("cosine", spare=5), Column("max error", spare=4)),
        Column("the gate", is_text=True),
    )
    lines = []
    for candidate in candidates:
        verdict = candidate.verdict
        if verdict is None:
            lines.append(Line(("–", candidate.variant, *[""] * 6, candidate.reason), "dim"))
            continue
        drop = _drop(verdict.drop) + chance(verdict.drop_interval)
        cosine = verdict.agreement.cosine_mean
        others = (drop, "" if cosine is None else f"{cosine:.5f}", f"{verdict.agreement.max_error:.1e}")
        mark, style = ("✓", "") if verdict.passed else ("✗", "red")
        lines.append(Line((mark, candidate.variant, *_answers(verdict), *others, candidate.reason), style))
    # The graph is always judged on the stored rows; the others, which come after it, on these.
    _print(f"{len(rows)} rows", columns, lines)
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
    columns = (_VARIANT, Column(reference.name), *(Column(name, spare=at) for at, name in enumerate(reference.also, 1)))
    lines = []
    for variant, metric in [("the reference", reference), *scored]:
        values = (metric.value, *(metric.also[name] for name in reference.also))
        lines.append(Line((variant, *(f"{value:.4f}" for value in values))))
    _print(f"metrics on {reference.rows} rows", columns, lines)


def print_batches(candidates: Sequence[Candidate]) -> None:
    """How variants did at each batch size, where that makes a difference to their answers."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.verdict.by_batch]
    sizes = sorted({entry.size for verdict in verdicts for entry in verdict.by_batch})
    columns = (_VARIANT, *(Column(str(size)) for size in sizes))
    cells: dict[str, Callable[[AtBatch], str]] = {
        "agreement": lambda entry: f"{entry.agreement:.5f}",
        "flips": lambda entry: "" if entry.flips is None else str(entry.flips),
        "points lost": lambda entry: _drop(entry.drop),
    }
    for what, cell in cells.items():
        lines = []
        for verdict in verdicts:
            at = {entry.size: cell(entry) for entry in verdict.by_batch}
            if any(at.values()):
                lines.append(Line((verdict.variant, *(at.get(size, "") for size in sizes))))
        _print(f"{what} in batches of", columns, lines)


def print_notes(notes: Sequence[str], candidates: Sequence[Candidate]) -> None:
    """What a person should know before believing the numbers."""
    # What was refused needs no grain of salt.
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.verdict.passed]
    for note in (*notes, *(f"{verdict.variant}: {note}" for verdict in verdicts for note in verdict.notes)):
        out.print(note, style="yellow", highlight=False, markup=False)


def print_paces(reading: Bench, writing: Bench) -> None:
    """Of models that write: a run is a prompt in one, and in the other a token of every row."""
    print_timings(reading, "reading", tokens=lambda shape: shape.sequence)
    print_timings(writing, "writing", tokens=lambda _: 1)


def print_footprints(bench: Bench) -> None:
    has_gpu = any(entry.gpu_memory_bytes is not None for entry in bench.footprints)
    columns = (_VARIANT, Column("load"), Column("memory"), Column("size"), *([Column("GPU memory")] if has_gpu else []))
    lines = [
        Line((entry.variant, *_costs(entry), *([_megabytes(entry.gpu_memory_bytes)] if has_gpu else [])))
        for entry in bench.footprints
    ]
    _print("footprint", columns, lines)


def _print(title: str, columns: Sequence[Column], lines: Sequence[Line]) -> None:
    if lines:
        # A title of the table's own is wrapped at the width of the table.
        out.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
        out.print(fitted_table(columns, lines, out.width))


def _line(candidate: Candidate, *cells: str, mark: str | None = None) -> Line:
    shown = mark if mark is not None else _MARKS.get(candidate.status, "")
    return Line((shown, candidate.variant, *cells), _STYLES[candidate.status])


def _by_speed(candidates: Sequence[Candidate], timings: dict[str, Timing]) -> list[Candidate]:
    last = float("inf")
    return sorted(candidates, key=lambda c: timings[c.variant].p50_ms if c.variant in timings else last)


def _metric(verdicts: Sequence[Verdict]) -> str:
    """What they are judged by, where they have labels."""
    return next((verdict.metric.name for verdict in verdicts if verdict.metric is not None), "metric")


def _answers(verdict: Verdict) -> tuple[str, str, str]:
    """Agreement, flips and metric."""
    flips, metric = verdict.agreement.flips, verdict.metric
    shown = ("" if flips is None else str(flips), "" if metric is None else f"{metric.value:.4f}")
    return (f"{verdict.agreement.value:.5f}", *shown)


def _drop(drop: float | None) -> str:
    return "" if drop is None else points(drop)


def _times(timing: Timing) -> tuple[str, str, str]:
    """p50, the speed-up over the baseline, and its interval."""
    low, high = timing.speedup.low, timing.speedup.high
    if low == high == 1.0:
        return _ms(timing.p50_ms), "1×", ""
    interval = f"{low:.2f}–{high:.2f}" if timing.is_significant else "not significant"
    shown = interval if timing.has_interval else "too few rounds"
    return _ms(timing.p50_ms), f"{timing.speedup.value:.2f}×", shown


def _ms(time: float) -> str:
    """Three digits, which is as far as times repeat."""
    decimals = sum(time < bound for bound in (1, 10, 100))
    return f"{time:.{decimals}f} ms"


def _costs(entry: Footprint | None) -> tuple[str, str, str]:
    if entry is None:
        return "", "", ""
    return f"{entry.load_ms / 1e3:.2f} s", _megabytes(entry.peak_memory_bytes), _megabytes(entry.size_bytes)


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f} MB"
