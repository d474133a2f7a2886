from __future__ import annotations

import csv
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.core.errors import InputError, StageError, UnsupportedError
from hasten.measure import text_files
from hasten.measure.data import read_data, read_rows, sample_rows, stream
from hasten.tasks import TASKS, Row, TaskSpec

FEELINGS = TaskSpec("text-classification", ("NEGATIVE", "POSITIVE"))
UNNAMED = TaskSpec("text-classification", ("LABEL_0", "LABEL_1"))
STARS = TaskSpec("text-classification", ("1", "2", "3"))
TAGGER = TaskSpec("token-classification", ("O", "B-PER", "I-PER"))

# Any text, in which some characters that separate lines or cells are more frequent than they would be.
texts = st.text(st.one_of(st.sampled_from('",;\t\n\r\u2028\x85\x00[]{}\\'), st.characters(exclude_categories=["Cs"])))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)
same_place = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Let caplog see hasten's log lines, which the command line stops from propagating."""
    monkeypatch.setattr(logging.getLogger("hasten"), "propagate", True)
    return caplog


# --- JSON lines


def test_json_lines_are_read_row_by_row(file: Path) -> None:
    file.write_bytes(b'{"text": "a", "label": 1}\n\n  \n{"text": "b"}\r\n\n{"text": "c"}')
    assert read_rows(file) == [{"text": "a", "label": 1}, {"text": "b"}, {"text": "c"}]
    assert read_rows(str(file)) == read_rows(file)


def test_unicode_separators_do_not_end_a_line(file: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    file.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
    assert read_rows(file) == [{"text": text}]


@pytest.mark.parametrize(
    ("name", "content"),
    [("rows.jsonl", b'{"text": "a"}\n'), ("rows", b'{"text": "a"}\n'), ("rows.json", b'[{"text": "a"}]'),
     ("rows.csv", b"text\r\na\r\n"), ("rows.TSV", b"text\na\n")],
)  # fmt: skip
def test_byte_order_mark_is_skipped(tmp_path: Path, name: str, content: bytes) -> None:
    """Editors on Windows write one."""
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read_rows(tmp_path / name) == [{"text": "a"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b"\n \n", "has no rows"),
        (b'{"text": "a"}\n\n{"text": \n', r"rows\.jsonl, line 3 is not JSON"),
        (b"text\na\n", "line 1 is not JSON"),
        (b'{"text": "a"}\n["b"]\n', r'line 2 is not an object: \["b"\]'),
        (b'"a"\n', "line 1 is not an object"),
        (b"null\n", "line 1 is not an object"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8 text: byte 11 of it is 0xff"),
        ('{"text": "a"}'.encode("utf-16"), "line 1 is not UTF-8 text"),
        (b'{"text": "a"}\n{"id": ' + b"1" * 5000 + b"}\n", "line 2 is not JSON"),
        (b'{"text": "a"}\n' + b"[" * 99_999 + b"\n", "line 2 is not JSON"),
    ],
    ids=["empty", "blank", "cut", "csv", "list", "string", "null", "latin-1", "utf-16", "huge number", "too deep"],
)
def test_bad_json_lines_error_names_the_line(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(file)


def test_json_lines_are_read_from_stdin() -> None:
    program = "from hasten.measure.data import read_rows; print(read_rows('-'))"
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, check=True)
    assert done.stdout.strip() == b"[{'text': 'a'}, {'text': 'b'}]"


# --- a JSON array


@same_place
@given(st.lists(values, max_size=5), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 40))
def test_json_array_is_read_in_chunks(
    tmp_path: Path, rows: list[Any], indent: int | None, is_ascii: bool, piece: int
) -> None:
    """The result must not depend on where the chunks end."""
    file = tmp_path / "rows.json"
    file.write_text(" \n[" + json.dumps(rows, indent=indent, ensure_ascii=is_ascii)[1:] + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "_CHUNK", piece)
        assert list(stream(file)) == rows


