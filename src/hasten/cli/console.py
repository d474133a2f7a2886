"""Print results for people: tables and JSON on stdout, progress and log lines on stderr."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.logging import RichHandler

from hasten.cli.tables import Column, TableRow, fitted_table
from hasten.core.progress import Progress, SilentProgress
from hasten.core.report import AtBatch, Bench, Candidate, Footprint, Report, Status, Timing, Verdict
from hasten.core.system.display import LOG_WIDTH, Display, err
from hasten.core.tensors import Shape
from hasten.measure.bench import BUSY_SHARE
from hasten.measure.encoder_gate import FP32_TOLERANCE, GRAPH, format_interval, format_points
from hasten.tasks import Row

# Enough of a data row to recognize it.
_MAX_ROW_CHARS = 90
# Lines about variants that a build prints; the rest is a command away.
_SUMMARY_LINES = 8

out = Console(width=None if sys.stdout.isatty() else LOG_WIDTH, highlight=False)

_STYLES = {
    Status.CHOSEN: "bold green",
    Status.BASELINE: "dim",
    Status.INACCURATE: "red",
    Status.FAILED: "red",
    Status.UNAVAILABLE: "dim",
    Status.SKIPPED: "dim",
}
_MARKS = {Status.CHOSEN: "★", Status.INACCURATE: "✗", Status.FAILED: "✗", Status.UNAVAILABLE: "–", Status.SKIPPED: "–"}
_USABLE = (Status.CHOSEN, Status.ELIGIBLE, Status.BASELINE)
_REJECTED = (Status.INACCURATE, Status.FAILED, Status.UNAVAILABLE)
_MARK, _VARIANT = Column("", is_left=True), Column("variant", is_left=True)


def display(quiet: bool) -> Progress:
    """Send log lines to stderr and return the progress display to pass on."""
    handler = RichHandler(console=err, show_time=False, show_path=False)
    logger = logging.getLogger("hasten")
    logger.handlers[:] = [handler]
    logger.propagate = False
    return SilentProgress() if quiet else Display()


def print_json(value: object) -> None:
    """Print a value as indented JSON; paths and arrays are converted."""
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2)
    sys.stdout.write(text.decode() + "\n")


def print_line(text: str, style: str = "") -> None:
    """Print a line as it is: without markup, and never wrapped."""
    out.print(text, style=style, markup=False, soft_wrap=True)


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"{type(value).__name__} is not JSON serializable")
    return tolist()


def print_summary(report: Report, bundle: Path) -> None:
    """Print the variants that matter most in a few lines, and the command that shows the others."""
    candidates = _by_speed(report)
    names = _most_relevant(report, candidates)
    shown = [candidate for candidate in candidates if candidate.variant in names]
    _print_variants(report, shown)
    if len(shown) < len(candidates):
        print_line(f"… and {len(candidates) - len(shown)} more: hasten inspect {bundle}", "dim")
    for reason, skipped in _skipped(candidates).items():
        noun = "variant" if len(skipped) == 1 else "variants"
        out.print(f"{len(skipped)} {noun} {reason}", style="dim", markup=False)
    _print_caveats(report)


def _most_relevant(report: Report, candidates: Sequence[Candidate]) -> Sequence[str]:
    """Return the chosen variant, the baseline, the Pareto front and the rejected variants nearest to passing."""
    rejected = [candidate.variant for candidate in sorted(candidates, key=_nearness) if candidate.status in _REJECTED]
    leading = [report.chosen, report.bench.baseline, *report.pareto_front]
    names = [candidate.variant for candidate in candidates]
    # Two lines are left for rejected variants, however long the front is.
    ranked = dict.fromkeys([*leading[: _SUMMARY_LINES - 3], *rejected[:2], *leading, *rejected, *names])
    relevant = [name for name in ranked if name in names]
    return relevant if len(relevant) <= _SUMMARY_LINES else relevant[: _SUMMARY_LINES - 1]


def print_report(report: Report) -> None:
    """Print all variants: the usable ones at the optimal shape, the rejected ones, and the finalists' other shapes."""
    candidates = _by_speed(report)
    _print_variants(report, candidates)
    for reason, names in _skipped(candidates).items():
        out.print(f"{', '.join(names)}: {reason}", style="dim", markup=False)
    print_metrics(report.candidates)
    print_batches([candidate for candidate in candidates if candidate.status not in _REJECTED])
    print_timings(report.bench, "other shapes", skip=_first_shape(report.bench))
    _print_caveats(report)


