"""Rows that cannot be evaluated or calibrated on are rejected before the weights are loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.core.errors import HastenError, InputError, PlanError, StageError

ROWS = [{"text": "a fine day", "label": "good"}, {"text": "a bad one", "label": "bad"}, {"text": "so so", "label": 1}]
PAIRS = [{"text": "a", "text_pair": "b", "score": 2}, {"text": "c", "text_pair": "d", "score": 2.0}]
OTHERS = [{"text": "another"}, {"text": "and another"}]

BAD_DATA: dict[str, tuple[dict[str, Any], type[HastenError], str]] = {
    "an empty file": ({"data": []}, InputError, "has no rows"),
    "no such file": ({"data": "nowhere.jsonl"}, InputError, "no data file at nowhere.jsonl"),
    "an empty folder": ({"data": "{folder}"}, InputError, "cannot be read"),
    "not JSON": ({"data": "{torn}"}, InputError, "line 1 is not JSON"),
    "a missing column": (
        {"data": [{"sentence": "a", "label": 1}]},
        InputError,
        'data.jsonl: item 1 has no "text"; its fields are: sentence, label',
    ),
    "a column in a later row": ({"data": [*ROWS, {"label": 1}]}, InputError, "data.jsonl: item 4"),
    "a column that is nowhere": ({"data": ROWS, "columns": {"text": "txt"}}, InputError, "no column 'txt'"),
    "a name that the task does not know": (
        {"data": ROWS, "columns": {"txt": "text"}}, PlanError, "'txt', which text-classification does not know: did you"
    ),
    "an unknown label": ({"data": [*ROWS, {"text": "x", "label": "godo"}]}, InputError, "did you mean 'good'"),
    "a label out of range": ({"data": [{"text": "x", "label": 3}]}, InputError, "has the label 3"),
    "a label that is missing": ({"data": [*ROWS, {"text": "x"}]}, InputError, 'row 4 has no "label"'),
    "no labels for a drop": ({"data": OTHERS, "max_drop": 1.0}, PlanError, "--max-drop needs labels"),
    "no labels for a metric": ({"data": OTHERS, "metric": "accuracy"}, PlanError, "--metric needs labels"),
    "a metric of another task": ({"data": ROWS, "metric": "exact-match"}, PlanError, "no metric 'exact-match'"),
    "a metric that may be two": ({"data": ROWS, "metric": "f1"}, PlanError, "macro F1 or micro F1"),
    "calibration is the same file": (
        {"data": "same.jsonl", "calibration": "same.jsonl"}, PlanError, "prove nothing"
    ),
    "calibration has the same rows": (
        {"data": ROWS, "calibration": [{"text": row["text"]} for row in ROWS]}, PlanError, "every row of"
    ),
    "calibration is empty": ({"data": ROWS, "calibration": []}, InputError, "calibration.jsonl has no rows"),
    "calibration is a folder": ({"calibration": "{folder}"}, InputError, "cannot be read"),
    "calibration lacks a column": (
        {"data": ROWS, "calibration": [{"sentence": "a"}]}, InputError, 'calibration.jsonl: item 1 has no "text"'
    ),
    "too few rows to calibrate on": (
        {"data": ROWS, "variants": ["onnxruntime-int8+smooth"]}, PlanError, "3 rows are too few to set some aside"
    ),
    "calibration alone lacks a column": (
        {"calibration": [{"sentence": "a"}]}, InputError, 'calibration.jsonl: item 1 has no "text"'
    ),
}  # fmt: skip


@pytest.fixture
def write_data(tmp_path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that writes rows to files and returns the options of a build."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "torn.jsonl").write_text('{"text": "a"', encoding="utf-8")
    positions = {"{folder}": tmp_path / "folder", "{torn}": tmp_path / "torn.jsonl"}

    def write(options: dict[str, Any]) -> dict[str, Any]:
        logged = dict(options)
        for name in ("data", "calibration"):
            value = options.get(name)
            if isinstance(value, list):
                logged[name] = tmp_path / f"{name}.jsonl"
                logged[name].write_text("".join(json.dumps(row) + "\n" for row in value), encoding="utf-8")
            elif value is not None:
                logged[name] = positions.get(value, value)
        return logged

    return write


@pytest.fixture
def unloadable(tiny_classifier: Any, tmp_path: Path) -> Path:
    """A model whose weights cannot be loaded."""
    model = shutil.copytree(tiny_classifier("bert"), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights")
    return model


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_rejected_before_loading_weights(
    unloadable: Path, no_leftovers: Path, write_data: Any, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from hasten.cli import main

    options, error, note = BAD_DATA[case]
    with pytest.raises(error, match=note) as caught:
        hasten.build(unloadable, no_leftovers, **write_data(options))
    assert "\n" not in str(caught.value)
    # And so does the command, which was only write_data what it would do.
    words = [f"--{name.replace('_', '-')}={_word(value)}" for name, value in write_data(options).items()]
    capsys.readouterr()
    assert main(["build", str(unloadable), "-o", str(no_leftovers), "--dry-run", *words]) == error.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {caught.value.message}")


def test_missing_column_hint_names_the_option(unloadable: Path, no_leftovers: Path, write_data: Any) -> None:
    """The hint appears only if the column is missing in all rows."""
    for name in ("data", "calibration"):
        with pytest.raises(InputError) as caught:
            hasten.build(unloadable, no_leftovers, **write_data({name: [{"sentence": "a"}]}))
        assert caught.value.hint == "--columns text=COLUMN names the column of the data"
    with pytest.raises(InputError) as caught:
        hasten.build(unloadable, no_leftovers, **write_data({"data": [*ROWS, {"label": 1}]}))
    assert caught.value.hint is None


def _word(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{a}={b}" for a, b in value.items())
    return " ".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("kind", ["regression", "similarity", "ranking"])
def test_constant_scores_are_rejected(
    tiny_classifier: Any, tiny_embedder: Any, no_leftovers: Path, write_data: Any, tmp_path: Path, kind: str
) -> None:
    model = tiny_embedder() if kind == "similarity" else tiny_classifier("bert", labels=("stars",))
    model = shutil.copytree(model, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights")
    task = "text-ranking" if kind == "ranking" else None
    with pytest.raises(InputError, match=r"correlation is undefined: the score of all rows is 2\.0"):
        hasten.build(model, no_leftovers, task=task, **write_data({"data": PAIRS}))


def test_default_labels_are_known_without_configuration(unloadable: Path, no_leftovers: Path, write_data: Any) -> None:
    config = json.loads((unloadable / "config.json").read_text())
    (unloadable / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "label" not in k}))
    with pytest.raises(InputError, match="'good', which the model does not know") as caught:
        hasten.build(unloadable, no_leftovers, **write_data({"data": ROWS}))
    assert caught.value.hint == "its labels: LABEL_0, LABEL_1"


def test_mask_labels_must_match_the_masks(tiny_model: Any, no_leftovers: Path, write_data: Any, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model("bert", "ForMaskedLM"), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="row 1 has 2 labels for 1 masks"):
        hasten.build(model, no_leftovers, **write_data({"data": [{"text": "a [MASK] day", "label": ["b", "c"]}]}))


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"data": ROWS, "max_drop": 1.0}, "3 rows cannot show a drop of 1 point: one row is 33"),
        ({"data": ROWS[:1]}, "the data has one row"),
        (
            {"data": ROWS, "calibration": [*OTHERS, {"text": ROWS[1]["text"]}]},
            "calibration and evaluation data share 1 of 3 rows: those are not used for calibration",
        ),
        (
            {"data": ROWS, "calibration": OTHERS, "variants": "onnxruntime-fp32"},
            "--calibration is not used: no variant to try is calibrated",
        ),
    ],
)
def test_data_caveats_are_logged_before_the_work(
    unloadable: Path,
    no_leftovers: Path,
    write_data: Any,
    options: dict[str, Any],
    note: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hasten.cli import main

    words = [str(unloadable), "-o", str(no_leftovers)]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in write_data(options).items()]
    capsys.readouterr()
    assert main(["build", *words, "--dry-run"]) == 0
    assert note in " ".join(capsys.readouterr().out.split())
    assert main(["build", *words, "--quiet"]) == StageError.exit_code
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.index(note) < printed.index("does not load")


def test_calibration_needs_no_labels_and_no_other_columns(tiny_classifier: Any, tmp_path: Path) -> None:
    from hasten.builder.preflight import preview
    from hasten.core.plan import Plan

    (tmp_path / "dev.csv").write_text("sentence,stars\na fine day,good\n", encoding="utf-8")
    columns = {"text": "sentence", "label": "stars"}
    for name, content in (("train.csv", "sentence\nanother\n"), ("train.jsonl", '{"sentence": "another"}\n')):
        (tmp_path / name).write_text(content, encoding="utf-8")
        plan = Plan(
            str(tiny_classifier("bert")),
            data=str(tmp_path / "dev.csv"),
            calibration=str(tmp_path / name),
            columns=columns,
        )
        assert preview(plan).notes == ("the data has one row: measurements on it mean little",)
