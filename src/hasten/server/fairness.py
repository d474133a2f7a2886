"""Turns at the processor: several models, fewer cores than they would like. Who has had least goes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Seat:
    """One model's account of the tokens it has been served."""

    turns: Turns
    served: float = 0.0
    waiting: int = 0

    @contextmanager
    def turn(self, tokens: int) -> Iterator[None]:
        self.turns.enter(self, tokens)
        try:
            yield
        finally:
            self.turns.leave()


class Turns:
    """As many at once as there are places; among those who wait, the one that was served least."""

    def __init__(self, places: int) -> None:
        self._places = self._free = places
        self._seats: list[Seat] = []
        # What whoever had the last turn had been served before it: where those are who are not idle.
        self._now = 0.0
        self._change = threading.Condition()

    def join(self, sessions: int = 1) -> Seat:
        """A model with so many sessions, which are to run beside each other."""
        with self._change:
            if sessions > self._places:
                self._free += sessions - self._places
                self._places = sessions
            # A newcomer starts where the others are, not with the right to all they have had.
            seat = Seat(self, self._now)
            self._seats.append(seat)
            return seat

    def retire(self, seat: Seat) -> None:
        with self._change:
            self._seats.remove(seat)

    def enter(self, seat: Seat, tokens: int) -> None:
        with self._change:
            if not seat.waiting:
                # Nor has whoever was idle a claim on what it did not want.
                seat.served = max(seat.served, self._now)
            seat.waiting += 1
            while not self._free or self._next() is not seat:
                self._change.wait()
            seat.waiting -= 1
            self._now = max(self._now, seat.served)
            seat.served += tokens
            self._free -= 1
            if self._free:
                self._change.notify_all()

    def leave(self) -> None:
        with self._change:
            self._free += 1
            self._change.notify_all()

    def _next(self) -> Seat:
        return min((seat for seat in self._seats if seat.waiting), key=lambda seat: seat.served)
