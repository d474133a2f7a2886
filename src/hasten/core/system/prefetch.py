"""Run an iterator on a thread, ahead of the code that consumes it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from queue import Empty, Full, Queue
from typing import TypeVar

Item = TypeVar("Item")

# How often a thread that waits for a queue looks whether it should stop.
_POLL_S = 0.1


class _End:
    """The end of the items, or the error that ended them."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def prefetch(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """Yield the items, up to `depth` of which are computed ahead; an error is raised in the place of its item.

    Close the iterator to stop the thread earlier than at its end.
    """
    queue: Queue[Item | _End] = Queue(depth)
    stop = threading.Event()

    def put(item: Item | _End) -> bool:
        while not stop.is_set():
            try:
                queue.put(item, timeout=_POLL_S)
            except Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            # A generator is closed on the thread that ran it.
            with closing(items) if isinstance(items, Generator) else nullcontext():
                for item in items:
                    if not put(item):
                        return
            put(_End())
        except BaseException as error:
            put(_End(error))

    thread = threading.Thread(target=run, name="hasten-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = queue.get(timeout=_POLL_S)
            except Empty:
                continue
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        stop.set()
        thread.join()
