"""What a runtime really did, as it says itself: which operator ran on what."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Execution:
    """Operators of one kind that ran on one thing: an execution provider, or a device and a precision."""

    operator: str
    on: str
    count: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A few operators run for real on something a backend offers, and what came of it."""

    asked: str
    executed: tuple[Execution, ...] = ()
    # Whether something is wrong; a provider that finds nothing to do here is not.
    is_ok: bool = True
    note: str = ""

    @property
    def elsewhere(self) -> tuple[Execution, ...]:
        """What ran on something else than asked for."""
        return tuple(execution for execution in self.executed if execution.on != self.asked)


@dataclass(frozen=True, slots=True)
class Step:
    """An operator of a graph, by the names of the tensors it reads and writes."""

    operator: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def origin(steps: Sequence[Step], outputs: Iterable[str], broken: Container[str]) -> str | None:
    """Where broken outputs begin: the first operator, of steps in the order they run, that they can be traced back to.

    What is broken and reaches no output does not count: minus infinity in a mask is meant.
    """
    traced = {name for name in outputs if name in broken}
    first = None
    for step in reversed(steps):
        if not traced.isdisjoint(step.writes):
            first = step.operator
            traced.update(name for name in step.reads if name in broken)
    return first
