"""`hasten map`: formats, columns, rejected rows, refusals and resuming, in real processes where they are killed."""

from __future__ import annotations

import csv
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from pyarrow import parquet

import hasten
from hasten.cli import main
from hasten.core.errors import InputError, PlanError, StageError, UnsupportedError
from hasten.corpus.job import run_job
from hasten.corpus.job_records import Placement
from hasten.corpus.report import MapReport
from hasten.corpus.settings import AnswerSettings, FileFormat, JobSettings, JobShard, OnLong
from support.models.tiny_encoders import CORPUS
from support.wait import wait_until

WORDS = " ".join(CORPUS).split()
Runner = Callable[..., MapReport]


def texts(count: int, seed: int = 1, max_words: int = 12) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, max_words))) for _ in range(count)]


def table(count: int, seed: int = 1) -> pa.Table:
    return pa.table({"id": range(count), "text": texts(count, seed)})


def write_json_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(output: Path) -> pa.Table:
    return pa.concat_tables(parquet.read_table(part) for part in sorted(output.glob("part-*.parquet")))


def content(output: Path) -> dict[str, bytes]:
    """Return the bytes of all output files but the report, which has times."""
    files = [*output.glob("part-*"), output / "_rejected.parquet"]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def run(classifier_bundle: Any) -> Runner:
    """Run a job with small shards."""

    def start(source: Path | str, output: Path, answers: AnswerSettings | None = None, **options: Any) -> MapReport:
        settings = {"rows_per_file": 32, "sessions": 1, "threads": 1} | options
        job = JobSettings(answers=answers or AnswerSettings(), **settings)
        return run_job(classifier_bundle.path, str(source), output, job)

    return start


@pytest.fixture(scope="module")
def expected(classifier_bundle: Any) -> Callable[[list[str]], list[str]]:
    """Return the labels of texts."""
    predictor = hasten.load(classifier_bundle.path, threads=1)
    return lambda rows: [answer["label"] for answer in predictor(rows)]


FORMATS = ("parquet", "arrow", "stream.arrow", "jsonl", "json", "csv", "tsv")


def write(path: Path, rows: pa.Table) -> None:
    kind = path.name.partition(".")[2]
    if kind == "parquet":
        parquet.write_table(rows, path, row_group_size=20)
    elif kind.endswith("arrow"):
        opener = pyarrow.ipc.new_stream if kind.startswith("stream") else pyarrow.ipc.new_file
        with opener(str(path), rows.schema) as writer:
            writer.write_table(rows, max_chunksize=25)
    elif kind == "jsonl":
        write_json_lines(path, rows.to_pylist())
    elif kind == "json":
        path.write_text(json.dumps(rows.to_pylist()))
    else:
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream, delimiter="," if kind == "csv" else "\t")
            writer.writerow(rows.column_names)
            writer.writerows(row.values() for row in rows.to_pylist())


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_answered_in_order(run: Runner, expected: Any, tmp_path: Path, kind: str) -> None:
    rows = table(70)
    write(tmp_path / f"rows.{kind}", rows)
    report = run(tmp_path / f"rows.{kind}", tmp_path / "out")
    result = read(tmp_path / "out")
    assert report.is_complete
    assert (report.rows, report.files) == (70, 3)
    assert result["text"].to_pylist() == rows["text"].to_pylist()
    # The cells of a table of text are kept as text.
    assert result["id"].to_pylist() == [str(row) if kind in ("csv", "tsv") else row for row in range(70)]
    assert result["label"].to_pylist() == expected(rows["text"].to_pylist())


def test_dataset_and_json_lines_output(run: Runner, expected: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = table(40)
    datasets.DatasetDict({"train": datasets.Dataset(rows)}).save_to_disk(tmp_path / "saved")
    run(f"datasets:{tmp_path / 'saved'}:train", tmp_path / "out", file_format=FileFormat.JSONL)
    parts = sorted((tmp_path / "out").glob("part-*"))
    lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(40))
    assert [line["label"] for line in lines] == expected(rows["text"].to_pylist())


