"""Test the search with fake variants: what it tries, skips and judges, and how many matmuls stay in float."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hasten.backends import Artifact
from hasten.builder.search.search import FloatCounts, ScreenedVariant, Search, search_order
from hasten.builder.search.select import pareto_front, rank
from hasten.core.errors import HastenError, InputError, PlanError, StageError, UnsupportedError
from hasten.core.progress import SilentProgress
from hasten.core.report import Agreement, Bench, Candidate, Interval, Metric, Report, Status, Timing, Verdict
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Shape, Signature
from hasten.core.variant import Variant
from hasten.quantize.modifiers import kept_matmuls, with_kept

REFINED = Variant.parse("onnxruntime-int8+attention+smooth+split")
TANH_GELU = Variant.parse("onnxruntime-int8+attention+smooth+split+tanhgelu")
ATTENTION = Variant.parse("onnxruntime-int8+attention")
FP32, OPENVINO, OPENVINO_INT8 = map(Variant.parse, ("onnxruntime-fp32", "openvino-fp32", "openvino-int8"))


def verdict_on(variant: Variant, *, passed: bool) -> Verdict:
    return Verdict(variant.name, passed, "because", Agreement("same label", float(passed), 100, 0.0, 0.0, 1.0))


def pass_all(*_: object) -> bool:
    return True


@dataclass
class FakeBuilder:
    """Variants that take a given time and pass, or not, on a few rows and on all."""

    passes: Callable[[Variant], bool] = pass_all
    passes_screening: Callable[[Variant], bool] = pass_all
    times: dict[Variant, float] = field(default_factory=dict)
    matmuls: int = 24
    predicted: int = 1
    screened: list[Variant] = field(default_factory=list)
    judged: list[Variant] = field(default_factory=list)
    discarded: list[Variant] = field(default_factory=list)

    def make(self, variant: Variant) -> Artifact:
        return Artifact(variant, Signature((), (), 8), Path(), {})

    def screen(self, variant: Variant) -> ScreenedVariant:
        self.screened.append(variant)
        rejection = None if self.passes_screening(variant) else verdict_on(variant, passed=False)
        # Quantized variants are faster by default.
        default = 0.3 if "8" in variant.precision else 1.0
        return ScreenedVariant(self.make(variant), self.times.get(variant, default), rejection)

    def judge(self, artifact: Artifact) -> Verdict:
        self.judged.append(artifact.variant)
        return verdict_on(artifact.variant, passed=self.passes(artifact.variant))

    def discard(self, artifact: Artifact) -> None:
        self.discarded.append(artifact.variant)

    def float_counts(self, variant: Variant, deadline: float, measured: Mapping[int, float]) -> FloatCounts:
        self.measured = measured
        return FloatCounts(self.matmuls - 1, self.predicted)


def search(builder: FakeBuilder, *, budget_s: float = 60.0, stored: int | None = 2) -> Search:
    return Search(builder, budget_s, SilentProgress(), stored)


def statuses(run: Search) -> dict[str, Status]:
    return {candidate.variant: candidate.status for candidate in run.others}


def passed(run: Search) -> list[Variant]:
    return [variant for variant, trial in run.trials.items() if trial.verdict.passed]


def test_search_order_is_cheapest_first_per_backend() -> None:
    both, _ = search_order([FP32, OPENVINO], this_machine())
    alone, _ = search_order([FP32], this_machine())
    names = [variant.name for variant in both]
    assert names.index(ATTENTION.name) < names.index(REFINED.name) < names.index(OPENVINO_INT8.name)
    assert names.index(OPENVINO_INT8.name) < names.index(TANH_GELU.name)
    # Never the fastest in a published study: tried only if they are named.
    assert not any(word in name for name in names for word in ("entropy", "minmax", "percentile", "blocks"))
    assert {variant.backend for variant in alone} == {"onnxruntime"}
    assert len(set(names)) == len(names)


def test_fastest_variants_are_judged_until_enough_have_passed() -> None:
    fast, slow = Variant.parse("openvino-bf16"), Variant.parse("openvino-fp16")
    builder = FakeBuilder(times={FP32: 1.0, OPENVINO: 0.9, fast: 0.3, slow: 0.6, OPENVINO_INT8: 0.2})
    builder.passes = lambda variant: variant != OPENVINO_INT8
    run = search(builder)
    run.try_automatic([FP32, OPENVINO, fast, slow], [OPENVINO_INT8])
    assert builder.judged == [OPENVINO_INT8, fast, slow, OPENVINO]
    assert passed(run) == [fast, slow, OPENVINO]
    assert statuses(run) == {FP32.name: Status.SKIPPED}
    assert run.others[0].reason == f"not judged: it takes 3.33× as long as {fast}"
    assert builder.discarded == [FP32]


def test_all_variants_are_tried_and_judged_if_all_are_stored() -> None:
    builder = FakeBuilder(times={FP32: 1.0, OPENVINO: 0.2, ATTENTION: 0.8})
    run = search(builder, stored=None)
    run.try_automatic([FP32, OPENVINO], [ATTENTION, REFINED])
    assert set(passed(run)) == {FP32, OPENVINO, ATTENTION, REFINED}


def test_variant_that_quantizes_more_than_a_rejected_one_is_not_tried() -> None:
    plain = Variant.parse("onnxruntime-int8")
    builder = FakeBuilder(passes_screening=lambda variant: variant != plain)
    run = search(builder)
    run.try_automatic([FP32, plain], [ATTENTION, REFINED])
    assert builder.screened == [FP32, plain, REFINED]
    assert {each.variant: each.reason for each in run.others}[
        ATTENTION.name
    ] == f"not tried: {plain} is inaccurate already"


def test_variant_that_would_exceed_the_budget_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hasten.builder.search.search.time.monotonic", lambda: clock[0])
    builder = FakeBuilder()
    screen = builder.screen

    def take_ten_seconds(variant: Variant) -> ScreenedVariant:
        clock[0] += 10.0
        return screen(variant)

    monkeypatch.setattr(builder, "screen", take_ten_seconds)
    run = search(builder, budget_s=35.0)
    run.try_automatic([FP32, OPENVINO], [ATTENTION, OPENVINO_INT8])
    assert builder.screened == [FP32, OPENVINO, ATTENTION]
    assert clock[0] <= 1.1 * 35.0


def test_budget_leaves_time_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("hasten.builder.search.search.time.monotonic", lambda: clock[0])
    builder = FakeBuilder()
    screen, judge = builder.screen, builder.judge

    def take_five_seconds(variant: Variant) -> ScreenedVariant:
        clock[0] += 5.0
        return replace(screen(variant), judge_s=4.0)

    def take_four_seconds(artifact: Artifact) -> Verdict:
        clock[0] += 4.0
        return judge(artifact)

    monkeypatch.setattr(builder, "screen", take_five_seconds)
    monkeypatch.setattr(builder, "judge", take_four_seconds)
    run = search(builder, budget_s=30.0)
    run.try_automatic([FP32], [ATTENTION, REFINED, OPENVINO_INT8, TANH_GELU])
    assert builder.screened == [FP32, ATTENTION, REFINED]
    assert builder.judged == [ATTENTION, REFINED, FP32]
    assert clock[0] <= 30.0


def test_variant_that_cannot_be_faster_is_not_tried() -> None:
    builder = FakeBuilder(times={FP32: 1.0, ATTENTION: 0.8, OPENVINO: 0.4})
    run = search(builder)
    run.try_automatic([FP32, OPENVINO], [ATTENTION, REFINED])
    assert builder.screened == [FP32, OPENVINO, ATTENTION]
    reasons = {candidate.variant: candidate.reason for candidate in run.others}
    expected = f"not tried: {ATTENTION} takes 2.00× as long as {OPENVINO}, and this variant computes more"
    assert reasons[REFINED.name] == expected


def test_postponed_variant_is_tried_once_the_faster_one_has_failed() -> None:
    builder = FakeBuilder(lambda variant: variant != OPENVINO, times={FP32: 1.0, ATTENTION: 0.8, OPENVINO: 0.4})
    run = search(builder)
    run.try_automatic([FP32, OPENVINO], [ATTENTION, REFINED])
    assert builder.screened == [FP32, OPENVINO, ATTENTION, REFINED]
    assert REFINED in passed(run)


def test_float_matmuls_are_not_searched_if_they_cannot_pay() -> None:
    builder = FakeBuilder(passes_screening=lambda variant: variant != REFINED, times={REFINED: 0.4, OPENVINO_INT8: 0.4})
    run = search(builder)
    run.try_automatic([FP32, OPENVINO], [OPENVINO_INT8, REFINED])
    assert not any(map(kept_matmuls, builder.screened))
    reasons = {candidate.variant: candidate.reason for candidate in run.others}
    slower = f"{REFINED} takes 1.00× as long as {OPENVINO_INT8}"
    assert reasons[f"{REFINED}+keep1"] == f"not tried: {slower}, and this variant computes more"


def test_float_matmuls_are_not_searched_if_too_many_are_needed() -> None:
    builder = FakeBuilder(passes_screening=lambda variant: variant != REFINED, predicted=12)
    builder.times = {REFINED: 0.3, OPENVINO_INT8: 0.6}
    run = search(builder)
    run.try_automatic([FP32, OPENVINO], [OPENVINO_INT8, REFINED])
    assert not any(map(kept_matmuls, builder.screened))
    reasons = {candidate.variant: candidate.reason for candidate in run.others}
    # Half of the matmuls in float: between 0.3 and 1.
    assert reasons[f"{REFINED}+keep12"] == f"not tried: it is expected to take 1.08× as long as {OPENVINO_INT8}"


def test_cheaper_gelu_is_not_tried_after_the_exact_one_failed() -> None:
    builder = FakeBuilder(passes_screening=lambda variant: variant != REFINED, matmuls=1)
    run = search(builder)
    run.try_automatic([FP32], [REFINED, TANH_GELU])
    assert TANH_GELU not in builder.screened
    reasons = {candidate.variant: candidate.reason for candidate in run.others}
    assert reasons[TANH_GELU.name] == f"not tried: {REFINED} is inaccurate already"


@pytest.mark.parametrize(
    "refined", [REFINED, Variant.parse("fused-fp8@cuda"), Variant.parse("fused-int8@cuda")], ids=str
)
@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 11, 23])
@pytest.mark.parametrize("predicted", [1, 3])
def test_refining_finds_a_small_number_of_float_matmuls(needed: int, predicted: int, refined: Variant) -> None:
    builder = FakeBuilder(predicted=predicted)
    builder.passes_screening = lambda variant: variant == FP32 or kept_matmuls(variant) >= needed
    run = search(builder)
    run.try_automatic([FP32], [refined])
    counts = [kept_matmuls(variant) for variant in passed(run) if variant != FP32]
    # Fewer than predicted are not tried.
    assert counts == [max(needed, predicted)]
    # Doubling, then bisection: few variants are tried.
    assert len(builder.screened) <= 12


def test_variant_that_fails_on_all_rows_is_refined_further() -> None:
    builder = FakeBuilder(predicted=2)
    builder.passes_screening = lambda variant: variant == FP32 or kept_matmuls(variant) >= 2
    builder.passes = lambda variant: variant == FP32 or kept_matmuls(variant) >= 4
    run = search(builder)
    run.try_automatic([FP32], [REFINED])
    assert [kept_matmuls(variant) for variant in builder.judged if variant != FP32] == [2, 3, 4]
    assert builder.measured == {2: 0.0, 3: 0.0}
    assert set(passed(run)) == {with_kept(REFINED, 4), FP32}


def test_superseded_variant_is_discarded_and_recorded() -> None:
    builder = FakeBuilder()
    builder.passes_screening = lambda variant: kept_matmuls(variant) >= 5
    run = search(builder)
    run.try_automatic([], [REFINED])
    assert [kept_matmuls(variant) for variant in passed(run)] == [5]
    assert builder.discarded == [with_kept(REFINED, count) for count in (8, 6)]
    skipped = [candidate for candidate in run.others if candidate.status is Status.SKIPPED]
    assert [candidate.variant for candidate in skipped] == [variant.name for variant in builder.discarded]
    assert skipped[0].reason == f"not judged: {REFINED}+keep6 passes the first rows too, with less in float"


def test_passing_variant_is_not_refined() -> None:
    run = search(FakeBuilder())
    run.try_automatic([FP32], [REFINED])
    assert set(run.trials) == {FP32, REFINED}


def test_refining_stops_when_no_number_of_float_matmuls_passes() -> None:
    builder = FakeBuilder(passes_screening=lambda variant: variant == FP32, matmuls=8)
    run = search(builder)
    run.try_automatic([FP32], [REFINED])
    assert [kept_matmuls(variant) for variant in builder.screened] == [0, 0, 1, 2, 4, 7]
    assert set(statuses(run).values()) == {Status.INACCURATE}


def test_only_first_variants_are_tried_when_the_budget_is_spent() -> None:
    run = search(FakeBuilder(), budget_s=1e-9)
    run.try_automatic([FP32], [REFINED])
    assert list(run.trials) == [FP32]
    assert statuses(run) == {REFINED.name: Status.SKIPPED}


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

    builder = FakeBuilder(passes_screening=passes, matmuls=8)
    run = search(builder)
    run.try_automatic([], [REFINED])
    assert [kept_matmuls(variant) for variant in builder.screened] == [0, *tried]
    skipped_names = [candidate.variant for candidate in run.others if candidate.status is Status.SKIPPED]
    assert skipped_names == [with_kept(REFINED, skipped).name]


@pytest.mark.parametrize("error", [StageError, InputError, UnsupportedError, PlanError])
def test_failing_variant_is_recorded_unless_the_user_named_it(error: type[HastenError]) -> None:
    def fail(*_: object) -> Any:
        raise error("no such thing")

    builder = FakeBuilder()
    builder.screen = builder.judge = fail  # type: ignore[method-assign]
    run = search(builder)
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
