"""The search itself: in which order, for how long, and how few products stay in float. What is tried is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.backends import Artifact
from hasten.builder.choose import front, rank
from hasten.builder.search import Search, Trial, ladder
from hasten.core.errors import HastenError, InputError, PlanError, StageError, UnsupportedError
from hasten.core.hardware import this_machine
from hasten.core.progress import Silent
from hasten.core.report import Agreement, Bench, Candidate, Metric, Report, Status, Timing, Verdict
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape, Signature
from hasten.core.variant import Variant
from hasten.quantize.ways import kept_products, with_kept

MENDED = Variant.parse("onnxruntime-int8+attention+smooth+split")
FP32 = Variant.parse("onnxruntime-fp32")


def trial(variant: Variant, passed: bool) -> Trial:
    agreement = Agreement("same label", float(passed), 100, 0.0, 0.0, 1.0)
    verdict = Verdict(variant.name, passed, "because", agreement)
    return Trial(Artifact(variant, Signature((), (), 8), Path(), {}), verdict)


def search(passes: Callable[[Variant], bool], *, products: int = 24, budget_s: float = 60.0) -> Search:
    names = [str(place) for place in range(products)]
    return Search(lambda variant: trial(variant, passes(variant)), lambda *_: names, ignore, budget_s, Silent())


def anything(*_: object) -> bool:
    return True


def ignore(*_: object) -> None:
    pass


def test_cheap_before_dear_and_each_backend_its_own() -> None:
    both, _ = ladder([FP32, Variant.parse("openvino-fp32")], this_machine())
    alone, _ = ladder([FP32], this_machine())
    names = [variant.name for variant in both]
    assert names.index("onnxruntime-int8+attention") < names.index(MENDED.name) < names.index("openvino-int8")
    assert names.index("openvino-int8") < names.index("onnxruntime-int8+entropy")
    assert {variant.backend for variant in alone} == {"onnxruntime"}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mended", [MENDED, Variant.parse("fused-fp8@cuda"), Variant.parse("fused-int8@cuda")], ids=str)
@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 11, 23])
def test_as_few_products_in_float_as_will_do(needed: int, mended: Variant) -> None:
    found = search(lambda variant: variant == FP32 or kept_products(variant) >= needed)
    found.try_offered([FP32], [mended])
    passed = [variant for variant, trial in found.trials.items() if trial.verdict.passed and variant != FP32]
    assert min(map(kept_products, passed)) == needed
    # Doubled, then halved: few are tried.
    assert len(found.trials) + len(found.others) <= 12


def test_what_one_with_less_in_float_replaces_is_not_kept() -> None:
    discarded: list[str] = []
    found = search(lambda variant: kept_products(variant) >= 5)
    found.discard = lambda artifact: discarded.append(artifact.variant.name)
    found.try_offered([], [MENDED])
    assert [kept_products(variant) for variant, trial in found.trials.items() if trial.verdict.passed] == [5]
    assert discarded == [with_kept(MENDED, count).name for count in (8, 6)]
    assert [(candidate.variant, candidate.status) for candidate in found.others] == [
        (name, Status.ELIGIBLE) for name in discarded
    ]
    assert found.others[0].reason == f"not timed: {MENDED}+keep6 answers like the original too, with less in float"
    assert all(candidate.verdict is not None and candidate.verdict.passed for candidate in found.others)


def test_what_passes_is_not_mended() -> None:
    found = search(anything)
    found.try_offered([FP32], [MENDED])
    assert list(found.trials) == [FP32, MENDED]


def test_what_no_float_mends_is_given_up() -> None:
    found = search(lambda variant: variant == FP32, products=8)
    found.try_offered([FP32], [MENDED])
    assert [kept_products(variant) for variant in found.trials] == [0, 0, 1, 2, 4, 7]


def test_without_time_only_what_backends_offer_is_tried() -> None:
    found = search(anything, budget_s=1e-9)
    found.try_offered([FP32], [MENDED])
    assert list(found.trials) == [FP32]
    assert [(candidate.variant, candidate.status) for candidate in found.others] == [(MENDED.name, Status.SKIPPED)]


@pytest.mark.parametrize(
    ("tried", "skipped"), [([], 1), ([1], 2), ([1, 2, 4], 7), ([1, 2, 4, 7], 5), ([1, 2, 4, 7, 5], 6)]
)
def test_where_the_time_ends_the_mending_the_next_one_is_told(tried: list[int], skipped: int) -> None:
    """Six of eight products must stay in float: the search is cut off before each step of the way."""
    last = with_kept(MENDED, tried[-1]) if tried else MENDED

    def passes(variant: Variant) -> bool:
        if variant == last:
            found._until = 0.0
        return kept_products(variant) >= 6

    found = search(passes, products=8)
    found.try_offered([], [MENDED])
    assert [kept_products(variant) for variant in found.trials] == [0, *tried]
    assert [(candidate.variant, candidate.status) for candidate in found.others] == [
        (with_kept(MENDED, skipped).name, Status.SKIPPED)
    ]


@pytest.mark.parametrize("error", [StageError, InputError, UnsupportedError, PlanError])
def test_one_that_cannot_be_made_is_recorded_unless_it_was_asked_for(error: type[HastenError]) -> None:
    def attempt(*_: object) -> Trial:
        raise error("no such thing")

    found = Search(attempt, lambda *_: [], ignore, 60.0, Silent())
    found.try_offered([FP32], [])
    assert [(candidate.status, candidate.reason) for candidate in found.others] == [(Status.FAILED, "no such thing")]
    with pytest.raises(error, match="no such thing"):
        found.try_asked([FP32])


# --- the front


def judged(name: str, accuracy: float) -> Candidate:
    metric, reference = (Metric("accuracy", value, 1000) for value in (accuracy, 0.9))
    agreement = Agreement("same label", 0.99, 1000, 0.1, 0.1, 1.0)
    verdict = Verdict(name, True, "because", agreement, metric=metric, reference_metric=reference)
    return Candidate(name, Status.ELIGIBLE, "because", verdict)


def timed(shape: Shape, speeds: dict[str, float]) -> Bench:
    even = Interval(1.0, 1.0, 1.0)
    timings = [Timing(name, shape, 9, speed, speed, None, 1.0, even, ()) for name, speed in speeds.items()]
    return Bench("slow", tuple(timings), (), None)


def test_whoever_lost_in_another_heat_is_not_taken_for_faster() -> None:
    shape = Shape(8, 128)
    names = ["onnxruntime-fp32", "onnxruntime-int8", "openvino-fp32", "openvino-bf16", "graph-fp32"]
    here = timed(shape, dict(zip(names, [5.0, 3.0, 2.0, 4.0, 4.5], strict=True)))
    final = timed(Shape(1, 16), dict.fromkeys(["onnxruntime-int8", "openvino-bf16", "graph-fp32"], 1.0))
    bench = Bench("graph-fp32", (*here.timings, *final.timings), ())
    ranking = rank(bench, shape, [Variant.parse(name) for name in names])
    assert [variant.name for variant in ranking] == [names[place] for place in (1, 3, 2, 4, 0)]
    # Where there was no final, their own times tell.
    assert [variant.name for variant in rank(here, shape, ranking)] == [names[place] for place in (2, 1, 3, 4, 0)]
    # The one that is chosen is on the front, also where another one's time would have it lose.
    candidates = [judged(name, 0.9 if name == "openvino-fp32" else 0.8) for name in names]
    assert front(candidates, bench, shape)[0] == "onnxruntime-int8"


def test_the_front_leaves_out_what_is_slower_and_no_nearer() -> None:
    shape = Shape(8, 128)
    bench = timed(shape, {"wrong": 1.0, "fast": 2.0, "lucky": 3.0, "slow": 4.0})
    candidates = [judged("wrong", 0.8), judged("fast", 0.9), judged("lucky", 0.91), judged("slow", 0.9)]
    assert front(candidates, bench, shape) == ("wrong", "fast")
    assert front(candidates[:1] + candidates[2:], bench, shape) == ("wrong", "lucky")


def test_the_end_of_the_front_may_lose_nothing(report: Report) -> None:
    candidates = (judged("wrong", 0.8), judged("fast", 0.9), judged("near", 0.89))
    about = replace(report, candidates=candidates)
    assert about.lossless is None
    assert replace(about, front=("wrong", "fast")).lossless == "fast"
    assert replace(about, front=("wrong", "near")).lossless is None
    # Of vectors nothing is ever quite the same.
    agreement = Agreement("mean cosine", 1 - 1e-8, 1000, 0.0, 0.0, 1.0)
    nearly = Candidate("nearly", Status.ELIGIBLE, "because", Verdict("nearly", True, "because", agreement))
    assert replace(about, candidates=(nearly,), front=("nearly",)).lossless == "nearly"
