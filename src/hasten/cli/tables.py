"""Tables that fit: where there is no room the least needed columns go, and no row is ever broken in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2
# A sentence cut shorter says nothing: before that, other columns go.
_LEAST_TEXT = 24


@dataclass(frozen=True, slots=True)
class Column:
    """Of numbers, unless it is on the left."""

    name: str
    is_left: bool = False
    # Where there is no room, the highest goes first; 0 stays.
    spare: int = 0
    # Takes what room is left, and is cut there; the last.
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    cells: Sequence[str]
    style: str = ""


def plain_table(title: str = "") -> Table:
    padding = (0, _GAP, 0, 0)
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=padding)


def fitted_table(columns: Sequence[Column], lines: Sequence[Line], width: int) -> Table:
    """No wider than that; columns in which nothing stands are left out."""
    widths = [_width(column, [line.cells[place] for line in lines]) for place, column in enumerate(columns)]
    shown = [place for place in range(len(columns)) if any(line.cells[place] for line in lines)]

    def taken() -> int:
        return sum(widths[place] for place in shown) + _GAP * (len(shown) - 1)

    while taken() > width and any(columns[place].spare for place in shown):
        shown.remove(max(shown, key=lambda place: columns[place].spare))
    table = plain_table()
    for place in shown:
        column = columns[place]
        room = width - taken() + widths[place] if column.is_text else None
        justify: Literal["left", "right"] = "left" if column.is_left or column.is_text else "right"
        table.add_column(column.name, justify=justify, no_wrap=True, overflow="ellipsis", max_width=room)
    for line in lines:
        table.add_row(*(Text(line.cells[place]) for place in shown), style=line.style)
    return table


def _width(column: Column, cells: Sequence[str]) -> int:
    width = max(cell_len(text) for text in (column.name, *cells))
    return min(width, _LEAST_TEXT) if column.is_text else width