def _print_variants(report: Report, candidates: Sequence[Candidate]) -> None:
    """Print the usable candidates at the optimal shape, then the rejected ones with their reasons."""
    usable = [candidate for candidate in candidates if candidate.status in _USABLE]
    verdicts = [candidate.verdict for candidate in usable if candidate.verdict is not None]
    measure = next((verdict.agreement.measure for verdict in verdicts), "agreement")
    columns = (
        *(_MARK, _VARIANT, Column(measure, rank=1), Column("flips", rank=3), Column(_metric(verdicts), rank=2)),
        *(Column("p50"), Column("speed"), Column("interval", rank=4)),
        *(Column("load", rank=7), Column("memory", rank=5), Column("size", rank=6)),
    )
    shape = _first_shape(report.bench)
    timings = report.bench.at(shape)
    footprints = {entry.variant: entry for entry in report.bench.footprints}
    lines = []
    for candidate in usable:
        name, verdict = candidate.variant, candidate.verdict
        mark = "•" if name in report.pareto_front and candidate.status is not Status.CHOSEN else None
        answers = ("reference", "", "") if verdict is None else _answers(verdict)
        times = _times(timings[name], report.bench.baseline) if name in timings else ("", "", "")
        lines.append(_line(candidate, *answers, *times, *_costs(footprints.get(name)), mark=mark))
    # The end of a long path identifies the model.
    model = "/".join(report.plan.model.rstrip("/").split("/")[-2:])
    _print(f"{model} at {shape} (batch × tokens), vs {report.bench.baseline}", columns, lines)
    if (lossless := report.lossless) not in (None, report.chosen):
        slower = timings[report.chosen].speedup.value / timings[lossless].speedup.value
        out.print(f"fastest lossless variant: {lossless}, {slower:.2f}× the latency of {report.chosen}")
    rejected = [candidate for candidate in sorted(candidates, key=_nearness) if candidate.status in _REJECTED]
    reasons = (_MARK, Column("rejected", is_left=True), Column("reason", is_text=True))
    _print("", reasons, [_line(candidate, candidate.reason) for candidate in rejected])


def _skipped(candidates: Sequence[Candidate]) -> dict[str, list[str]]:
    """Return the variants that were not tried, by reason."""
    skipped: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.status is Status.SKIPPED:
            skipped.setdefault(candidate.reason, []).append(candidate.variant)
    return skipped


def _print_caveats(report: Report) -> None:
    out.print(f"[dim]{report.machine}[/]")
    print_notes(report.notes, report.candidates)
    print_busy(report.bench)


def print_busy(bench: Bench) -> None:
    """Print a warning if other processes disturbed the benchmark."""
    if bench.other_cpu_share is not None and bench.other_cpu_share > BUSY_SHARE:
        share = f"{bench.other_cpu_share:.0%}"
        out.print(f"[yellow]other processes used {share} of the CPUs during the benchmark: run it again[/]")


