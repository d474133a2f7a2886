"""Run several sessions at once, in the order of the windows."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from queue import Queue

from hasten.core.system.prefetch import prefetch
from hasten.corpus.operator import AnsweredWindow, Operator
from hasten.corpus.windows import Window

# Windows that are read, and answered windows that wait to be written, ahead of time.
_AHEAD = 2


def answer_in_order(operators: Sequence[Operator], windows: Iterable[Window]) -> Generator[AnsweredWindow, None, None]:
    """Yield the answers of all windows in order; reading, sessions and the consumer of the answers overlap."""
    with closing(prefetch(windows, _AHEAD)) as read:
        answers = operators[0].run(read) if len(operators) == 1 else _Pool(operators, read).answers()
        with closing(prefetch(answers, _AHEAD)) as answered:
            try:
                yield from answered
            finally:
                for operator in operators:
                    operator.stop.set()


class _Pool:
    """Threads with an operator each, which take the next window when they are free."""

    def __init__(self, operators: Sequence[Operator], windows: Iterable[Window]) -> None:
        self._operators, self._windows = operators, iter(windows)
        self._taken = self._yielded = 0
        self._input = threading.Lock()
        self._change = threading.Condition()
        self._is_stopped = False
        # How far the windows of one session may be ahead of those of another, which bounds the memory.
        self._limit = 2 * len(operators) + 2
        self._results: Queue[tuple[int, AnsweredWindow] | BaseException | None] = Queue()

    def answers(self) -> Generator[AnsweredWindow, None, None]:
        threads = [
            threading.Thread(target=self._work, args=(operator,), name="hasten-session") for operator in self._operators
        ]
        for thread in threads:
            thread.start()
        early: dict[int, AnsweredWindow] = {}
        working = len(threads)
        try:
            while working or early:
                if self._yielded in early:
                    yield early.pop(self._yielded)
                    with self._change:
                        self._yielded += 1
                        self._change.notify_all()
                    continue
                result = self._results.get()
                if result is None:
                    working -= 1
                elif isinstance(result, BaseException):
                    raise result
                else:
                    early[result[0]] = result[1]
        finally:
            with self._change:
                self._is_stopped = True
                self._change.notify_all()
            for operator in self._operators:
                operator.stop.set()
            for thread in threads:
                thread.join()

    def _work(self, operator: Operator) -> None:
        numbers: deque[int] = deque()
        try:
            with closing(operator.run(self._take(numbers))) as answers:
                for answered in answers:
                    self._results.put((numbers.popleft(), answered))
            self._results.put(None)
        except BaseException as error:
            self._results.put(error)

    def _take(self, numbers: deque[int]) -> Iterator[Window]:
        while True:
            with self._input:
                window = None if self._is_stopped else next(self._windows, None)
                number = self._taken
                self._taken += 1
            if window is None:
                return
            with self._change:
                while not self._is_stopped and number >= self._yielded + self._limit:
                    self._change.wait()
            numbers.append(number)
            yield window
