from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hasten.cli import console
from hasten.core.report import (
    Agreement,
    AtBatch,
    Bench,
    Candidate,
    Footprint,
    Metric,
    Report,
    Status,
    Timing,
    Verdict,
)
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape

LONG = "onnxruntime-int8+attention+smooth+split+keep12"
USED = ("openvino-bf16", LONG, "onnxruntime-fp32")
REFUSED = [f"onnxruntime-int8+attention+smooth+split+keep{number}" for number in range(1, 9)]
WHY = "accuracy drop 1.15 points (−0.23 to 2.46) > 0.5 at batch 32"

NAMES = ("torch-fp32", "fused", *USED, *REFUSED)
BATCHES = ("agreement in batches of", "flips in batches of", "points lost in batches of")
REPORT = ("not used", "metrics on 872 rows", *BATCHES)
OTHERS = ("footprint", "candidates", "1 rows", "metrics on 872 rows", *BATCHES)


def verdict(name: str, *, passed: bool) -> Verdict:
    agreement = Agreement("same label", 0.99541, 872, 0.5, 0.1, 1.0, flips=4, cosine_mean=0.99998)
    scored, also = Metric("accuracy", 0.9106, 872, {"macro F1": 0.91, "micro F1": 0.92}), Interval(0.1, -0.5, 0.5)
    by_batch = tuple(AtBatch(size, 0.99541, 4, 0.11) for size in (1, 8, 32)) if "int8" in name else ()
    return Verdict(name, passed, WHY, agreement, scored, scored, also, by_batch)


@pytest.fixture
def full(report: Report) -> Report:
    """One with all that a build may say."""
    shapes = (Shape(8, 128), Shape(1, 16), Shape(32, 256))
    speedup, rounds = Interval(3.2, 2.88, 3.68), (1.0,) * 8
    timings = tuple(
        Timing(name, shape, 80, 1384.17, 1400.0, None, 640.0, speedup, rounds)
        for shape in shapes
        for name in ("torch-fp32", *USED)
    )
    candidates = (
        Candidate("torch-fp32", Status.BASELINE, "the original"),
        *(Candidate(name, Status.ELIGIBLE, WHY, verdict(name, passed=True)) for name in USED),
        *(Candidate(name, Status.INACCURATE, WHY, verdict(name, passed=False)) for name in REFUSED),
        Candidate("fused", Status.UNAVAILABLE, "there is no [NVIDIA] GPU here"),
    )
    footprints = tuple(Footprint(name, 6780.0, 617_000_000, 91_000_000) for name in ("torch-fp32", *USED))
    plan = replace(report.plan, model="/some/where/sentence-transformers/all-MiniLM-L6-v2")
    return replace(report, plan=plan, candidates=candidates, bench=Bench("torch-fp32", timings, footprints))


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_row_is_broken_in_two(full: Report, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "out", Console(width=width, file=io.StringIO()))
    console.print_report(full)
    console.print_timings(full.bench)
    console.print_footprints(full.bench)
    console.print_candidates(full.candidates)
    console.print_verdicts(full.candidates, [{"text": "one"}])
    text = console.out.file.getvalue()
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    # Of a row that was broken, the rest would stand without its name.
    named = re.compile(rf"(^|\s)({'|'.join(map(re.escape, ('variant', 'the reference', *NAMES)))})(\s|$)")
    assert [line for line in lines if not named.search(line)] == [*REPORT, str(full.machine), *OTHERS]
    assert "1384 ms" in text
    assert "3.20×" in text
    assert ("2.88–3.68" in text) == (width > 80)
    assert (WHY in text) == (width > 80)


def test_what_loses_nothing_is_told_where_another_was_chosen(full: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    original, *candidates = full.candidates
    lossy = replace(candidates[0].verdict, metric=replace(candidates[0].verdict.metric, value=0.9))
    full = replace(full, candidates=(original, replace(candidates[0], verdict=lossy), *candidates[1:]))
    for chosen, is_told in ((USED[0], True), (USED[1], False)):
        monkeypatch.setattr(console, "out", Console(width=200, file=io.StringIO()))
        console.print_report(replace(full, chosen=chosen, front=USED[:2]))
        text = console.out.file.getvalue()
        assert (f"the fastest that loses nothing: {USED[1]}, 1.00× as long as what was chosen" in text) is is_told