def print_timings(
    bench: Bench, title: str = "timings", skip: Shape | None = None, tokens: Callable[[Shape], int] | None = None
) -> None:
    """Print all timings, one line per shape and variant.

    `tokens` gives the tokens that one row of a shape stands for; without it rows are counted.
    """
    columns = (
        *(Column("shape", is_left=True), _VARIANT, Column("p50"), Column("speed"), Column("interval", rank=1)),
        *(Column("p90", rank=3), Column("p99", rank=2)),
        Column("seq/s", rank=4) if tokens is None else Column("tokens/s"),
    )
    lines, previous = [], None
    for timing in bench.timings:
        if timing.shape != skip:
            shape = str(timing.shape) if timing.shape != previous else ""
            if shape and timing.timed_shape is not None:
                shape += f", from {timing.timed_shape}"
            p99 = _ms(timing.p99_ms) if timing.p99_ms is not None else f"({timing.samples} samples)"
            rate = timing.rows_per_s * (1 if tokens is None else tokens(timing.shape))
            times = _times(timing, bench.baseline)
            lines.append(TableRow((shape, timing.variant, *times, _ms(timing.p90_ms), p99, f"{rate:.0f}")))
            previous = timing.shape
    _print(f"{title} (batch × tokens), vs {bench.baseline}", columns, lines)


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """Print the candidates of a build in which no variant passed, the nearest to passing first, with reasons."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict is not None]
    columns = (
        *(_MARK, _VARIANT, Column("agreement"), Column("flips", rank=2), Column(_metric(verdicts), rank=3)),
        *(Column("drop", rank=1), Column("reason", is_text=True)),
    )
    lines = []
    for candidate in sorted(candidates, key=_nearness):
        verdict = candidate.verdict
        numbers = ("", "", "", "") if verdict is None else (*_answers(verdict), _drop(verdict.drop))
        mark = "✓" if candidate.status in _USABLE else None
        lines.append(_line(candidate, *numbers, candidate.reason, mark=mark))
    _print("candidates", columns, lines)


def _nearness(candidate: Candidate) -> float:
    return 1.0 if candidate.verdict is None else -candidate.verdict.agreement.value


def print_verdicts(candidates: Sequence[Candidate], rows: Sequence[Row]) -> None:
    """Print one line per verified variant, and the row on which each differs most from the reference."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict is not None]
    columns = (
        *(_MARK, _VARIANT, Column("agreement"), Column("flips", rank=3), Column(_metric(verdicts), rank=2)),
        *(Column("drop", rank=1), Column("cosine", rank=5), Column("max error", rank=4)),
        Column("verdict", is_text=True),
    )
    lines = []
    for candidate in candidates:
        verdict = candidate.verdict
        if verdict is None:
            lines.append(TableRow(("–", candidate.variant, *[""] * 6, candidate.reason), "dim"))
            continue
        drop = _drop(verdict.drop) + format_interval(verdict.drop_interval)
        cosine = verdict.agreement.cosine_mean
        others = (drop, "" if cosine is None else f"{cosine:.5f}", f"{verdict.agreement.max_error:.1e}")
        mark, style = ("✓", "") if verdict.passed else ("✗", "red")
        lines.append(TableRow((mark, candidate.variant, *_answers(verdict), *others, candidate.reason), style))
    # The graph is always judged on the stored rows; the variants after it are judged on these.
    _print(f"{len(rows)} rows", columns, lines)
    print_metrics(candidates)
    print_batches(candidates)
    print_notes((), candidates)
    for verdict in verdicts:
        if verdict.variant != GRAPH and verdict.agreement.worst and verdict.agreement.max_error > FP32_TOLERANCE:
            row = json.dumps(rows[verdict.agreement.worst[0]], ensure_ascii=False)
            shown = row if len(row) <= _MAX_ROW_CHARS else f"{row[:_MAX_ROW_CHARS]}…"
            out.print(f"{verdict.variant} differs most on {shown}", style="dim", markup=False)


def print_metrics(candidates: Sequence[Candidate]) -> None:
    """Print all metrics of the task, one line per variant, if there is more than one metric."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.variant != GRAPH]
    scored = [(verdict.variant, verdict.metric) for verdict in verdicts if verdict.metric is not None]
    reference = next((verdict.reference_metric for verdict in verdicts if verdict.reference_metric), None)
    if reference is None or not reference.other_metrics:
        return
    others = (Column(name, rank=rank) for rank, name in enumerate(reference.other_metrics, 1))
    columns = (_VARIANT, Column(reference.name), *others)
    lines = []
    for variant, metric in [("reference", reference), *scored]:
        values = (metric.value, *(metric.other_metrics[name] for name in reference.other_metrics))
        lines.append(TableRow((variant, *(f"{value:.4f}" for value in values))))
    _print(f"metrics on {reference.rows} rows", columns, lines)


def print_batches(candidates: Sequence[Candidate]) -> None:
    """Print the accuracy at each batch size of the variants whose answers depend on the batch."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.verdict.by_batch]
    sizes = sorted({entry.size for verdict in verdicts for entry in verdict.by_batch})
    columns = (_VARIANT, *(Column(str(size)) for size in sizes))
    cells: dict[str, Callable[[AtBatch], str]] = {
        "agreement": lambda entry: f"{entry.agreement:.5f}",
        "flips": lambda entry: "" if entry.flips is None else str(entry.flips),
        "points lost": lambda entry: _drop(entry.drop),
    }
    for title, cell in cells.items():
        lines = []
        for verdict in verdicts:
            by_size = {entry.size: cell(entry) for entry in verdict.by_batch}
            if any(by_size.values()):
                lines.append(TableRow((verdict.variant, *(by_size.get(size, "") for size in sizes))))
        _print(f"{title} by batch size", columns, lines)


