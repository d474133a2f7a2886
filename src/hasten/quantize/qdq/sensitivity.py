"""Measure how much accuracy each quantizer of a module costs: each alone, with the others disabled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hasten.core.errors import InputError, PlanError
from hasten.quantize.qdq.toggle import active_quantizers, disable, matching, quantizers, switched

_BAR_WIDTH = 24


@dataclass(frozen=True, slots=True)
class QuantizerCost:
    """The score with only these quantizers enabled, and the loss against the score with none."""

    name: str
    quantizers: tuple[str, ...]
    value: float
    cost: float


@dataclass(frozen=True, slots=True)
class QuantizerSensitivity:
    """The costs of a model's quantizers, the largest first; `str()` draws a table with bars."""

    reference: float
    costs: tuple[QuantizerCost, ...]

    def __str__(self) -> str:
        width = max(len(each.name) for each in self.costs)
        largest = max(abs(each.cost) for each in self.costs) or 1.0
        lines = [f"{'all off':{width}}  {self.reference:9.4f}"]
        for each in self.costs:
            bar = "█" * round(_BAR_WIDTH * max(each.cost, 0.0) / largest)
            lines.append(f"{each.name:{width}}  {each.value:9.4f}  {each.value - self.reference:+9.4f}  {bar}".rstrip())
        return "\n".join(lines)


def sensitivity(
    model: nn.Module, evaluate: Callable[[nn.Module], float], among: Mapping[str, Sequence[str]] | None = None
) -> QuantizerSensitivity:
    """Call `evaluate` (higher is better) once for each enabled quantizer, or for each group in `among`.

    Groups (`qdq.groups`) save time if there are too many quantizers to measure one by one.
    """
    active = active_quantizers(model)
    if among is None:
        among = {name: (name,) for name in active}
    members = {name: matching(model, patterns) for name, patterns in among.items() if patterns}
    if not members:
        raise PlanError("there are no quantizers to measure: all groups are empty")
    costs: list[QuantizerCost] = []
    with switched(model, off=("*",)):
        reference = checked_score(evaluate, model)
        for name, names in members.items():
            with switched(model, on=tuple(names)):
                value = checked_score(evaluate, model)
            costs.append(QuantizerCost(name, tuple(names), value, reference - value))
    return QuantizerSensitivity(reference, tuple(sorted(costs, key=lambda each: -each.cost)))


def relax(
    model: nn.Module, evaluate: Callable[[nn.Module], float], measured: QuantizerSensitivity, max_drop: float
) -> list[str]:
    """Disable the costliest quantizers until the score drops by no more than `max_drop`; return their names.

    All quantizers of a module are disabled together: a matmul with one float operand computes in float.
    """
    by_module = groups(model)
    disabled: list[str] = []
    for each in measured.costs:
        modules = {name.rpartition(".")[0] for name in each.quantizers} & by_module.keys()
        if not modules:
            continue  # disabled together with another
        if measured.reference - checked_score(evaluate, model) <= max_drop:
            break
        disabled += disable(model, *(name for module in sorted(modules) for name in by_module.pop(module)))
    return disabled


def checked_score(evaluate: Callable[[nn.Module], float], model: nn.Module) -> float:
    """Return the score of a model; raise if it is not a number that can be compared."""
    value = evaluate(model)
    try:
        score = float(value)
    except (TypeError, ValueError):
        raise InputError(f"evaluate returned {value!r}, which is not a number") from None
    if math.isnan(score):
        raise InputError("evaluate returned nan, which cannot be compared")
    return score


def groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the enabled quantizers by the module that holds them: a linear layer, an attention, a sum."""
    by_module: dict[str, tuple[str, ...]] = {}
    for name, part in quantizers(model).items():
        if part.is_active:
            module = name.rpartition(".")[0]
            by_module[module] = (*by_module.get(module, ()), name)
    return by_module
