from __future__ import annotations

from pathlib import Path

import pytest

from hasten.core.errors import InputError
from hasten.measure.data import read_rows, sample_rows
from hasten.tasks import TASKS, TaskSpec


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_rows_are_lines(file: Path) -> None:
    file.write_bytes(b'{"text": "a", "label": 1}\n\n  \n{"text": "b"}\r\n\n{"text": "c"}')
    assert read_rows(file) == [{"text": "a", "label": 1}, {"text": "b"}, {"text": "c"}]
    assert read_rows(str(file)) == read_rows(file)


def test_separators_inside_a_text_do_not_end_its_line(file: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    file.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
    assert read_rows(file) == [{"text": text}]


def test_a_byte_order_mark_is_not_text(file: Path) -> None:
    """Windows' editors write one."""
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_rows(file) == [{"text": "a"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b'{"text": "a"}\n\n{"text": \n', r"rows\.jsonl, line 3 is not JSON"),
        (b"text\na\n", "line 1 is not JSON"),
        (b'{"text": "a"}\n["b"]\n', r'line 2 is not an object: \["b"\]'),
        (b'"a"\n', "line 1 is not an object"),
        (b"null\n", "line 1 is not an object"),
        (b'{"text": "\xff"}\n', "is not UTF-8 text"),
        ('{"text": "a"}'.encode("utf-16"), "is not UTF-8 text"),
        (b'{"text": "a"}\n{"id": ' + b"1" * 5000 + b"}\n", "line 2 is not JSON"),
        (b'{"text": "a"}\n' + b"[" * 99_999 + b"\n", "line 2 is not JSON"),
    ],
    ids=["empty", "blank", "cut", "csv", "list", "string", "null", "latin-1", "utf-16", "huge number", "too deep"],
)
def test_a_bad_file_is_refused_by_line(file: Path, content: bytes, said: str) -> None:
    file.write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_rows(file)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(InputError, match="no data file at"):
            read_rows(path)


@pytest.mark.parametrize("name", TASKS.names())
def test_the_sample_suits_every_task(name: str) -> None:
    task = TASKS.get(name)
    spec = TaskSpec(name, ("a", "b"), mask_token="[MASK]")
    rows = sample_rows(spec)
    assert len(rows) >= 100
    assert len(task.parse(rows)) == len(rows)
    assert task.gold(rows, spec) is None
    assert len({repr(row) for row in rows}) == len(rows)
    texts = [max((value for value in row.values() if isinstance(value, str)), key=len) for row in rows]
    assert min(map(len, texts)) < 20
    assert max(map(len, texts)) > 1000
