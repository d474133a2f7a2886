from __future__ import annotations

from hasten.core.execution import Step, origin

# A mask beside scores; then two layers.
STEPS = [
    Step("mask", ("lengths",), ("masked",)),
    Step("scores", ("ids", "weights"), ("scored",)),
    Step("add", ("scored", "masked"), ("sum",)),
    Step("softmax", ("sum",), ("shares",)),
    Step("product", ("shares", "more weights"), ("producted",)),
    Step("norm", ("producted",), ("logits",)),
]


def test_nothing_is_at_fault_where_outputs_are_finite() -> None:
    assert origin(STEPS, ["logits"], {"masked", "sum"}) is None


def test_the_first_of_what_reaches_the_output_is_at_fault() -> None:
    assert origin(STEPS, ["logits"], {"masked", "sum", "producted", "logits"}) == "product"
    assert origin(STEPS, ["logits"], {"logits"}) == "norm"


def test_a_fault_is_followed_through_what_it_spoils() -> None:
    assert origin(STEPS, ["logits"], {"scored", "sum", "shares", "producted", "logits"}) == "scores"
    assert origin(STEPS, ["logits"], {"masked", "sum", "shares", "producted", "logits"}) == "mask"


def test_a_broken_weight_is_the_fault_of_what_reads_it() -> None:
    assert origin(STEPS, ["logits"], {"more weights", "producted", "logits"}) == "product"