def test_json_lines_with_json_extension_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert read_rows(file) == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("piece", [1, 2**20])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "has no rows"),
        (b"[] 1", "continues with '1' after its array"),
        (b"[1]", "item 1 is not an object: 1"),
        (b'[{"text": "a"}, "b"]', 'item 2 is not an object: "b"'),
        (b'[{"text": "a"}, {"text": }]', "item 2 is not JSON: Expecting value"),
        (b'[{"text": "a"}, {"text": "b', "item 2 is not JSON: Unterminated string"),
        (b'[{"text": "a"},]', "item 2 is not JSON"),
        (b'[{"text": "a"}', "item 1 is followed by 'the end of the file', not by , or ]"),
        (b'[{"text": "a"} {"text": "b"}]', "item 1 is followed by '{'"),
        (b'[{"text": "a"}]]', "continues with ']' after its array"),
        (b'[{"text": "a"}, {"text": "\xff"}]', "is not UTF-8 text"),
        (b'[{"text": "a"}, {"id": ' + b"1" * 5000 + b"}]", "item 2 is not JSON: Exceeds the limit"),
        (b"[" * 99_999, "item 1 is not JSON"),
        (b'{\n "rows": [1]\n}', "line 1 is not JSON"),
    ],
)
def test_bad_json_array_error_names_the_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str, piece: int
) -> None:
    monkeypatch.setattr(text_files, "_CHUNK", piece)
    file = tmp_path / "rows.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(file)


def test_array_error_is_raised_before_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK", 64)
    content = io.BytesIO(b'[{"text": "a"}, {"text": oh}, ' + b'{"text": "a"}, ' * 10_000 + b"1]")
    with pytest.raises(InputError, match="item 2 is not JSON"):
        list(text_files._Array(content, "rows.json"))
    assert content.tell() < 1000


# --- tables


@same_place
@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6), st.sampled_from([".csv", ".tsv"]), st.booleans())
def test_csv_round_trip_preserves_rows(tmp_path: Path, rows: list[tuple[str, str]], suffix: str, is_unix: bool) -> None:
    file = tmp_path / f"rows{suffix}"
    with file.open("w", encoding="utf-8", newline="") as stream_:
        # With a newline as terminator, csv quotes a carriage return only if it quotes all cells, as unix_dialect does.
        dialect = csv.unix_dialect if is_unix else csv.excel
        writer = csv.writer(stream_, dialect, delimiter="," if suffix == ".csv" else "\t")
        writer.writerows([("text", "text_pair"), *rows])
    expected = [{key: cell for key, cell in zip(("text", "text_pair"), row, strict=True) if cell} for row in rows]
    assert read_data(file).rows == expected


def test_cells_are_parsed_by_column_name(tmp_path: Path) -> None:
    """A text that looks like a number or a list stays text; a label waits for the model's labels."""
    file = tmp_path / "rows.csv"
    file.write_text(
        'text,label,score,tokens,tags,id\n2024,1,0.5,"[""a"", ""b""]","[0, 1]",7\n"[1]",x,high,[oh],,8\n', "utf-8"
    )
    assert read_rows(file) == [
        {"text": "2024", "label": "1", "score": 0.5, "tokens": ["a", "b"], "tags": [0, 1], "id": "7"},
        {"text": "[1]", "label": "x", "score": "high", "tokens": "[oh]", "id": "8"},
    ]


def test_unnamed_pandas_index_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(", text ,label\n0,a,b\n\n1,c,d\n", encoding="utf-8")
    assert read_rows(file) == [{"text": "a", "label": "b"}, {"text": "c", "label": "d"}]


def test_cell_may_exceed_the_csv_default_limit(tmp_path: Path) -> None:
    """The default limit of the standard library is 131,072 characters."""
    file = tmp_path / "rows.csv"
    file.write_text("text\n" + "word " * 50_000 + "\n", encoding="utf-8")
    assert len(str(read_rows(file)[0]["text"])) == 250_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no header"),
        (b",,\n1,2,3\n", "has no header"),
        (b"text\n", "has no rows"),
        (b"text,label,text\na,b,c\n", "two columns named 'text'"),
        (b"text,label\na,b\nc\n", r"rows\.csv, line 3 has 1 cells, and the header has 2"),
        (b'text,label\n"a\nb",c\nd,e,f\n', "line 4 has 3 cells, and the header has 2"),
        (b'text,label\na,b\n"c" d,e\n', "line 3 is broken: ',' expected after '\"'"),
        (b'text,label\na,b\n"c,d\ne,f\n', "line 3 is broken: unexpected end of data"),
        (b"text,label\na,\xe9\n", "line 2 is not UTF-8 text: byte 3 of it is 0xe9"),
        ("text\na\n".encode("utf-16"), "line 1 is not UTF-8 text"),
    ],
)
def test_bad_table_error_names_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(file)


