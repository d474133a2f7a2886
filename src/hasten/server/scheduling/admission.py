"""Admission control: reject requests by how many are open and by how long another would wait.

Not thread-safe: the caller must hold the engine's lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from hasten.core.errors import OverloadedError, TooLargeError
from hasten.server.scheduling.queue import Limits

# Averages follow the last seconds: load, texts and clock rates change.
_DECAY = 0.9


class PeerRequests(ABC):
    """The open requests of a model in all processes of a server. Thread-safe."""

    @abstractmethod
    def add(self, change: int) -> None:
        """Count requests that this process has opened or, if negative, answered."""

    @abstractmethod
    def total(self) -> int:
        """Return the open requests of all processes."""


class Admission(ABC):
    """Rejects requests beyond the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # Set if other processes serve the same model: the limit on open requests then holds for all of them together.
        self.peers: PeerRequests | None = None
        # What one request takes on an unloaded server; 0 before any was measured.
        self._unloaded_s = 0.0

    def check(self, open_requests: int) -> None:
        """Raise an error if too many requests are open or another would wait too long."""
        # The wait depends on this process alone: it measures the throughput that the others leave to it.
        wait_s, limits = self.wait_s(open_requests), self._limits
        if self.peers is not None:
            open_requests = self.peers.total()
        if open_requests >= limits.requests:
            reason = f"open requests: {open_requests}; the limit is {limits.requests} (--max-queue)"
        elif wait_s > limits.wait_s:
            reason = f"estimated wait: {wait_s:.1f} s; the limit is {limits.wait_s:g} s (--max-queue-time)"
        elif limits.slowdown is not None and 0 < (limits.slowdown - 1) * self._unloaded_s < wait_s:
            reason = f"estimated latency: more than {limits.slowdown:g}× that of a lone request (--max-slowdown)"
        else:
            return
        raise OverloadedError(reason, retry_after_s=max(0.1, wait_s))

    @abstractmethod
    def wait_s(self, open_requests: int) -> float:
        """Estimate how long another request would wait; 0 before anything was measured."""


class TokenAdmission(Admission):
    """Estimates the wait from the tokens of open requests and the token throughput of recent batches."""

    def __init__(self, limits: Limits, sessions: int) -> None:
        super().__init__(limits)
        self._sessions = sessions
        # Of the open requests that are tokenized: their number, and their tokens that have not run.
        self._encoded = self._tokens = 0
        self._tokens_per_request = 0.0
        # Of recent batches that ran while others were queued.
        self._loaded_tokens = self._loaded_s = 0.0

    def wait_s(self, open_requests: int) -> float:
        """Estimate how long the open requests will take; running batches count as if they had just started."""
        if not self._loaded_s:
            return 0.0
        tokens = self._tokens + (open_requests - self._encoded) * self._tokens_per_request
        return tokens * self._loaded_s / (self._loaded_tokens * self._sessions)

    def on_encoded(self, tokens: int) -> None:
        """Count a request that was tokenized."""
        self._encoded += 1
        self._tokens += tokens
        self._tokens_per_request = _average(self._tokens_per_request, tokens)

    def on_run(self, tokens: int) -> None:
        """Count tokens of an open request that have run."""
        self._tokens -= tokens

    def on_answered(self, tokens_left: int) -> None:
        """Remove a tokenized request from the count, with the tokens that have not run."""
        self._encoded -= 1
        self._tokens -= tokens_left

    def on_batch(self, tokens: int, requests: int, seconds: float, *, is_loaded: bool) -> None:
        """Update the throughput if requests were queued, and the unloaded latency if the batch held a single request.

        A batch of a lone short request says nothing about the throughput of full ones.
        """
        if is_loaded:
            self._loaded_tokens = _DECAY * self._loaded_tokens + tokens
            self._loaded_s = _DECAY * self._loaded_s + max(seconds, 1e-6)
        if requests == 1:
            self._unloaded_s = _average(self._unloaded_s, seconds)


class SlotAdmission(Admission):
    """Estimates the wait for a decoder slot from the duration of recent sequences.

    `load` returns how many sequences are queued and how many hold a slot.
    """

    def __init__(self, limits: Limits, slots: int, load: Callable[[], tuple[int, int]]) -> None:
        super().__init__(limits)
        self._slots = slots
        self._load = load

    def wait_s(self, open_requests: int) -> float:
        """Estimate how long another sequence would wait for a slot; 0 while one is free."""
        queued, running = self._load()
        return 0.0 if queued + running < self._slots else (queued + 1) / self._slots * self._unloaded_s

    def check_prefill(self, tokens: int, backlog: int, tokens_per_s: float, left_s: float) -> None:
        """Raise an error if prompts of these tokens, behind a backlog, cannot be prefilled in the time that is left.

        The speed is an upper bound, so that no request is rejected that could be answered; 0 if it is unknown.
        """
        if not tokens_per_s:
            return
        alone_s, wait_s = tokens / tokens_per_s, backlog / tokens_per_s
        if alone_s > left_s:
            raise TooLargeError(
                f"{tokens} prompt tokens take at least {alone_s:.1f} s, and the deadline is in {left_s:.1f} s",
                hint="use a shorter prompt or a longer timeout",
            )
        if alone_s + wait_s > left_s:
            raise OverloadedError(
                f"{backlog} prompt tokens come first and take at least {wait_s:.1f} s, and the deadline is in"
                f" {left_s:.1f} s",
                retry_after_s=max(0.1, wait_s),
            )

    def on_sequence(self, seconds: float) -> None:
        """Update the duration of a sequence, which varies: clients ask for a word or for pages."""
        self._unloaded_s = _average(self._unloaded_s, seconds)


def _average(average: float, value: float) -> float:
    return _DECAY * average + (1 - _DECAY) * value if average else value
