"""What a runtime really did, as it says itself: which operator ran on what."""

from __future__ import annotations

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
