"""Who is let in: by how many are in already, and by how long another would wait for them.

No threads here: whoever calls holds the lock.
"""

from __future__ import annotations

from hasten.core.errors import OverloadedError
from hasten.server.queue import Limits

# Rates are of the last seconds, not of all time: machines and texts change.
_MEMORY = 0.9


class Admission:
    """What is told of requests and batches, and what follows for whoever comes next."""

    def __init__(self, limits: Limits, sessions: int) -> None:
        self._limits = limits
        self._sessions = sessions
        # Of the requests that are in, those that are encoded: how many they are, and their tokens.
        self._encoded = self._tokens = 0
        self._tokens_of_one = 0.0
        self._tokens_per_s = 0.0
        self._alone_s = 0.0

    def check(self, taken: int) -> None:
        """Refuse another where so many are in already, or it would wait too long."""
        wait_s, limits = self.wait_s(taken), self._limits
        is_slow = limits.slowdown is not None and 0 < (limits.slowdown - 1) * self._alone_s < wait_s
        if taken >= limits.requests or wait_s > limits.wait_s or is_slow:
            raise OverloadedError(f"{taken} requests are waiting", retry_after_s=max(0.1, wait_s))

    def wait_s(self, taken: int) -> float:
        """How long what is in will take, running batches as if they had just begun; nothing before any ran."""
        if not self._tokens_per_s:
            return 0.0
        tokens = self._tokens + (taken - self._encoded) * self._tokens_of_one
        return tokens / (self._tokens_per_s * self._sessions)

    def encoded(self, tokens: int) -> None:
        self._encoded += 1
        self._tokens += tokens
        self._tokens_of_one = _recent(self._tokens_of_one, tokens)

    def answered(self, tokens: int) -> None:
        """One that was encoded."""
        self._encoded -= 1
        self._tokens -= tokens

    def ran(self, tokens: int, requests: int, seconds: float) -> None:
        """What a batch took, to tell how long the others will."""
        self._tokens_per_s = _recent(self._tokens_per_s, tokens / max(seconds, 1e-6))
        if requests == 1:
            self._alone_s = _recent(self._alone_s, seconds)


def _recent(average: float, value: float) -> float:
    return _MEMORY * average + (1 - _MEMORY) * value if average else value
