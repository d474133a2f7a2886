"""Show progress on stderr: bars at a terminal, one line per finished stage in a log."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

# A log or a pipe has no width; this one keeps the columns of tables.
LOG_WIDTH = 120

err = Console(stderr=True, width=None if sys.stderr.isatty() else LOG_WIDTH)


class _Count(MofNCompleteColumn):
    """A column with the number of completed units, if their total is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


class Display:
    """Progress on stderr: bars at a terminal, one line per finished stage in a log."""

    def __init__(self) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            _Count(separator=" of "),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._open: list[tuple[TaskID, str, float]] = []

    def start(self, title: str, total: float | None = None) -> None:
        if not self._open:
            self._bars.start()
        indented = "  " * len(self._open) + title
        self._open.append((self._bars.add_task(indented, total=total, note=""), title, time.perf_counter()))

    def advance(self, amount: float = 1, note: str | None = None) -> None:
        task = self._open[-1][0]
        if note is None:
            self._bars.update(task, advance=round(amount, 1))
        else:
            self._bars.update(task, advance=round(amount, 1), note=escape(note))

    def finish(self, note: str = "", *, ok: bool = True) -> None:
        task, title, started = self._open.pop()
        self._bars.remove_task(task)
        if not self._open:
            self._bars.stop()
            mark = "[green]✓[/]" if ok else "[red]✗[/]"
            line = f"{mark} {title:<18} [cyan]{time.perf_counter() - started:6.1f} s[/]  [dim]{escape(note)}[/]"
            # Do not wrap lines in a log.
            err.print(line, soft_wrap=not err.is_terminal)
