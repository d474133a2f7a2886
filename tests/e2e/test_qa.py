"""A fine-tuned question answering model reaches its published F1 and exact match and answers like the pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.core.progress import SilentProgress
from hasten.measure.encoder_gate import expect

Row = dict[str, Any]

VARIANT = "onnxruntime-fp32"
# F1 and exact match by number of questions: the answerable ones, and all.
ANSWERABLE = 1190
PUBLISHED = {ANSWERABLE: (0.6049, 0.4706), 1587: (0.6939, 0.5948)}
SAMPLE_ROWS = 60
RECORDED = Path(__file__).parents[1] / "contract" / "recorded" / "question_answering_xquad.json"


@pytest.fixture(scope="module")
def rows(real_data: Path) -> list[Row]:
    """All questions; the answerable ones come first."""
    lines = (real_data / "xquad_en.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@pytest.fixture(scope="module")
def sample_file(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("qa") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:SAMPLE_ROWS]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def bundle(real_models: Callable[[str], Path], quick_build: Any, sample_file: Path) -> Path:
    return quick_build(real_models("qa"), variants=[VARIANT], data=sample_file, threads=None).path


def test_verify_reproduces_the_published_scores(bundle: Path, rows: list[Row], sample_file: Path) -> None:
    """An empty answer is allowed only if some questions are unanswerable. The command line gives the same scores."""
    assert sum(bool(row["answers"]["text"]) for row in rows[:ANSWERABLE]) == ANSWERABLE
    with hasten.load(bundle, VARIANT) as answer:
        everything = expect(answer, rows, SilentProgress())
        scores = {len(rows): everything.metric}
        for count in (ANSWERABLE, SAMPLE_ROWS):
            outputs = everything.first(count, answer.session.spec.signature)
            scores[count] = expect(answer, rows[:count], SilentProgress(), outputs).metric
    for count, (f1, exact) in PUBLISHED.items():
        assert (scores[count].name, scores[count].rows) == ("F1", count)
        assert scores[count].value == pytest.approx(f1, abs=5e-4)
        assert scores[count].other_metrics["exact match"] == pytest.approx(exact, abs=5e-4)
    command = [sys.executable, "-m", "hasten", "verify", str(bundle), "--data", str(sample_file), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {entry["variant"]: entry["verdict"] for entry in json.loads(done.stdout) if entry["verdict"]}
    for metric in (verdicts[VARIANT]["metric"], verdicts[VARIANT]["reference_metric"]):
        assert metric == {
            "name": "F1",
            "rows": SAMPLE_ROWS,
            "value": scores[SAMPLE_ROWS].value,
            "other_metrics": scores[SAMPLE_ROWS].other_metrics,
        }
    assert verdicts[VARIANT]["agreement"]["flips"] == 0


def test_answers_equal_the_pipeline(bundle: Path, rows: list[Row]) -> None:
    """The pipeline's answers were recorded with transformers 4.57; questions with the same options share a batch."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    batches = defaultdict(list)
    for row_index, option_index, theirs in recorded["answers"]:
        batches[option_index].append((rows[row_index], theirs if isinstance(theirs[0], list) else [theirs]))
    compared = empty = 0
    with hasten.load(bundle, VARIANT) as answer:
        for option_index, batch in batches.items():
            answers = answer([row for row, _ in batch], **recorded["options"][option_index])
            for (row, theirs), ours in zip(batch, answers, strict=True):
                spans = ours if isinstance(ours, list) else [ours]
                assert [(span["start"], span["end"]) for span in spans] == [(start, end) for _, start, end in theirs]
                for span, (score, start, end) in zip(spans, theirs, strict=True):
                    assert span["score"] == pytest.approx(score, abs=1e-4)
                    assert span["answer"] == row["context"][start:end]
                    empty += start == end
                compared += len(theirs)
    assert compared > 400
    assert empty > 20