def print_notes(notes: Sequence[str], candidates: Sequence[Candidate]) -> None:
    """Print the caveats of a report and of the variants that passed."""
    verdicts = [candidate.verdict for candidate in candidates if candidate.verdict and candidate.verdict.passed]
    for note in (*notes, *(f"{verdict.variant}: {note}" for verdict in verdicts for note in verdict.notes)):
        out.print(note, style="yellow", markup=False)


def print_generation_timings(prefill: Bench, decode: Bench) -> None:
    """Print prefill timings, where a run is a prompt, and decode timings, where it is a token of each sequence."""
    print_timings(prefill, "prefill", tokens=lambda shape: shape.sequence)
    print_timings(decode, "decode", tokens=lambda _: 1)


def print_footprints(bench: Bench) -> None:
    """Print load time, memory and size of each variant."""
    has_gpu = any(entry.gpu_memory_bytes is not None for entry in bench.footprints)
    columns = (_VARIANT, Column("load"), Column("memory"), Column("size"), *([Column("GPU memory")] if has_gpu else []))
    lines = [
        TableRow((entry.variant, *_costs(entry), *([_megabytes(entry.gpu_memory_bytes)] if has_gpu else [])))
        for entry in bench.footprints
    ]
    _print("footprint", columns, lines)


def _print(title: str, columns: Sequence[Column], lines: Sequence[TableRow]) -> None:
    if lines:
        if title:
            # rich would wrap the title of a table at the width of the table.
            print_line(title, "bold")
        out.print(fitted_table(columns, lines, out.width))


def _line(candidate: Candidate, *cells: str, mark: str | None = None) -> TableRow:
    shown = mark if mark is not None else _MARKS.get(candidate.status, "")
    return TableRow((shown, candidate.variant, *cells), _STYLES.get(candidate.status, ""))


def _first_shape(bench: Bench) -> Shape:
    """Return the optimal shape, at which every variant was timed."""
    return bench.timings[0].shape


def _by_speed(report: Report) -> list[Candidate]:
    speeds = {name: timing.speedup.value for name, timing in report.bench.at(_first_shape(report.bench)).items()}
    return sorted(report.candidates, key=lambda candidate: -speeds.get(candidate.variant, 0.0))


def _metric(verdicts: Sequence[Verdict]) -> str:
    """Return the name of the metric, if there are labels."""
    return next((verdict.metric.name for verdict in verdicts if verdict.metric is not None), "metric")


def _answers(verdict: Verdict) -> tuple[str, str, str]:
    """Return agreement, flips and metric."""
    flips, metric = verdict.agreement.flips, verdict.metric
    score = "" if metric is None else f"{metric.value:.4f}"
    return f"{verdict.agreement.value:.5f}", "" if flips is None else str(flips), score


def _drop(drop: float | None) -> str:
    return "" if drop is None else format_points(drop)


def _times(timing: Timing, baseline: str) -> tuple[str, str, str]:
    """Return the p50, the speed-up over the baseline and its interval."""
    if timing.variant == baseline:
        return _ms(timing.p50_ms), "1×", ""
    low, high = timing.speedup.low, timing.speedup.high
    interval = f"{low:.2f}–{high:.2f}" if timing.is_significant else "not significant"
    return _ms(timing.p50_ms), f"{timing.speedup.value:.2f}×", interval if timing.has_interval else "too few rounds"


def _ms(time: float) -> str:
    # Three digits: further ones do not repeat between runs.
    decimals = sum(time < bound for bound in (1, 10, 100))
    return f"{time:.{decimals}f} ms"


def _costs(entry: Footprint | None) -> tuple[str, str, str]:
    if entry is None:
        return "", "", ""
    return f"{entry.load_ms / 1e3:.2f} s", _megabytes(entry.peak_memory_bytes), _megabytes(entry.size_bytes)


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f} MB"
