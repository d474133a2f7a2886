"""Run several sessions at once, in the order of the windows, and measure how many are fastest."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from queue import Queue

from hasten.core.system.hardware import usable_cores
from hasten.core.system.prefetch import prefetch
from hasten.corpus.operator import AnsweredWindow, Operator
from hasten.corpus.state import Placement
from hasten.corpus.windows import Window

logger = logging.getLogger("hasten")

# Windows that are read, and answered windows that wait to be written, ahead of time.
_AHEAD = 2
# Rows that each session answers in a measurement; fewer rows in all do not pay for one.
_MEASURED_ROWS = 128
_MIN_ROWS = 20 * _MEASURED_ROWS


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


def measured_placement(
    open_operator: Callable[[int], Operator], sample: Window | None, expected_rows: float
) -> Placement:
    """Return the fastest way to share the cores among sessions, measured on the first rows."""
    cores = usable_cores()
    whole = Placement(1, cores)
    if cores == 1 or sample is None or expected_rows < _MIN_ROWS or not sample.rows.num_rows:
        return whole
    candidates = [Placement(cores // threads, threads) for threads in (cores, 4, 2, 1) if threads <= cores]
    speeds = {placement: _rows_per_s(open_operator, placement, sample) for placement in dict.fromkeys(candidates)}
    best = max(speeds, key=lambda placement: speeds[placement])
    logger.info(
        "sessions × threads, rows/s: %s",
        ", ".join(f"{placement.sessions}×{placement.threads} {speed:.0f}" for placement, speed in speeds.items()),
    )
    return best


def _rows_per_s(open_operator: Callable[[int], Operator], placement: Placement, sample: Window) -> float:
    rows: int = min(_MEASURED_ROWS, sample.rows.num_rows)
    window = Window(sample.shard, sample.rows.slice(0, rows), sample.positions[:rows], {}, rows, is_last=True)
    with ExitStack() as opened:
        operators = [open_operator(placement.threads or 1) for _ in range(placement.sessions)]
        for operator in operators:
            opened.callback(operator.close)
        pool = opened.enter_context(ThreadPoolExecutor(placement.sessions))

        def run(operator: Operator) -> None:
            for _ in operator.run([window]):
                pass

        list(pool.map(run, operators))  # the first run allocates
        begin = time.perf_counter()
        list(pool.map(run, operators))
        seconds = time.perf_counter() - begin
    return placement.sessions * rows / seconds
