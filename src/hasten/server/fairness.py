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
        self._change = threading.Condition()

    def join(self, cores: int = 1) -> Seat:
        with self._change:
            # A newcomer starts where the others are, not with the right to all they have had.
            served = min((other.served for other in self._seats), default=0.0)
            seat = Seat(self, min(cores, self._cores), served)
            self._seats.append(seat)
            return seat

    def retire(self, seat: Seat) -> None:
        with self._change:
            self._seats.remove(seat)

    def enter(self, seat: Seat, tokens: int) -> None:
        with self._change:
            seat.waiting += 1
            if not any(other.waiting for other in self._seats if other is not seat):
                # Whoever was idle has no claim on the time that nobody wanted.
                seat.served = max(seat.served, min(other.served for other in self._seats))
            while self._free < seat.cores or self._next() is not seat:
                self._change.wait()
            seat.waiting -= 1
            seat.served += tokens
            self._free -= seat.cores
            if self._free:
                self._change.notify_all()

    def leave(self, seat: Seat) -> None:
        with self._change:
            self._free += seat.cores
            self._change.notify_all()

    def _next(self) -> Seat:
        return min((seat for seat in self._seats if seat.waiting), key=lambda seat: seat.served)
