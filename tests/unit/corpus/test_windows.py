"""Shards and windows depend on the input alone, whatever was skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from hasten.core.errors import InputError
from hasten.corpus import arrow_sources, windows
from hasten.corpus.filters import RowFilter
from hasten.corpus.inputs import open_sources
from hasten.corpus.sources import Source
from hasten.corpus.windows import Cut, ShardKey, Window

ROWS = 5000


@pytest.fixture(params=["parquet", "jsonl"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    rows = pa.table({"id": range(ROWS), "text": [f"{row} " * (row % 50) for row in range(ROWS)]})
    path = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        parquet.write_table(rows, path, row_group_size=1300)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    (opened,) = open_sources(str(path))
    return opened


def cut(
    source: Source, is_needed: Callable[[ShardKey], bool] = lambda _: True, where: str | None = None
) -> list[Window]:
    row_filter = RowFilter.parse(where) if where is not None else None
    ends: list[int] = []
    result = list(Cut(700, 256, ["id", "text"], source.schema, row_filter).windows(source, 0, is_needed, ends.append))
    assert ends == [ROWS]
    return result


def described(window: Window) -> tuple[ShardKey, list[int], int, bool]:
    assert window.rows["id"].to_pylist() == window.positions.tolist()
    return window.shard, window.positions.tolist(), window.covered, window.is_last


def test_every_row_is_in_one_window(source: Source) -> None:
    result = cut(source)
    assert [row for window in result for row in window.positions] == list(range(ROWS))
    assert sum(window.covered for window in result) == ROWS
    assert [window.shard.index for window in result if window.is_last] == list(range(8))
    assert max(window.rows.num_rows for window in result) == 256


def test_windows_of_a_shard_do_not_depend_on_skipped_shards(source: Source) -> None:
    result = [described(window) for window in cut(source)]
    for needed in ({0}, {3}, {7}, {2, 5, 6}):
        part = [described(window) for window in cut(source, lambda key, needed=needed: key.index in needed)]
        assert part == [window for window in result if window[0].index in needed]


def test_filtered_rows_are_covered_but_not_answered(source: Source) -> None:
    result = cut(source, where="id >= 1000 and id < 1010")
    assert [row for window in result for row in window.positions] == list(range(1000, 1010))
    assert sum(window.covered for window in result) == ROWS
    assert [window.shard.index for window in result if window.is_last] == list(range(8))


def test_windows_of_large_rows_are_bounded(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_MAX_WINDOW_BYTES", 10_000)
    monkeypatch.setattr(arrow_sources, "MAX_PIECE_BYTES", 4_000)
    result = cut(source)
    assert [row for window in result for row in window.positions] == list(range(ROWS))
    assert max(window.rows.nbytes for window in result) < 20_000


def test_columns_and_types_of_json_files_are_unified(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1, "note": null}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "b", "n": 1.5, "more": ["x"]}\n')
    (tmp_path / "c.jsonl").write_text("")
    sources = open_sources(str(tmp_path))
    types = {"text": pa.string(), "n": pa.float64(), "note": pa.string(), "more": pa.list_(pa.string())}
    assert all(source.schema == pa.schema(types) for source in sources)
    (tmp_path / "d.jsonl").write_text('{"text": 4}\n')
    with pytest.raises(InputError, match=r"column 'text' is int64 in .*d.jsonl and string in files before"):
        open_sources(str(tmp_path))


def test_column_that_appears_late_makes_a_bad_row(tmp_path: Path) -> None:
    rows = [{"text": "a"}] * 1001 + [{"text": "b", "late": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (source,) = open_sources(str(tmp_path / "rows.jsonl"))
    (piece,) = source.pieces(["text"], lambda *_: True)
    assert piece.bad == {1001: "the first 1000 rows have no column 'late'"}
