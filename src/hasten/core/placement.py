"""Operator placement: the device or provider that ran each operator, as reported by the runtime."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorPlacement:
    """The number of operators of one type that ran on an execution provider, or on a device in a precision."""

    operator: str
    on: str
    count: int


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of running a few operators on a provider or device that a backend offers."""

    requested: str
    executed: tuple[OperatorPlacement, ...] = ()
    # False after a failure; True if this machine lacks the device.
    is_ok: bool = True
    note: str = ""

    @property
    def elsewhere(self) -> tuple[OperatorPlacement, ...]:
        """Return the operators that did not run where they were requested to."""
        return tuple(placement for placement in self.executed if placement.on != self.requested)


@dataclass(frozen=True, slots=True)
class PlacementStep:
    """An operator of a graph, with the names of its input and output tensors."""

    operator: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def origin(steps: Sequence[PlacementStep], outputs: Iterable[str], broken: Container[str]) -> str | None:
    """Return the first operator, in execution order, that broken outputs can be traced back to.

    Broken tensors that do not reach an output are ignored: minus infinity in a mask is intended.
    """
    traced = {name for name in outputs if name in broken}
    first = None
    for step in reversed(steps):
        if not traced.isdisjoint(step.writes):
            first = step.operator
            traced.update(name for name in step.reads if name in broken)
    return first
