"""Data files and metrics on the command line: the same rows in any format, judged by the requested metric."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics

import hasten
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.errors import PlanError

ORT_FP32 = "onnxruntime-fp32"
LABELS = ("bad", "fair", "good")
# The same classes with other numbers, spelled as another party would.
SWAPPED = ("Good", "Bad", "Fair")

Files = dict[str, str]


@pytest.fixture(scope="module")
def sentences(corpus: tuple[str, ...]) -> list[str]:
    """Each line and its two halves, some with characters that a table must quote."""
    halves = [half for text in corpus for half in (text[: len(text) // 2].strip(), text[len(text) // 2 :].strip())]
    return [*corpus, *halves, 'she said "no", twice', "one line\nand another", "[1, 2]", "2024"]


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Callable[..., Path], quick_build: Callable[..., Bundle]) -> Path:
    return quick_build(tiny_classifier("bert", labels=LABELS), variants=[ORT_FP32]).path


@pytest.fixture(scope="module")
def labels(bundle: Path, sentences: list[str]) -> list[str]:
    """The model's answers with one of four replaced, so that no metric is perfect and shifted rows are noticed."""
    with hasten.load(bundle, threads=1) as classify:
        answers = [answer["label"] for answer in classify(sentences)]
    return ["fair" if place % 4 == 0 else answer for place, answer in enumerate(answers)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, sentences: list[str], labels: list[str]) -> Files:
    """The same labelled sentences in every file format; formats with classes number them differently."""
    import datasets

    place = tmp_path_factory.mktemp("files")
    rows = [{"sentence": text, "stars": label} for text, label in zip(sentences, labels, strict=True)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "rows.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for name, delimiter, as_number in (("rows.csv", ",", False), ("rows.tsv", "\t", False), ("numbers.csv", ",", True)):
        with (place / name).open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, delimiter=delimiter)
            writer.writerow(("sentence", "stars"))
            writer.writerows(
                (row["sentence"], LABELS.index(row["stars"]) if as_number else row["stars"]) for row in rows
            )
    datasets.disable_progress_bars()
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "stars": datasets.ClassLabel(names=list(SWAPPED))}
    )
    classes = [SWAPPED.index(label.title()) for label in labels]
    dataset = datasets.Dataset.from_dict({"sentence": sentences, "stars": classes}, features=features)
    dataset.to_parquet(place / "rows.parquet")
    datasets.DatasetDict(train=dataset.select([0]), test=dataset).save_to_disk(place / "saved")
    (place / "folder").mkdir()
    dataset.to_parquet(place / "folder" / "test-00000-of-00001.parquet")
    datasets.enable_progress_bars()
    return {
        **{name: str(place / name) for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "numbers.csv")},
        **{name: str(place / name) for name in ("rows.parquet", "folder", "saved/test")},
        "datasets": f"datasets:{place / 'saved'}:test",
    }


KINDS = ("rows.jsonl", "rows.json", "rows.csv", "rows.tsv", "numbers.csv", "rows.parquet", "folder", "saved/test",
         "datasets")  # fmt: skip
COLUMNS = ["--columns", "text=sentence,label=stars"]


