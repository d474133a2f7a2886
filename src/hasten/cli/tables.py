"""Tables that fit the terminal: the least important columns are dropped, and no row is wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_GAP = 2
# A sentence cut shorter than this is useless: other columns are dropped first.
_MIN_TEXT_WIDTH = 24


@dataclass(frozen=True, slots=True)
class Column:
    """A column of numbers, aligned right unless `is_left`."""

    name: str
    is_left: bool = False
    # If the table is too wide, the column with the highest rank is dropped first; rank 0 always stays.
    rank: int = 0
    # A column of sentences, which takes the remaining width and is truncated there; the last column.
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class TableRow:
    """The cells of one row, and rich's style for them."""

    cells: Sequence[str]
    style: str = ""


def plain_table(title: str = "", left: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    """Return a table without borders and rows; the columns that are aligned left come first."""
    padding = (0, _GAP, 0, 0)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=padding)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def fitted_table(columns: Sequence[Column], rows: Sequence[TableRow], width: int) -> Table:
    """Return a table of at most this width, without empty columns."""
    widths = [_width(column, [row.cells[index] for row in rows]) for index, column in enumerate(columns)]
    shown = [index for index in range(len(columns)) if any(row.cells[index] for row in rows)]

    def total_width() -> int:
        return sum(widths[index] for index in shown) + _GAP * (len(shown) - 1)

    while total_width() > width and any(columns[index].rank for index in shown):
        shown.remove(max(shown, key=lambda index: columns[index].rank))
    table = plain_table()
    for index in shown:
        column = columns[index]
        max_width = width - total_width() + widths[index] if column.is_text else None
        justify: Literal["left", "right"] = "left" if column.is_left or column.is_text else "right"
        table.add_column(column.name, justify=justify, no_wrap=True, overflow="ellipsis", max_width=max_width)
    for row in rows:
        table.add_row(*(Text(row.cells[index]) for index in shown), style=row.style)
    return table


def _width(column: Column, cells: Sequence[str]) -> int:
    width = max(cell_len(text) for text in (column.name, *cells))
    return min(width, _MIN_TEXT_WIDTH) if column.is_text else width
