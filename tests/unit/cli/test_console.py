from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hasten.cli import console
from hasten.core.report import (
    Agreement,
    AtBatch,
    Bench,
    Candidate,
    Footprint,
    Interval,
    Metric,
    Report,
    Status,
    Timing,
    Verdict,
)
from hasten.core.tensors import Shape

LONG = "onnxruntime-int8+attention+smooth+split+keep12"
USABLE = ("openvino-bf16", LONG, "onnxruntime-fp32")
REJECTED = [f"onnxruntime-int8+attention+smooth+split+keep{number}" for number in range(1, 9)]
REASON = "accuracy drop 1.15 points (−0.23 to 2.46) > 0.5 at batch 32"

NAMES = ("torch-fp32", "fused", *USABLE, *REJECTED)
BY_BATCH = ("agreement by batch size", "flips by batch size", "points lost by batch size")
REPORT_TITLES = ("metrics on 872 rows", *BY_BATCH)
OTHER_TITLES = ("footprint", "candidates", "1 rows", "metrics on 872 rows", *BY_BATCH)


def verdict(name: str, *, passed: bool, value: float = 0.99541) -> Verdict:
    agreement = Agreement("same label", value, 872, 0.5, 0.1, 1.0, flips=4, cosine_mean=0.99998)
    metric, interval = Metric("accuracy", 0.9106, 872, {"macro F1": 0.91, "micro F1": 0.92}), Interval(0.1, -0.5, 0.5)
    by_batch = tuple(AtBatch(size, value, 4, 0.11) for size in (1, 8, 32)) if "int8" in name else ()
    return Verdict(name, passed, REASON, agreement, metric, metric, interval, by_batch)


def timing(name: str, shape: Shape) -> Timing:
    return Timing(name, shape, 80, 1384.17, 1400.0, None, 640.0, Interval(3.2, 2.88, 3.68), (1384.17,) * 8)


@pytest.fixture
def full_report(report: Report) -> Report:
    """A report with everything that a build can report."""
    shapes = (Shape(8, 128), Shape(1, 16), Shape(32, 256))
    timings = tuple(timing(name, shape) for shape in shapes for name in ("torch-fp32", *USABLE))
    candidates = (
        Candidate("torch-fp32", Status.BASELINE, "the baseline"),
        *(Candidate(name, Status.ELIGIBLE, REASON, verdict(name, passed=True)) for name in USABLE),
        *(
            Candidate(name, Status.INACCURATE, REASON, verdict(name, passed=False, value=0.9 + number / 1000))
            for number, name in enumerate(REJECTED)
        ),
        Candidate("fused", Status.UNAVAILABLE, "there is no [NVIDIA] GPU here"),
    )
    footprints = tuple(Footprint(name, 6780.0, 617_000_000, 91_000_000) for name in ("torch-fp32", *USABLE))
    plan = replace(report.plan, model="/some/where/sentence-transformers/all-MiniLM-L6-v2")
    bench = Bench("torch-fp32", timings, footprints)
    return replace(report, plan=plan, candidates=candidates, bench=bench, chosen=USABLE[0])


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    output = io.StringIO()
    monkeypatch.setattr(console, "out", Console(width=120, file=output))
    return output


def shown_names(text: str) -> set[str]:
    return {name for name in NAMES if re.search(rf"^\W*{re.escape(name)}\s", text, re.MULTILINE)}


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_row_is_wrapped(full_report: Report, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(width=width, file=io.StringIO()))
    console.print_report(full_report)
    console.print_timings(full_report.bench)
    console.print_footprints(full_report.bench)
    console.print_candidates(full_report.candidates)
    console.print_verdicts(full_report.candidates, [{"text": "one"}])
    text = console.out.file.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    # The rest of a wrapped row would stand on a line without the name of its variant.
    named = re.compile(rf"(^|\s)({'|'.join(map(re.escape, ('variant', 'rejected', 'reference', *NAMES)))})(\s|$)")
    unnamed = [line for line in lines if not named.search(line)]
    assert unnamed == [*REPORT_TITLES, str(full_report.machine), *OTHER_TITLES]
    assert "1384 ms" in text
    assert "3.20×" in text
    assert ("2.88–3.68" in text) == (width > 80)
    assert (REASON in text) == (width > 80)


def test_fastest_lossless_variant_is_named_if_another_was_chosen(
    full_report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline, *candidates = full_report.candidates
    lossy = replace(candidates[0].verdict, metric=replace(candidates[0].verdict.metric, value=0.9))
    report = replace(full_report, candidates=(baseline, replace(candidates[0], verdict=lossy), *candidates[1:]))
    for chosen, is_named in ((USABLE[0], True), (USABLE[1], False)):
        monkeypatch.setattr(console, "out", Console(width=200, file=io.StringIO()))
        console.print_report(replace(report, chosen=chosen, pareto_front=USABLE[:2]))
        text = console.out.file.getvalue()
        assert (f"fastest lossless variant: {USABLE[1]}, 1.00× the latency of {USABLE[0]}" in text) is is_named


def test_summary_shows_few_variants_and_the_command_for_the_others(full_report: Report, printed: io.StringIO) -> None:
    console.print_summary(replace(full_report, pareto_front=(USABLE[0], USABLE[2])), Path("minilm"))
    text = printed.getvalue()
    # The chosen variant, the baseline, the Pareto front, and the rejected variants nearest to passing.
    assert shown_names(text) == {"torch-fp32", USABLE[0], USABLE[2], *REJECTED[-4:]}
    assert text.index(REJECTED[-1]) < text.index(REJECTED[-2])
    assert f"… and {len(NAMES) - 7} more: hasten inspect minilm\n" in text


def test_summary_shows_all_of_eight_variants(full_report: Report, printed: io.StringIO) -> None:
    console.print_summary(replace(full_report, candidates=full_report.candidates[:8]), Path("minilm"))
    text = printed.getvalue()
    assert shown_names(text) == {candidate.variant for candidate in full_report.candidates[:8]}
    assert "more:" not in text


def test_summary_keeps_two_rejected_variants_beside_a_long_front(full_report: Report, printed: io.StringIO) -> None:
    eligible = [Candidate(f"openvino-int{n}", Status.ELIGIBLE, REASON, verdict("x", passed=True)) for n in range(9)]
    candidates = (*full_report.candidates, *eligible)
    front = (USABLE[0], *(candidate.variant for candidate in eligible))
    console.print_summary(replace(full_report, candidates=candidates, pareto_front=front), Path("minilm"))
    assert sum(line.startswith("✗") for line in printed.getvalue().splitlines()) == 2


def test_summary_counts_skipped_variants_by_reason(full_report: Report, printed: io.StringIO) -> None:
    skipped = [Candidate(name, Status.SKIPPED, "not tried: no [time] left") for name in ("openvino-int8", "fused-fp8")]
    console.print_summary(replace(full_report, candidates=(*full_report.candidates, *skipped)), Path("minilm"))
    assert "\n2 variants not tried: no [time] left\n" in printed.getvalue()
