"""A real fine-tuned model on real questions: F1 and exact match are the published ones, answers the pipeline's."""

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
from hasten.core.progress import Silent
from hasten.measure.verify import expect

Row = dict[str, Any]

VARIANT = "onnxruntime-fp32"
# F1 and exact match by number of questions: those that have an answer, and all.
ANSWERABLE = 1190
PUBLISHED = {ANSWERABLE: (0.6049, 0.4706), 1587: (0.6939, 0.5948)}
FEW = 60
RECORDED = Path(__file__).parents[1] / "contract" / "recorded" / "question_answering_xquad.json"


@pytest.fixture(scope="module")
def rows(real_data: Path) -> list[Row]:
    """Those that have an answer come first."""
    lines = (real_data / "xquad_en.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@pytest.fixture(scope="module")
def few(rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("qa") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:FEW]), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def bundle(real_models: Callable[[str], Path], quick_build: Any, few: Path) -> Path:
    return quick_build(real_models("qa"), variants=[VARIANT], data=few, threads=None).path


def test_verify_reproduces_the_published_scores(bundle: Path, rows: list[Row], few: Path) -> None:
    """Where some have no answer, none may be given; where all have one, one is forced. The command finds the same."""
    assert sum(bool(row["answers"]["text"]) for row in rows[:ANSWERABLE]) == ANSWERABLE
    with hasten.load(bundle, VARIANT) as answer:
        everything = expect(answer, rows, Silent())
        scores = {len(rows): everything.metric}
        for count in (ANSWERABLE, FEW):
            outputs = everything.first(count, answer.session.spec.signature)
            scores[count] = expect(answer, rows[:count], Silent(), outputs).metric
    for count, (f1, exact) in PUBLISHED.items():
        assert (scores[count].name, scores[count].rows) == ("F1", count)
        assert scores[count].value == pytest.approx(f1, abs=5e-4)
        assert scores[count].also["exact match"] == pytest.approx(exact, abs=5e-4)
    command = [sys.executable, "-m", "hasten", "verify", str(bundle), "--data", str(few), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {entry["variant"]: entry["verdict"] for entry in json.loads(done.stdout) if entry["verdict"]}
    for metric in (verdicts[VARIANT]["metric"], verdicts[VARIANT]["reference_metric"]):
        assert metric == {"name": "F1", "rows": FEW, "value": scores[FEW].value, "also": scores[FEW].also}
    assert verdicts[VARIANT]["agreement"]["flips"] == 0


def test_answers_equal_the_pipeline(bundle: Path, rows: list[Row]) -> None:
    """Those recorded with transformers 4.57, the questions of each set of options asked together."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    batches = defaultdict(list)
    for place, which, theirs in recorded["answers"]:
        batches[which].append((rows[place], theirs if isinstance(theirs[0], list) else [theirs]))
    compared = empty = 0
    with hasten.load(bundle, VARIANT) as answer:
        for which, batch in batches.items():
            answers = answer([row for row, _ in batch], **recorded["options"][which])
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