def test_directory_with_filter_and_columns(run: Runner, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, seed in (("b", 2), ("a", 1)):
        rows = table(40, seed).rename_columns(["id", "body"]).append_column("lang", pa.array(["en", "de"] * 20))
        parquet.write_table(rows, tmp_path / "in" / f"{name}.parquet")
    (tmp_path / "in" / "notes.txt").write_text("no data")
    answers = AnswerSettings(columns={"text": "body"}, where="lang = 'en' and id >= 10", drop=("lang",), prefix="my_")
    run(tmp_path / "in", tmp_path / "out", answers)
    result = read(tmp_path / "out")
    ids = list(range(10, 40, 2))
    assert result.column_names == ["id", "body", "my_label", "my_score"]
    assert result["id"].to_pylist() == ids * 2
    bodies = [texts(40, seed)[index] for seed in (1, 2) for index in ids]
    assert result["body"].to_pylist() == bodies
    assert result["my_label"].to_pylist() == expected(bodies)


def test_bad_rows_are_rejected_with_their_reason(run: Runner, expected: Any, tmp_path: Path) -> None:
    good = [{"id": index, "text": text} for index, text in enumerate(texts(40))]
    bad: dict[int, Any] = {
        3: {"id": 3, "text": None},
        5: {"id": 5, "text": 17},
        8: "{not json",
        11: {"id": "x", "text": "rain"},
        20: {"id": 20, "text": "  "},
        21: {"id": 21, "text": "rain " * 300},
        22: {"id": 22, "text": "rain " * 3_000_000},
        34: {"id": 34, "text": "\ud800"},
    }
    rows = [bad.get(index, row) for index, row in enumerate(good)]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    answers = AnswerSettings(on_long=OnLong.ERROR)
    report = run(tmp_path / "rows.jsonl", tmp_path / "out", answers)
    kept = [row["text"] for index, row in enumerate(good) if index not in bad]
    assert read(tmp_path / "out")["text"].to_pylist() == kept
    assert read(tmp_path / "out")["label"].to_pylist() == expected(kept)
    rejected = parquet.read_table(tmp_path / "out" / "_rejected.parquet").to_pylist()
    assert report.total_rejected == len(bad)
    assert [row["row"] for row in rejected] == list(bad)
    reasons = {row["row"]: row["reason"] for row in rejected}
    for row, reason in {
        3: "text is null",
        5: "column 'text' is 17, not string",
        8: "is not JSON",
        11: "column 'id' is 'x', not int64",
        20: "text is empty",
        21: "longer than the model's limit of 64 tokens",
        22: "15000000 bytes, more than --max-row",
        34: "column 'text' is '\\ud800', not string",
    }.items():
        assert reason in reasons[row]


def test_too_many_bad_rows_stop_a_job_that_can_continue(run: Runner, tmp_path: Path) -> None:
    rows = [{"text": text} for text in texts(90)]
    rows[70] = rows[71] = {"text": ""}
    write_json_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match=r"2 rows were rejected, more than --max-bad 1; the last is row 71 .* empty"):
        run(tmp_path / "rows.jsonl", tmp_path / "out", max_bad=1)
    assert len(list((tmp_path / "out").glob("part-*"))) == 2
    report = run(tmp_path / "rows.jsonl", tmp_path / "out", max_bad=2)
    assert (report.rows, report.total_rows, report.total_rejected) == (24, 88, 2)


