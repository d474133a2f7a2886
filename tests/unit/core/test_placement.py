from __future__ import annotations

from hasten.core.placement import PlacementStep, origin

# A mask and scores, then two layers.
STEPS = [
    PlacementStep("mask", ("lengths",), ("masked",)),
    PlacementStep("scores", ("ids", "weights"), ("scored",)),
    PlacementStep("add", ("scored", "masked"), ("sum",)),
    PlacementStep("softmax", ("sum",), ("shares",)),
    PlacementStep("matmul", ("shares", "more weights"), ("context",)),
    PlacementStep("norm", ("context",), ("logits",)),
]


def test_finite_outputs_have_no_origin() -> None:
    assert origin(STEPS, ["logits"], {"masked", "sum"}) is None


def test_origin_is_the_first_operator_that_reaches_the_output() -> None:
    assert origin(STEPS, ["logits"], {"masked", "sum", "context", "logits"}) == "matmul"
    assert origin(STEPS, ["logits"], {"logits"}) == "norm"


def test_origin_is_traced_through_intermediate_tensors() -> None:
    assert origin(STEPS, ["logits"], {"scored", "sum", "shares", "context", "logits"}) == "scores"
    assert origin(STEPS, ["logits"], {"masked", "sum", "shares", "context", "logits"}) == "mask"


def test_origin_of_a_broken_weight_is_its_reader() -> None:
    assert origin(STEPS, ["logits"], {"more weights", "context", "logits"}) == "matmul"