# --- parquet and datasets


@pytest.fixture
def dataset() -> Iterator[Callable[..., Any]]:
    """Return a function: `dataset("positive", "negative")` has three sentences with the classes 0, 1 and 0."""
    import datasets

    datasets.disable_progress_bars()

    def make(*names: str) -> datasets.Dataset:
        features = datasets.Features(
            {"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=[*names])}
        )
        rows = {"sentence": ["good", "bad", "fine"], "label": [0, 1, 0]}
        return datasets.Dataset.from_dict(rows, features=features)

    yield make
    datasets.enable_progress_bars()


def test_parquet_is_read_in_batches(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    rows: list[Row] = [{"text": f"row {index}", "label": index % 3, "tags": ["a", "b"]} for index in range(3000)]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
    assert read_rows(tmp_path / "rows.parquet") == rows


def test_parquet_values_are_converted_to_json_types(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    row = {"text": "a", "score": Decimal("1.50"), "raw": b"caf\xc3\xa9", "day": date(2026, 1, 2), "no": None,
           "answers": {"text": ["a"], "answer_start": [0]}}  # fmt: skip
    write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    answers = {"text": ["a"], "answer_start": [0]}
    expected = {"text": "a", "score": 1.5, "raw": "café", "day": "2026-01-02", "answers": answers}
    (result,) = read_rows(tmp_path / "rows.parquet")
    assert result == json.loads(json.dumps(result)) == expected


def test_invalid_parquet_file_is_rejected(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    whole, cut = tmp_path / "whole.parquet", tmp_path / "cut.parquet"
    write_table(pyarrow.table({"text": [f"some text {index}" for index in range(5000)]}), whole)
    content = whole.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"cut\.parquet is not a parquet file"):
        read_rows(cut)
    cut.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    with pytest.raises(InputError, match=r"cut\.parquet cannot be read"):
        read_rows(cut)


def test_saved_dataset_is_loaded_from_any_layout(tmp_path: Path, dataset: Callable[..., Any]) -> None:
    import datasets

    saved = dataset("positive", "negative")
    saved.to_parquet(tmp_path / "rows.parquet")
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=saved.select([1]), test=saved).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    saved.to_parquet(tmp_path / "folder" / "test-00000-of-00001.parquet")
    expected = [{"text": text, "label": label} for text, label in (("good", 0), ("bad", 1), ("fine", 0))]
    for source in (
        "rows.parquet", "saved", "splits/test", "datasets:{}/saved", "datasets:{}/splits:test", "folder",
        "datasets:{}/folder:test",
    ):  # fmt: skip
        path = source.format(tmp_path) if "{}" in source else tmp_path / source
        data = read_data(path, {"text": "sentence"})
        assert data.rows == expected, source
        assert data.classes == {"label": ("positive", "negative")}, source
    with pytest.raises(InputError, match="has the splits train, test, and none was chosen"):
        read_rows(tmp_path / "splits")
    for source, message in (
        ("splits:validation", "has no split 'validation'"),
        ("folder:train", "has no split 'train'"),
        ("saved:train", "is a dataset without splits"),
        ("nowhere:train", "no folder with a dataset at"),
    ):
        with pytest.raises(InputError, match=message):
            read_rows(f"datasets:{tmp_path}/{source}")


def test_cached_hub_dataset_is_loaded_by_name(
    tmp_path: Path, dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, `datasets` looks into its cache, which here holds a folder of that name."""
    import datasets

    cache, source = tmp_path / "cache", tmp_path / "feelings"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    source.mkdir()
    for split in ("train", "test"):
        dataset("positive", "negative").to_parquet(source / f"{split}-00000-of-00001.parquet")
    datasets.load_dataset(str(source))
    (cache / "feelings").rename(cache / "acme___feelings")
    for address, expected in (
        ("test", ["good", "bad", "fine"]),
        ("default:test", ["good", "bad", "fine"]),
        ("test[:2]", ["good", "bad"]),
        ("default:train[-1:]", ["fine"]),
    ):
        data = read_data(f"datasets:acme/feelings:{address}", {"text": "sentence"})
        assert [row["text"] for row in data.rows] == expected
        assert data.classes == {"label": ("positive", "negative")}
    with pytest.raises(InputError, match=r"has the splits .*test.*, and none was chosen"):
        read_rows("datasets:acme/feelings")
    with pytest.raises(InputError, match="Unknown split"):
        read_rows("datasets:acme/feelings:validation")


@pytest.mark.parametrize("address", ["glue:validation", "nyu-mll/glue:sst2:validation[:5]", "glue"])
def test_unreachable_hub_is_a_one_line_error(address: str) -> None:
    with pytest.raises(StageError, match="here, and the hub cannot be reached"):
        read_rows(f"datasets:{address}")


@pytest.mark.parametrize("address", ["", ":", "a:b:c:d", "a::b", "glue:sst2:validation[", "glue:sst2[:3]:validation"])
def test_invalid_dataset_address_is_rejected(address: str) -> None:
    with pytest.raises(InputError, match="is not the address of a dataset") as caught:
        read_rows(f"datasets:{address}")
    assert caught.value.hint == "datasets:NAME:SPLIT, or datasets:NAME:CONFIG:SPLIT"


@pytest.mark.parametrize(
    ("package", "source"), [("pyarrow", "rows.parquet"), ("datasets", "."), ("datasets", "datasets:glue:test")]
)
def test_missing_package_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str
) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=f"needs the package '{package}'") as caught:
        read_rows(source)
    assert caught.value.hint == "pip install 'hasten[data]'"


# --- columns


def test_columns_are_renamed_to_the_task_names(file: Path) -> None:
    file.write_text('{"a": 1, "b": 2, "text": 3, "c": 4}\n{"a": 5}\n', encoding="utf-8")
    assert read_rows(file, {"text": "b", "b": "a", "c": "c"}) == [{"text": 2, "b": 1, "c": 4}, {"b": 5}]


def test_cells_are_parsed_by_renamed_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("sentence,similarity\n[1],4.5\n", encoding="utf-8")
    assert read_rows(file, {"text": "sentence", "score": "similarity"}) == [{"text": "[1]", "score": 4.5}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.tsv"])
def test_unknown_column_error_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    separator = "\t" if name.endswith(".tsv") else ","
    table = f"sentence{separator}stars\na{separator}1\n"
    file.write_text('{"sentence": "a", "stars": 1}\n' if "json" in name else table, encoding="utf-8")
    with pytest.raises(InputError, match=f"{name} has no column 'sentense': did you mean 'sentence'") as caught:
        read_rows(file, {"label": "stars", "text": "sentense"})
    assert caught.value.hint == "its columns: sentence, stars"


# --- labels


def labels(data: Any, spec: TaskSpec) -> list[object] | None:
    """Return the labels as the task parses them: by number."""
    return TASKS.get(spec.name).gold(data.rows_for(spec), spec)


@pytest.mark.parametrize(
    ("names", "spec", "expected"),
    [
        (("negative", "positive"), FEELINGS, [0, 1, 0]),
        (("positive", "negative"), FEELINGS, [1, 0, 1]),  # the numbers are swapped, the names are not
        (("NEGATIVE", "POSITIVE"), FEELINGS, [0, 1, 0]),
        (("POSITIVE", "neutral", "NEGATIVE"), FEELINGS, "row 2 has the label 'neutral'"),
        (
            ("not_entailment", "entailment"),
            TaskSpec("text-classification", ("Entailment", "Not Entailment")),
            [1, 0, 1],
        ),
        (("3", "1"), STARS, [2, 0, 2]),
        # Where the difference that is otherwise overlooked tells labels apart, it counts.
        (("a", "A"), TaskSpec("text-classification", ("A", "a")), [1, 0, 1]),
    ],
)
def test_classes_are_matched_by_name(
    dataset: Callable[..., Any], tmp_path: Path, names: tuple[str, ...], spec: TaskSpec, expected: list[int] | str
) -> None:
    dataset(*names).to_parquet(tmp_path / "rows.parquet")
    data = read_data(tmp_path / "rows.parquet", {"text": "sentence"})
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            labels(data, spec)
    else:
        assert labels(data, spec) == expected


def test_classes_without_known_names_are_matched_by_number(
    dataset: Callable[..., Any], tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    dataset("negative", "positive").to_parquet(tmp_path / "rows.parquet")
    data = read_data(tmp_path / "rows.parquet", {"text": "sentence"})
    assert labels(data, UNNAMED) == [0, 1, 0]
    (line,) = logged.messages
    assert "(negative, positive) match none of the model's labels (LABEL_0, LABEL_1)" in line
    assert labels(data, FEELINGS) == [0, 1, 0]
    assert len(logged.messages) == 1


def test_hidden_test_labels_are_removed(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    from pyarrow.parquet import write_table

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["NEGATIVE", "x"])}
    )
    for result, expected in (([-1, -1], None), ([0, -1], 'row 2 has no "label"')):
        table = pyarrow.table({"text": ["a", "b"], "label": result}, schema=features.arrow_schema)
        write_table(table, tmp_path / "rows.parquet")
        data = read_data(tmp_path / "rows.parquet")
        if expected is None:
            assert labels(data, FEELINGS) is None
        else:
            with pytest.raises(InputError, match=expected):
                labels(data, FEELINGS)


def test_token_tags_are_matched_by_name(tmp_path: Path, logged: pytest.LogCaptureFixture) -> None:
    import datasets

    classes = datasets.ClassLabel(names=["I-PER", "O", "B-PER"])
    other = datasets.ClassLabel(names=["NOUN", "VERB"])
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "pos_tags": datasets.List(other),
            "ner_tags": datasets.List(classes),
        }
    )
    rows = {"tokens": [["Ada", "Lovelace", "counts"]], "pos_tags": [[0, 0, 1]], "ner_tags": [[2, 0, 1]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    data = read_data(tmp_path / "saved", {"tags": "ner_tags"})
    assert labels(data, TAGGER) == [("B-PER", "I-PER", "O")]
    assert logged.messages == []  # that the model knows no parts of speech does not matter


def test_label_lists_are_matched_by_name(tmp_path: Path) -> None:
    import datasets

    many = datasets.List(datasets.ClassLabel(names=["joy", "fear", "anger"]))
    features = datasets.Features({"text": datasets.Value("string"), "labels": many})
    rows = {"text": ["a", "b"], "labels": [[0, 2], []]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    spec = TaskSpec("text-classification", ("Anger", "Fear", "Joy"), "multi_label_classification")
    data = read_data(tmp_path / "rows.parquet", {"label": "labels"})
    assert labels(data, spec) == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize(
    ("cell", "spec", "expected"),
    [
        ("1", UNNAMED, 1),
        ("LABEL_1", UNNAMED, 1),
        ("1", STARS, 0),  # a name goes before a number
        ("0", STARS, 0),  # a number where it is no name
        ("2", UNNAMED, "row 1 has the label '2'"),
        ("-1", UNNAMED, "row 1 has the label '-1'"),
        ('"[""a"", 2]"', TaskSpec("text-classification", ("a", "b", "c"), "multi_label_classification"), [1, 0, 1]),
        ("b", TaskSpec("text-classification", ("a", "b", "c"), "multi_label_classification"), [0, 1, 0]),
    ],
)
def test_table_label_is_a_name_or_a_number(
    tmp_path: Path, cell: str, spec: TaskSpec, expected: int | list[int] | str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"text,label\na,{cell}\n", encoding="utf-8")
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            labels(read_data(file), spec)
    else:
        assert labels(read_data(file), spec) == [expected]


def test_json_number_label_is_a_number(file: Path) -> None:
    """A string label in JSON is a name: JSON distinguishes strings from numbers."""
    file.write_text('{"text": "a", "label": "1"}\n', encoding="utf-8")
    with pytest.raises(InputError, match="row 1 has the label '1'"):
        labels(read_data(file), UNNAMED)


# --- files that are not there, and the built-in sample


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no data file at") as caught:
        read_rows(tmp_path / "nothing.jsonl")
    assert "datasets:NAME:SPLIT" in (caught.value.hint or "")
    with pytest.raises(InputError, match="no data file at all"):
        read_rows("")
    with pytest.raises(InputError, match=r"cannot be read: .*doesn't contain any data files"):
        read_rows(tmp_path)


def test_unknown_extension_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"PK")
    with pytest.raises(InputError, match=r"rows\.xlsx has an unknown file type: \.xlsx") as caught:
        read_rows(tmp_path / "rows.xlsx")
    assert ".parquet" in (caught.value.hint or "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that even root cannot read from its start")
def test_unreadable_file_is_rejected(file: Path) -> None:
    file.symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=r"rows\.jsonl cannot be read: Input/output error"):
        read_rows(file)


@pytest.mark.parametrize("name", TASKS.names())
def test_sample_rows_suit_every_task(name: str) -> None:
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
