"""Which quantizer costs how much: each asked about alone, the others off."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hasten.core.errors import InputError, PlanError
from hasten.quantize.qdq.switch import chosen, disable, quantizers, switched

_BAR = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """What is lost with these quantizers alone."""

    name: str
    quantizers: tuple[str, ...]
    value: float
    cost: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The costliest first. As text: a table with bars."""

    reference: float
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        width = max(len(each.name) for each in self.costs)
        largest = max(abs(each.cost) for each in self.costs) or 1.0
        lines = [f"{'all off':{width}}  {self.reference:9.4f}"]
        for each in self.costs:
            bar = "█" * round(_BAR * max(each.cost, 0.0) / largest)
            lines.append(f"{each.name:{width}}  {each.value:9.4f}  {each.value - self.reference:+9.4f}  {bar}".rstrip())
        return "\n".join(lines)


def sensitivity(
    model: nn.Module, evaluate: Callable[[nn.Module], float], among: Mapping[str, Sequence[str]] | None = None
) -> Sensitivity:
    """`evaluate` gives a number of which more is better; it is asked once for each quantizer that is on.

    `among` are groups of them, each asked about as one (`qdq.groups`), where every single one would take too long.
    """
    active = [name for name, part in quantizers(model).items() if part.is_active]
    if not active:
        raise PlanError(f"no quantizer of {type(model).__name__} is on and calibrated", hint="calibrate it first")
    if among is None:
        among = {name: (name,) for name in active}
    members = {name: chosen(model, patterns) for name, patterns in among.items() if patterns}
    if not members:
        raise PlanError("there are no quantizers to ask about")
    costs: list[Cost] = []
    with switched(model, off=("*",)):
        reference = asked(evaluate, model)
        for name, names in members.items():
            with switched(model, on=tuple(names)):
                value = asked(evaluate, model)
            costs.append(Cost(name, tuple(names), value, reference - value))
    return Sensitivity(reference, tuple(sorted(costs, key=lambda each: -each.cost)))


def relax(model: nn.Module, evaluate: Callable[[nn.Module], float], found: Sensitivity, max_drop: float) -> list[str]:
    """Switch off the costliest, one after the other, until no more than `max_drop` is lost; tells which are off.

    All of a module's go together: a product of eight bits by float is one in float.
    """
    of_module = groups(model)
    off: list[str] = []
    for each in found.costs:
        holders = {name.rpartition(".")[0] for name in each.quantizers} & of_module.keys()
        if not holders:
            continue  # went off with another
        if found.reference - asked(evaluate, model) <= max_drop:
            break
        off += disable(model, *(name for holder in sorted(holders) for name in of_module.pop(holder)))
    return off


def asked(evaluate: Callable[[nn.Module], float], model: nn.Module) -> float:
    """What it says about the model: a number, or there is nothing to compare."""
    value = evaluate(model)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InputError(f"evaluate gave {value!r}, which is no number") from None
    if math.isnan(number):
        raise InputError("evaluate gave nan, which is neither more nor less than anything")
    return number


def groups(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The quantizers that are on, by the module that holds them: a linear layer, an attention, a sum."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in quantizers(model).items():
        if part.is_active:
            holder = name.rpartition(".")[0]
            found[holder] = (*found.get(holder, ()), name)
    return found