@contextmanager
def stdin_from(file: str) -> Iterator[None]:
    kept, source = os.dup(0), os.open(file, os.O_RDONLY)
    os.dup2(source, 0)
    os.close(source)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def verdict(printed: str) -> dict[str, Any]:
    """Return the verdict of the variant; that of the graph, on the stored rows, comes first."""
    result: dict[str, Any] = json.loads(printed)[-1]["verdict"]
    assert result["variant"] == ORT_FP32
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_all_file_formats_give_the_same_verdict(
    bundle: Path,
    files: Files,
    sentences: list[str],
    labels: list[str],
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with hasten.load(bundle, threads=1) as classify:
        answers = [answer["label"] for answer in classify(sentences)]
    assert main(["verify", str(bundle), "--data", files[kind], *COLUMNS, "--json", "--quiet", "--threads", "1"]) == 0
    metric = verdict(capsys.readouterr().out)["metric"]
    assert (metric["name"], metric["rows"]) == ("accuracy", len(sentences))
    assert metric["value"] == pytest.approx(sklearn.metrics.accuracy_score(labels, answers))
    assert 0.5 < metric["value"] < 1
    for average in ("macro", "micro"):
        expected = sklearn.metrics.f1_score(labels, answers, average=average)
        assert metric["other_metrics"][f"{average} F1"] == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_file_formats_give_the_same_answers(
    bundle: Path, files: Files, sentences: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with hasten.load(bundle, threads=1) as classify:
        expected = classify(sentences)
    words = ["run", str(bundle), "--columns", "text=sentence", "--threads", "1"]
    assert main([*words, "--input", files[kind]]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
    assert [answer["score"] for answer in answers] == pytest.approx([answer["score"] for answer in expected], abs=1e-5)


def test_classes_without_known_names_are_matched_by_number_and_logged(
    tiny_classifier: Callable[..., Path],
    quick_build: Callable[..., Bundle],
    files: Files,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unnamed = quick_build(tiny_classifier("bert", labels=("LABEL_0", "LABEL_1", "LABEL_2")), variants=[ORT_FP32]).path
    words = ["verify", str(unnamed), "--data", files["rows.parquet"], *COLUMNS, "--json", "--quiet", "--threads", "1"]
    assert main(words) == 0
    printed = capsys.readouterr()
    message = " ".join(printed.err.split())
    assert "(Good, Bad, Fair) match none of the model's labels (LABEL_0, LABEL_1, LABEL_2)" in message
    assert "they are matched by number" in message
    assert verdict(printed.out)["metric"]["rows"] > 0


def test_tables_show_every_metric(bundle: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(bundle), "--data", files["rows.csv"], *COLUMNS, "--quiet", "--threads", "1"]
    assert main([*words, "--json"]) == 0
    metric = verdict(capsys.readouterr().out)["metric"]
    assert main(words) == 0
    table = capsys.readouterr().out.split("metrics on ")[1].splitlines()
    assert table[1].split() == ["variant", "accuracy", "macro", "F1", "micro", "F1"]
    shown = f"{metric['value']:.4f} {metric['other_metrics']['macro F1']:.4f} {metric['other_metrics']['micro F1']:.4f}"
    assert " ".join(table[2].split()) == f"reference {shown}"
    assert " ".join(table[3].split()) == f"{ORT_FP32} {shown}"


def test_gate_uses_and_stores_the_requested_metric(
    tiny_classifier: Callable[..., Path], quick_build: Callable[..., Bundle], files: Files, tmp_path: Path
) -> None:
    """The data comes through a pipe, which can be read only once."""
    from hasten.bundle import open_bundle

    with stdin_from(files["rows.jsonl"]):
        built = quick_build(
            tiny_classifier("bert", labels=LABELS),
            tmp_path / "bundle",
            variants=[ORT_FP32, "onnxruntime-int8"],
            keep="all",
            data="-",
            columns={"text": "sentence", "label": "stars"},
            metric="macro-f1",
            max_drop=100.0,
        )
    assert built.report.plan.columns == {"text": "sentence", "label": "stars"}
    rows = {row.variant: row.verdict for row in built.report.candidates}
    assert rows["onnxruntime-int8"].metric.name == "macro F1"
    assert rows["onnxruntime-int8"].reason.startswith("macro F1 drop")
    assert set(rows["onnxruntime-int8"].metric.other_metrics) == {"accuracy", "micro F1"}
    assert open_bundle(built.path).manifest.gate.metric == "macro-f1"


def test_verify_defaults_to_the_metric_of_the_build(
    tiny_classifier: Callable[..., Path],
    quick_build: Callable[..., Bundle],
    files: Files,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_classifier("bert", labels=LABELS)
    columns = {"text": "sentence", "label": "stars"}
    built = quick_build(model, variants=[ORT_FP32], data=files["rows.csv"], columns=columns, metric="macro F1")
    words = ["verify", str(built.path), "--json", "--quiet", "--threads", "1"]
    assert main(words) == 0
    assert verdict(capsys.readouterr().out)["metric"]["name"] == "macro F1"
    assert main([*words, "--metric", "accuracy"]) == 0
    assert verdict(capsys.readouterr().out)["metric"]["name"] == "accuracy"


def test_unknown_metric_is_rejected_before_the_build(
    tiny_classifier: Callable[..., Path], quick_build: Callable[..., Bundle], files: Files, no_leftovers: Path
) -> None:
    options = {"data": files["rows.csv"], "columns": {"text": "sentence", "label": "stars"}, "metric": "rouge"}
    with pytest.raises(PlanError, match="no metric 'rouge'") as caught:
        quick_build(tiny_classifier("bert", labels=LABELS), no_leftovers, variants=[ORT_FP32], **options)
    assert caught.value.hint == "--metric takes one of: accuracy, macro F1, micro F1"


def test_tags_are_read_from_tables_and_datasets(
    tiny_tagger: Callable[..., Path],
    quick_build: Callable[..., Bundle],
    corpus: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import datasets

    words = [text.split() for text in corpus]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in words), encoding="utf-8")
    built = quick_build(tiny_tagger("bert"), variants=[ORT_FP32], data=texts).path
    names = ("B-LOC", "I-LOC", "B-PER", "I-PER", "O")
    with hasten.load(built, threads=1) as tag:
        answers = [
            {token["start"]: token["entity"] for token in row} for row in tag([{"tokens": row} for row in words])
        ]
    starts = [[len(" ".join([*row[:place], ""])) for place in range(len(row))] for row in words]
    # Of its own answers one in five is replaced: numbers that meant other names would spoil the rest.
    tags = [
        ["B-PER" if place % 5 == 0 else result.get(start, "O") for place, start in enumerate(row_tags)]
        for row_tags, result in zip(starts, answers, strict=True)
    ]
    with (tmp_path / "rows.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(("tokens", "ner_tags"))
        writer.writerows((json.dumps(row), json.dumps(each)) for row, each in zip(words, tags, strict=True))
    features = datasets.Features(
        {
            "tokens": datasets.List(datasets.Value("string")),
            "ner_tags": datasets.List(datasets.ClassLabel(names=[*names])),
        }
    )
    dataset = datasets.Dataset.from_dict(
        {"tokens": words, "ner_tags": [[names.index(tag) for tag in row] for row in tags]}, features=features
    )
    datasets.disable_progress_bars()
    dataset.save_to_disk(tmp_path / "saved")
    datasets.enable_progress_bars()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"tokens": a, "tags": b}) + "\n" for a, b in zip(words, tags, strict=True)), encoding="utf-8"
    )
    result = []
    for name, columns in (("rows.jsonl", []), ("rows.csv", ["--columns", "tags=ner_tags"]),
                          ("saved", ["--columns", "tags=ner_tags"])):  # fmt: skip
        command = [
            "verify",
            str(built),
            "--data",
            str(tmp_path / name),
            *columns,
            "--json",
            "--quiet",
            "--threads",
            "1",
        ]
        assert main(command) == 0
        result.append(verdict(capsys.readouterr().out)["metric"])
    assert result[0]["name"] == "entity F1"
    assert set(result[0]["other_metrics"]) == {"precision", "recall"}
    assert result[0]["rows"] == len(corpus)
    assert 0.4 < result[0]["value"] < 1
    assert result[0] == result[1] == result[2]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["build", "{model}", "--columns", "text=a"], 2, "--columns renames the columns of a data file"),
        (["build", "{model}", "--metric", "macro-f1"], 2, "--metric needs labelled data"),
        (["build", "{model}", "--data", "{rows.csv}", "--columns", "text"], 2, "is not NAME=COLUMN"),
        (["build", "{model}", "--data", "{rows.csv}", "--columns", "text=x"], 2, "its columns: sentence, stars"),
        (["build", "{model}", "--data", "{rows.csv}"], 2, 'has no "text"; its fields are: sentence, stars'),
        (["build", "{model}", "--data", "datasets:glue:sst2:validation"], 4, "hub cannot be reached"),
        (["build", "{model}", "--data", "glue"], 2, "datasets:NAME:SPLIT"),
        (["verify", "{bundle}", "--columns", "text=a"], 2, "--columns needs a data file"),
        (["verify", "{bundle}", "--data", "{rows.parquet}", "--columns", "text=stares"], 2, "did you mean 'stars'"),
        (["verify", "{bundle}", "--data", "{rows.csv}", "--columns", "text=sentence,label=stars", "--metric", "bleu",
          "--quiet"], 2, "--metric takes one of: accuracy, macro F1, micro F1"),
        (["verify", "{bundle}", "--metric", "macro-f1", "--quiet"], 2, "--metric needs labels"),
        (["run", "{bundle}", "a text", "--columns", "text=a"], 2, "--columns needs a file"),
        (["run", "{bundle}", "--input", "{rows.csv}", "--columns", "text=nothing"], 2, "no column 'nothing'"),
        (["run", "{bundle}", "--input", "{rows.csv}", "--columns", "txt=sentence"], 2, "did you mean 'text'"),
        (["verify", "{bundle}", "--data", "{rows.csv}", "--columns", "txt=sentence"], 2, "did you mean 'text'"),
        (["run", "{bundle}", "--input", "rows.docx"], 2, "no data file"),
    ],
)  # fmt: skip
def test_usage_error_is_a_one_line_error(
    words: list[str],
    code: int,
    message: str,
    bundle: Path,
    files: Files,
    tiny_classifier: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    indices = {"bundle": str(bundle), "model": str(tiny_classifier("bert", labels=LABELS)), **files}
    written = [
        next((word.replace(f"{{{name}}}", path) for name, path in indices.items() if f"{{{name}}}" in word), word)
        for word in words
    ]
    assert main(written) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0].startswith("error: ")
    assert message in printed.err
    assert all(line.startswith("  hint: ") for line in lines[1:])
