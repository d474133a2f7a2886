from __future__ import annotations

import pyarrow as pa
import pytest

from hasten.core.errors import InputError, PlanError
from hasten.corpus.filters import RowFilter

ROWS = pa.table(
    {
        "lang": pa.array(["en", "de", None, "en"]).dictionary_encode(),
        "stars": [1, 3, 5, None],
        "price": ["2.5", "10", "7", None],
        "is new": [True, False, None, True],
        "note": [None, "it's", "a and b", "x"],
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("lang = 'en'", [0, 3]),
        ("lang != 'en'", [1]),
        ("stars >= 3 and lang = 'de'", [1]),
        ("stars is null", [3]),
        ("stars IS NOT NULL AND stars<4.5", [0, 1]),
        ("price > 5", [1, 2]),
        ('"is new" = true', [0, 3]),
        ("note = 'it''s'", [1]),
        ("note = 'a and b'", [2]),
        ("stars = -1", []),
    ],
)
def test_filter_keeps_matching_rows(text: str, rows: list[int]) -> None:
    row_filter = RowFilter.parse(text)
    row_filter.check(ROWS.schema)
    assert [row for row, kept in enumerate(row_filter.mask(ROWS).to_pylist()) if kept] == rows


@pytest.mark.parametrize(
    "text", ["", "lang", "lang = en", "lang like 'e'", "lang = 'en' or stars = 1", "lang = 'en' and", "a = 1; drop"]
)
def test_invalid_filter_is_rejected(text: str) -> None:
    with pytest.raises(PlanError, match="is not a comparison"):
        RowFilter.parse(text)


def test_unknown_column_and_unfit_value_are_rejected() -> None:
    with pytest.raises(PlanError, match="no column 'star'"):
        RowFilter.parse("star = 1").check(ROWS.schema)
    with pytest.raises(InputError, match=r"'stars' \(int64\) cannot be compared with 'three'"):
        RowFilter.parse("stars = 'three'").mask(ROWS)
