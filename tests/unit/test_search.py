"""The search itself: in which order, for how long, and how few products stay in float. What is tried is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hasten.backends import Artifact
from hasten.builder.search import Search, Trial, ladder
from hasten.core.errors import StageError
from hasten.core.progress import Silent
from hasten.core.report import Agreement, Status, Verdict
from hasten.core.tensors import Signature
from hasten.core.variant import Variant
from hasten.quantize.ways import kept_products

MENDED = Variant.parse("onnxruntime-int8+attention+smooth+split")
FP32 = Variant.parse("onnxruntime-fp32")


def trial(variant: Variant, passed: bool) -> Trial:
    agreement = Agreement("same label", float(passed), 100, 0.0, 0.0, 1.0)
    verdict = Verdict(variant.name, passed, "because", agreement)
    return Trial(Artifact(variant, Signature((), (), 8), Path(), {}), verdict)


def search(passes: Callable[[Variant], bool], *, products: int = 24, budget_s: float = 60.0) -> Search:
    names = [str(place) for place in range(products)]
    return Search(lambda variant: trial(variant, passes(variant)), lambda *_: names, budget_s, Silent())


def anything(*_: object) -> bool:
    return True


def test_cheap_before_dear_and_each_backend_its_own() -> None:
    both, _ = ladder([FP32, Variant.parse("openvino-fp32")])
    alone, _ = ladder([FP32])
    names = [variant.name for variant in both]
    assert names.index("onnxruntime-int8+attention") < names.index(MENDED.name) < names.index("openvino-int8")
    assert names.index("openvino-int8") < names.index("onnxruntime-int8+entropy")
    assert {variant.backend for variant in alone} == {"onnxruntime"}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 11, 23])
def test_as_few_products_in_float_as_will_do(needed: int) -> None:
    found = search(lambda variant: variant == FP32 or kept_products(variant) >= needed)
    found.try_offered([FP32], [MENDED])
    passed = [variant for variant, trial in found.trials.items() if trial.verdict.passed and variant != FP32]
    assert min(map(kept_products, passed)) == needed
    # Doubled, then halved: few are tried.
    assert len(found.trials) <= 12


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
    assert [(candidate.variant, candidate.status) for candidate in found.failed] == [(MENDED.name, Status.SKIPPED)]


def test_one_that_cannot_be_made_is_recorded_unless_it_was_asked_for() -> None:
    def attempt(*_: object) -> Trial:
        raise StageError("no such thing")

    found = Search(attempt, lambda *_: [], 60.0, Silent())
    found.try_offered([FP32], [])
    assert [(candidate.status, candidate.reason) for candidate in found.failed] == [(Status.FAILED, "no such thing")]
    with pytest.raises(StageError, match="no such thing"):
        found.try_asked([FP32])
