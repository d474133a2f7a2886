"""Test the search with fake variants: its order, its budget, and how many matmuls stay in float."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.backends import Artifact
from hasten.builder.search.search import Search, SearchTrial, search_order
from hasten.builder.search.select import pareto_front, rank
from hasten.core.errors import HastenError, InputError, PlanError, StageError, UnsupportedError
from hasten.core.progress import SilentProgress
from hasten.core.report import Agreement, Bench, Candidate, Interval, Metric, Report, Status, Timing, Verdict
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Shape, Signature
from hasten.core.variant import Variant
from hasten.quantize.modifiers import kept_matmuls, with_kept

REFINED = Variant.parse("onnxruntime-int8+attention+smooth+split")
FP32 = Variant.parse("onnxruntime-fp32")


def trial(variant: Variant, passed: bool) -> SearchTrial:
    agreement = Agreement("same label", float(passed), 100, 0.0, 0.0, 1.0)
    verdict = Verdict(variant.name, passed, "because", agreement)
    return SearchTrial(Artifact(variant, Signature((), (), 8), Path(), {}), verdict)


def search(passes: Callable[[Variant], bool], *, matmuls: int = 24, budget_s: float = 60.0) -> Search:
    names = [str(index) for index in range(matmuls)]
    return Search(lambda variant: trial(variant, passes(variant)), lambda *_: names, ignore, budget_s, SilentProgress())


def pass_all(*_: object) -> bool:
    return True


def ignore(*_: object) -> None:
    pass


def test_search_order_is_cheapest_first_per_backend() -> None:
    both, _ = search_order([FP32, Variant.parse("openvino-fp32")], this_machine())
    alone, _ = search_order([FP32], this_machine())
    names = [variant.name for variant in both]
    assert names.index("onnxruntime-int8+attention") < names.index(REFINED.name) < names.index("openvino-int8")
    assert names.index("openvino-int8") < names.index("onnxruntime-int8+percentile")
    # Rejected in every published study: tried only if they are named.
    assert not {"onnxruntime-int8+entropy", "onnxruntime-int4+blocks"} & set(names)
    assert {variant.backend for variant in alone} == {"onnxruntime"}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "refined", [REFINED, Variant.parse("fused-fp8@cuda"), Variant.parse("fused-int8@cuda")], ids=str
)
@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 11, 23])
def test_refining_finds_the_smallest_number_of_float_matmuls(needed: int, refined: Variant) -> None:
    run = search(lambda variant: variant == FP32 or kept_matmuls(variant) >= needed)
    run.try_automatic([FP32], [refined])
    passed = [variant for variant, trial in run.trials.items() if trial.verdict.passed and variant != FP32]
    assert min(map(kept_matmuls, passed)) == needed
    # Doubling, then bisection: few variants are tried.
    assert len(run.trials) + len(run.others) <= 12


def test_superseded_variant_is_discarded_and_recorded() -> None:
    discarded: list[str] = []
    run = search(lambda variant: kept_matmuls(variant) >= 5)
    run.discard = lambda artifact: discarded.append(artifact.variant.name)
    run.try_automatic([], [REFINED])
    assert [kept_matmuls(variant) for variant, trial in run.trials.items() if trial.verdict.passed] == [5]
    assert discarded == [with_kept(REFINED, count).name for count in (8, 6)]
    assert [(candidate.variant, candidate.status) for candidate in run.others] == [
        (name, Status.ELIGIBLE) for name in discarded
    ]
    assert run.others[0].reason == f"not timed: {REFINED}+keep6 passes the accuracy gate too, with less in float"
    assert all(candidate.verdict is not None and candidate.verdict.passed for candidate in run.others)


def test_passing_variant_is_not_refined() -> None:
    run = search(pass_all)
    run.try_automatic([FP32], [REFINED])
    assert list(run.trials) == [FP32, REFINED]


def test_refining_stops_when_no_number_of_float_matmuls_passes() -> None:
    run = search(lambda variant: variant == FP32, matmuls=8)
    run.try_automatic([FP32], [REFINED])
    assert [kept_matmuls(variant) for variant in run.trials] == [0, 0, 1, 2, 4, 7]


def test_only_first_variants_are_tried_when_the_budget_is_spent() -> None:
    run = search(pass_all, budget_s=1e-9)
    run.try_automatic([FP32], [REFINED])
    assert list(run.trials) == [FP32]
    assert [(candidate.variant, candidate.status) for candidate in run.others] == [(REFINED.name, Status.SKIPPED)]


@pytest.mark.parametrize(
    ("tried", "skipped"), [([], 1), ([1], 2), ([1, 2, 4], 7), ([1, 2, 4, 7], 5), ([1, 2, 4, 7, 5], 6)]
)
def test_next_refinement_is_recorded_as_skipped_when_the_budget_ends(tried: list[int], skipped: int) -> None:
    """Six of eight matmuls must stay in float: the budget ends before each step of the search for six."""
    last = with_kept(REFINED, tried[-1]) if tried else REFINED

    def passes(variant: Variant) -> bool:
        if variant == last:
            run._deadline = 0.0
        return kept_matmuls(variant) >= 6

    run = search(passes, matmuls=8)
    run.try_automatic([], [REFINED])
    assert [kept_matmuls(variant) for variant in run.trials] == [0, *tried]
    assert [(candidate.variant, candidate.status) for candidate in run.others] == [
        (with_kept(REFINED, skipped).name, Status.SKIPPED)
    ]


@pytest.mark.parametrize("error", [StageError, InputError, UnsupportedError, PlanError])
def test_failing_variant_is_recorded_unless_the_user_named_it(error: type[HastenError]) -> None:
    def attempt(*_: object) -> SearchTrial:
        raise error("no such thing")

    run = Search(attempt, lambda *_: [], ignore, 60.0, SilentProgress())
    run.try_automatic([FP32], [])
    assert [(candidate.status, candidate.reason) for candidate in run.others] == [(Status.FAILED, "no such thing")]
    with pytest.raises(error, match="no such thing"):
        run.try_explicit([FP32])


# --- ranking and the Pareto front


def judged(name: str, accuracy: float) -> Candidate:
    metric, reference = (Metric("accuracy", value, 1000) for value in (accuracy, 0.9))
    agreement = Agreement("same label", 0.99, 1000, 0.1, 0.1, 1.0)
    verdict = Verdict(name, True, "because", agreement, metric=metric, reference_metric=reference)
    return Candidate(name, Status.ELIGIBLE, "because", verdict)


def timed(shape: Shape, speeds: dict[str, float]) -> Bench:
    even = Interval(1.0, 1.0, 1.0)
    timings = [Timing(name, shape, 9, speed, speed, None, 1.0, even, ()) for name, speed in speeds.items()]
    return Bench("slow", tuple(timings), (), None)


def test_variant_eliminated_earlier_ranks_behind_finalists() -> None:
    shape = Shape(8, 128)
    names = ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "openvino-bf16", "graph-fp32"]
    first = timed(shape, dict(zip(names, [5.0, 3.0, 2.0, 4.0, 4.5], strict=True)))
    final = timed(Shape(1, 16), dict.fromkeys(["onnxruntime-int8", "openvino-bf16", "graph-fp32"], 1.0))
    bench = Bench("graph-fp32", (*first.timings, *final.timings), ())
    ranking = rank(bench, shape, [Variant.parse(name) for name in names])
    assert [variant.name for variant in ranking] == [names[index] for index in (1, 3, 2, 4, 0)]
    # Without a final round the times alone decide.
    assert [variant.name for variant in rank(first, shape, ranking)] == [names[index] for index in (2, 1, 3, 4, 0)]
    # The chosen variant is on the Pareto front even if an eliminated one had a shorter time.
    candidates = [judged(name, 0.9 if name == "openvino-fp32" else 0.8) for name in names]
    assert pareto_front(candidates, bench, shape)[0] == "onnxruntime-int8"


def test_pareto_front_leaves_out_slower_and_less_accurate_variants() -> None:
    shape = Shape(8, 128)
    bench = timed(shape, {"wrong": 1.0, "fast": 2.0, "lucky": 3.0, "slow": 4.0})
    candidates = [judged("wrong", 0.8), judged("fast", 0.9), judged("lucky", 0.91), judged("slow", 0.9)]
    assert pareto_front(candidates, bench, shape) == ("wrong", "fast")
    assert pareto_front(candidates[:1] + candidates[2:], bench, shape) == ("wrong", "lucky")


def test_lossless_variant_is_the_fastest_without_loss(report: Report) -> None:
    candidates = (judged("wrong", 0.8), judged("fast", 0.9), judged("near", 0.89))
    judged_report = replace(report, candidates=candidates)
    assert judged_report.lossless is None
    assert replace(judged_report, pareto_front=("wrong", "fast")).lossless == "fast"
    assert replace(judged_report, pareto_front=("wrong", "near")).lossless is None
    # Rounding alone makes vectors differ a little.
    agreement = Agreement("mean cosine", 1 - 1e-8, 1000, 0.0, 0.0, 1.0)
    nearly = Candidate("nearly", Status.ELIGIBLE, "because", Verdict("nearly", True, "because", agreement))
    assert replace(judged_report, candidates=(nearly,), pareto_front=("nearly",)).lossless == "nearly"
