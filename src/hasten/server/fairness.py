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
    # That one turn of its takes.
    cores: int = 1
    served: float = 0.0
    waiting: int = 0

    @contextmanager
    def turn(self, tokens: int) -> Iterator[None]:
        self.turns.enter(self, tokens)
        try:
            yield
        finally:
            self.turns.leave(self)


class Turns:
    """As many at once as there are cores for; among those who wait, the one that was served least."""

    def __init__(self, cores: int) -> None:
        self._cores = self._free = cores
        self._seats: list[Seat] = []
        # What whoever had the last turn had been served before it: where those are who are not idle.
        self._now = 0.0
        self._waiting = 0
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)

    def join(self, cores: int = 1) -> Seat:
        """A model whose sessions take so many cores each."""
        with self._lock:
            # A newcomer starts where the others are, not with the right to all they have had.
            seat = Seat(self, min(cores, self._cores), self._now)
            self._seats.append(seat)
            return seat

    def retire(self, seat: Seat) -> None:
        with self._lock:
            self._seats.remove(seat)

    def enter(self, seat: Seat, tokens: int) -> None:
        with self._lock:
            if not seat.waiting:
                # Nor has whoever was idle a claim on what it did not want.
                seat.served = max(seat.served, self._now)
            if self._waiting or self._free < seat.cores:
                self._wait(seat)
            self._now = max(self._now, seat.served)
            seat.served += tokens
            self._free -= seat.cores
            if self._free and self._waiting:
                self._change.notify_all()

    def leave(self, seat: Seat) -> None:
        with self._lock:
            self._free += seat.cores
            if self._waiting:
                self._change.notify_all()

    def _wait(self, seat: Seat) -> None:
        seat.waiting += 1
        self._waiting += 1
        while self._free < seat.cores or self._next() is not seat:
            self._change.wait()
        seat.waiting -= 1
        self._waiting -= 1

    def _next(self) -> Seat:
        return min((seat for seat in self._seats if seat.waiting), key=lambda seat: seat.served)
