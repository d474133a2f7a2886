"""A real fine-tuned model on real questions: F1 and exact match are the published ones, answers the pipeline's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import hasten

VARIANT = "onnxruntime-fp32"
RECORDED = Path(__file__).parents[1] / "contract" / "recorded" / "question_answering_xquad.json"


@pytest.fixture(scope="session")
def bundle(real_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("qa") / "bundle"
    hasten.build(real_models("qa"), target, variants=[VARIANT], bench_budget_s=1, batch_size=1, seq_len=16)
    return target


@pytest.fixture(scope="session")
def rows(real_data: Path) -> list[dict[str, object]]:
    lines = (real_data / "xquad_en.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


# Published: where some have no answer, none may be given; where all have one, one is forced.
@pytest.mark.parametrize(
    ("is_answerable", "count", "f1", "exact"), [(True, 1190, 0.6049, 0.4706), (False, 1587, 0.6939, 0.5948)]
)
def test_verify_reproduces_the_published_scores(
    bundle: Path, rows: list[dict], tmp_path: Path, is_answerable: bool, count: int, f1: float, exact: float
) -> None:
    kept = [row for row in rows if row["answers"]["text"]] if is_answerable else rows
    assert len(kept) == count
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    command = [sys.executable, "-m", "hasten", "verify", str(bundle), "--data", str(file), "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = {entry["variant"]: entry["verdict"] for entry in json.loads(done.stdout) if entry["verdict"]}
    for metric in (verdicts[VARIANT]["metric"], verdicts[VARIANT]["reference_metric"]):
        assert (metric["name"], metric["rows"]) == ("F1", count)
        assert metric["value"] == pytest.approx(f1, abs=5e-4)
        assert metric["also"]["exact match"] == pytest.approx(exact, abs=5e-4)
    assert verdicts[VARIANT]["agreement"]["flips"] == 0


def test_answers_equal_the_pipeline(bundle: Path, rows: list[dict]) -> None:
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
