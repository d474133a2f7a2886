"""Progress as people see it, on stderr: bars at a terminal, a line a finished stage in a log."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

# A log or a pipe has no width of its own; tables keep their columns there.
LOG_WIDTH = 120

err = Console(stderr=True, width=None if sys.stderr.isatty() else LOG_WIDTH)


class Display:
    """Progress bars for a person at a terminal; one line a finished stage for a log."""

    def __init__(self) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._open: list[tuple[TaskID, str, float]] = []

    def start(self, what: str, total: float | None = None) -> None:
        if not self._open:
            self._bars.start()
        shown = "  " * len(self._open) + what
        self._open.append((self._bars.add_task(shown, total=total, note=""), what, time.perf_counter()))

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        task = self._open[-1][0]
        if note is None:
            self._bars.update(task, advance=round(amount, 1))
        else:
            self._bars.update(task, advance=round(amount, 1), note=escape(note))

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        task, what, began = self._open.pop()
        self._bars.remove_task(task)
        if not self._open:
            self._bars.stop()
            mark = "[green]✓[/]" if ok else "[red]✗[/]"
            line = f"{mark} {what:<18} [cyan]{time.perf_counter() - began:6.1f} s[/]  [dim]{escape(note)}[/]"
            # A log keeps what belongs together on one line.
            err.print(line, soft_wrap=not err.is_terminal)
