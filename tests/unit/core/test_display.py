from __future__ import annotations

import io

import pytest
from rich.console import Console

from hasten.core.progress import step
from hasten.core.system import display


def test_bar_shows_the_variant_being_tried_the_count_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(width=120, file=io.StringIO(), force_terminal=True, color_system=None)
    monkeypatch.setattr(display, "err", terminal)
    progress = display.Display()
    with step(progress, "build"), step(progress, "search", total=9):
        progress.advance(2)
        progress.advance(0, note="trying onnxruntime-int8+[x]")
        frame = Console(width=120, file=io.StringIO())
        frame.print(progress._bars)
    stage, search = frame.file.getvalue().splitlines()
    assert [part in search for part in ("2 of 9", "0:00:0", "trying onnxruntime-int8+[x]")] == [True] * 3
    # The number of units of the stage is unknown.
    assert " of " not in stage
    assert "✓ build" in terminal.file.getvalue()