def test_other_options_inputs_and_bundles_are_refused(run: Runner, other_bundle: Any, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.parquet", tmp_path / "out"
    parquet.write_table(table(40), source)
    run(source, output)
    with pytest.raises(PlanError, match='another job: on_long was "truncate", is "error"'):
        run(source, output, AnswerSettings(on_long=OnLong.ERROR))
    with pytest.raises(PlanError, match="another job: bundle was"):
        run_job(other_bundle.path, str(source), output, JobSettings(rows_per_file=32))
    parquet.write_table(table(41), source)
    with pytest.raises(PlanError, match=r"inputs of .* have changed: .*rows.parquet is not the same"):
        run(source, output)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("do not touch")
    with pytest.raises(PlanError, match="is not empty and holds no job"):
        run(source, tmp_path / "full")


def test_differing_and_unreadable_inputs_are_one_line_errors(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    parquet.write_table(table(3), folder / "a.parquet")
    parquet.write_table(pa.table({"id": [1], "text": [2]}), folder / "b.parquet")
    with pytest.raises(InputError, match=r"column 'text' is int64 in .*b.parquet and string in .*a.parquet"):
        run(folder, tmp_path / "out")
    parquet.write_table(pa.table({"id": [1]}), folder / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet has no column 'text', which .*a.parquet has"):
        run(folder, tmp_path / "out")
    (folder / "b.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"b.parquet is not a Parquet file"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="no input at"):
        run(tmp_path / "*.csv", tmp_path / "out")


def test_input_that_is_damaged_in_the_middle_leaves_a_job_that_can_continue(run: Runner, tmp_path: Path) -> None:
    source = tmp_path / "rows.parquet"
    parquet.write_table(table(96), source, row_group_size=32, compression="none")
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 3] + bytes(400) + whole[len(whole) // 3 + 400 :])
    with pytest.raises(InputError, match=r"rows.parquet, after row \d+, cannot be read"):
        run(source, tmp_path / "out")
    source.write_bytes(whole)
    run(source, tmp_path / "out")
    assert read(tmp_path / "out")["id"].to_pylist() == list(range(96))


def test_file_of_which_nothing_was_answered_may_be_repaired(run: Runner, tmp_path: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    write(folder / "a.json", table(40))
    # Beyond the rows that decide on the columns, but among the first that are read together.
    (folder / "b.json").write_text("[" + '{"id": 0, "text": "rain"}, ' * 1005 + "rain]")
    with pytest.raises(InputError, match=r"b.json, item 1006 is not JSON"):
        run(folder, output)
    assert complete_files(output) == 2
    write(folder / "b.json", table(50, seed=2))
    assert run(folder, output).total_rows == 90
    assert run(folder, output).rows == 0
    write(folder / "b.json", table(51, seed=2))
    with pytest.raises(PlanError, match=r"b.json is not the same"):
        run(folder, output)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_zero_rows_make_an_empty_output_with_columns(run: Runner, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / f"a.{kind}", table(0))
    if kind == "jsonl":
        with pytest.raises(PlanError, match="has none of the columns that text-classification reads"):
            run(folder, tmp_path / "out")
        (folder / "b.jsonl").write_text('{"id": null, "text": ""}\n')
        run(folder, tmp_path / "out")
        assert read(tmp_path / "out").num_rows == 0
        return
    report = run(folder, tmp_path / "out")
    assert report.is_complete
    assert read(tmp_path / "out").schema.names == ["id", "text", "label", "score"]
    assert read(tmp_path / "out").num_rows == 0


def test_existing_keys_are_skipped(run: Runner, tmp_path: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    parquet.write_table(table(40), folder / "a.parquet")
    run(folder, output)
    before = content(output)
    parquet.write_table(table(60).slice(30), folder / "b.parquet")
    with pytest.raises(PlanError, match=r"b.parquet is new"):
        run(folder, output)
    report = run(folder, output, skip_existing="id")
    assert (report.rows, report.total_rows) == (20, 60)
    assert sorted(read(output)["id"].to_pylist()) == list(range(60))
    assert before.items() <= content(output).items()
    assert run(folder, output, skip_existing="id").rows == 0


def test_processes_share_the_work(run: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", table(100))
    write(folder / "b.jsonl", table(30, seed=2))
    first = run(folder, tmp_path / "out", shard=JobShard(0, 2))
    assert not first.is_complete
    second = run(folder, tmp_path / "out", shard=JobShard(1, 2))
    assert second.is_complete
    assert first.rows + second.rows == second.total_rows == 130
    run(folder, tmp_path / "alone")
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_number_of_sessions_leaves_the_output_unchanged(run: Runner, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", table(300))
    run(tmp_path / "rows.jsonl", tmp_path / "one")
    run(tmp_path / "rows.jsonl", tmp_path / "three", sessions=3)
    assert content(tmp_path / "one") == content(tmp_path / "three")


def test_measured_number_of_sessions_is_kept(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rows.jsonl", table(70))
    monkeypatch.setattr("hasten.corpus.placement._MIN_ROWS", 1)
    for module in ("placement", "job"):
        monkeypatch.setattr(f"hasten.corpus.{module}.usable_cores", lambda: 2)
    first = run(tmp_path / "rows.jsonl", tmp_path / "out", sessions=None, threads=None, shard=JobShard(0, 2))
    assert first.placement in (Placement(1, 2), Placement(2, 1))
    stored = json.loads((tmp_path / "out" / "_state" / "job.json").read_bytes())["placement"]
    assert stored == {"sessions": first.placement.sessions, "threads": first.placement.threads}
    monkeypatch.setattr("hasten.corpus.job.measured_placement", None)
    second = run(tmp_path / "rows.jsonl", tmp_path / "out", sessions=None, threads=None, shard=JobShard(1, 2))
    assert second.placement == first.placement
    assert second.is_complete


def test_several_sessions_of_a_decoder_are_refused(generator_bundle: Any, tmp_path: Path) -> None:
    parquet.write_table(table(2), tmp_path / "rows.parquet")
    with pytest.raises(PlanError, match="--sessions 2 is for encoders on CPUs"):
        run_job(generator_bundle.path, str(tmp_path / "rows.parquet"), tmp_path / "out", JobSettings(sessions=2))


def test_generated_text_is_the_same_after_a_resume(generator_bundle: Any, tmp_path: Path) -> None:
    parquet.write_table(table(20), tmp_path / "rows.parquet")

    def run_half(output: Path, **options: Any) -> MapReport:
        answers = AnswerSettings(options={"max_tokens": 3, "temperature": 0.8, "seed": 1, "return_full_text": False})
        settings = JobSettings(answers, rows_per_file=8, threads=1, **options)
        return run_job(generator_bundle.path, str(tmp_path / "rows.parquet"), output, settings)

    run_half(tmp_path / "whole")
    run_half(tmp_path / "halves", shard=JobShard(1, 2))
    assert run_half(tmp_path / "halves").is_complete
    assert content(tmp_path / "halves") == content(tmp_path / "whole")
    assert all(read(tmp_path / "whole")["generated_text"].to_pylist())
    unseeded = JobSettings(AnswerSettings(options={"temperature": 0.8}))
    with pytest.raises(PlanError, match="sampled text differs from run to run"):
        run_job(generator_bundle.path, str(tmp_path / "rows.parquet"), tmp_path / "out", unseeded)


def test_missing_pyarrow_is_one_line_with_a_hint(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=r"hasten map needs the package 'pyarrow'.*pip install 'hasten\[data\]'"):
        run(tmp_path / "rows.jsonl", tmp_path / "out")


def test_interrupted_job_ends_soon_and_continues(classifier_bundle: Any, tmp_path: Path) -> None:
    source, output = write_json_lines(tmp_path / "rows.jsonl", table(3000).to_pylist()), tmp_path / "out"
    arguments = command(Path(classifier_bundle.path), source, output)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: complete_files(output) >= 2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted: complete files are kept, and the same command continues after them\n"
    assert not list((output / "_state").glob("temporary*"))
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)
    assert read(output)["id"].to_pylist() == list(range(3000))


def test_proof_is_in_the_footer_and_the_report(run: Runner, classifier_bundle: Any, tmp_path: Path) -> None:
    parquet.write_table(table(10), tmp_path / "rows.parquet")
    run(tmp_path / "rows.parquet", tmp_path / "out", price_per_hour=2.0)
    report = json.loads((tmp_path / "out" / "_hasten.json").read_bytes())
    (part,) = (tmp_path / "out").glob("part-*.parquet")
    footer = json.loads(parquet.ParquetFile(part).metadata.metadata[b"hasten"])
    assert footer["bundle"] == report["proof"]["bundle"] == classifier_bundle.manifest.digest
    assert footer["agreement"]["passed"]
    assert footer["agreement"]["rows"] > 0
    assert (footer["rows"], footer["rejected"]) == (10, 0)
    assert report["cost_per_million_rows"] == pytest.approx(2 / 3600 / report["rows_per_s"] * 1e6, rel=1e-2)


def test_full_disk_is_one_line_and_the_job_continues(run: Runner, tmp_path: Path) -> None:
    """Files are limited to a size that the second shard exceeds."""
    rows = pa.table({"text": texts(64), "payload": [random.Random(row).randbytes(row * 400) for row in range(64)]})
    parquet.write_table(rows, tmp_path / "rows.parquet")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))
    try:
        with pytest.raises(StageError, match=r"part-000-00000-00001.parquet failed: File too large"):
            run(tmp_path / "rows.parquet", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run(tmp_path / "rows.parquet", tmp_path / "out").rows == 32
    assert read(tmp_path / "out").select(["text", "payload"]).equals(rows)


def test_answer_columns_that_the_input_has_are_refused(classifier_bundle: Any, tmp_path: Path, capsys: Any) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [{"text": "rain", "label": "good"}])
    command = ["map", str(classifier_bundle.path), str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out"), "-q"]
    assert main(command) == 2
    assert "--drop label, or --prefix" in capsys.readouterr().err
    assert main([*command, "--drop", "label", "-O", "top_k=2", "--threads", "1"]) == 0
    assert "1 rows in" in capsys.readouterr().out
    assert len(read(tmp_path / "out")["labels"][0].as_py()) == 2


def command(bundle: Path, source: Path, output: Path) -> list[str]:
    options = ["--rows-per-file", "64", "--sessions", "1", "--threads", "1", "-q"]
    return [sys.executable, "-m", "hasten", "map", str(bundle), str(source), "-o", str(output), *options]


def complete_files(output: Path) -> int:
    return len(list(output.glob("part-*")))


def kill_after(files: int, arguments: list[str], output: Path) -> None:
    """Kill a job once it has completed this many files; it may have ended before."""
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: complete_files(output) >= files or process.poll() is not None)
        os.kill(process.pid, signal.SIGKILL)


def check_killed_job(bundle: Path, folder: Path, rows: int, kills: int) -> None:
    source = write_json_lines(folder / "rows.jsonl", [*table(rows).to_pylist(), {"id": -1, "text": ""}])
    subprocess.run(command(bundle, source, folder / "whole"), check=True, stdout=subprocess.DEVNULL)
    files = complete_files(folder / "whole")
    generator = random.Random(7)
    for step in range(1, kills + 1):
        before = complete_files(folder / "killed")
        kill_after(
            before + generator.randint(1, max(1, files // (kills + 1))),
            command(bundle, source, folder / "killed"),
            folder / "killed",
        )
        assert before <= complete_files(folder / "killed") < files, f"kill {step} came too late"
    subprocess.run(command(bundle, source, folder / "killed"), check=True, stdout=subprocess.DEVNULL)
    assert content(folder / "killed") == content(folder / "whole")
    assert read(folder / "killed")["id"].to_pylist() == list(range(rows))


def test_killed_job_continues_to_the_same_bytes(classifier_bundle: Any, tmp_path: Path) -> None:
    check_killed_job(Path(classifier_bundle.path), tmp_path, rows=3000, kills=1)


@pytest.mark.slow
def test_job_killed_ten_times_continues_to_the_same_bytes(classifier_bundle: Any, tmp_path: Path) -> None:
    check_killed_job(Path(classifier_bundle.path), tmp_path, rows=20_000, kills=10)
