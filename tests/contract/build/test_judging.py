"""Test verdicts on real variants: the interval of a drop, and dynamic int8 at several batch sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle, open_bundle
from hasten.cli import main
from hasten.core.batching import batch_in_order

INT8, FP32 = "onnxruntime-int8", "onnxruntime-fp32"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory, corpus: tuple[str, ...]) -> Path:
    file = tmp_path_factory.mktemp("data") / "labelled.jsonl"
    texts = [" ".join(corpus[index : index + 1 + index % 3]) for index in range(len(corpus))]
    labels = ("bad", "fair", "good")
    rows = [{"text": text, "label": labels[index % 3]} for index, text in enumerate(texts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def built(tiny_classifier: Callable[..., Path], quick_build: Callable[..., Bundle], labelled: Path) -> Bundle:
    model = tiny_classifier("bert")
    gate = {"max_drop": 100.0, "batch_size": (1, 2, 4)}
    return quick_build(model, variants=[FP32, INT8], keep="all", data=labelled, **gate)


def verdicts(bundle: Bundle) -> dict[str, Any]:
    return {candidate.variant: candidate.verdict for candidate in bundle.report.candidates if candidate.verdict}


def test_dynamic_int8_is_judged_at_every_batch_size(built: Bundle, labelled: Path) -> None:
    entries = {entry.name: entry.depends_on_batch for entry in open_bundle(built.path).manifest.variants}
    assert entries == {INT8: True, FP32: False}
    judged = verdicts(built)
    assert judged[FP32].by_batch == ()
    assert [entry.size for entry in judged[INT8].by_batch] == [1, 2, 4]
    assert judged[INT8].agreement.value == min(entry.agreement for entry in judged[INT8].by_batch)
    assert judged[INT8].drop == pytest.approx(max(entry.drop for entry in judged[INT8].by_batch))
    assert open_bundle(built.path).report == built.report
    # The batch sizes differ, and the largest error is that of the worst of them.
    rows = [json.loads(line) for line in labelled.read_text().splitlines()]
    with (
        hasten.load(built.path, INT8, threads=1) as predictor,
        hasten.load(built.path, FP32, threads=1) as exact_predictor,
    ):
        encoded = predictor.encode(rows)
        answers = [predictor.outputs(encoded, groups=batch_in_order(len(rows), size))["logits"] for size in (1, 2, 4)]
        exact = exact_predictor.outputs(encoded)["logits"]
    assert not np.allclose(answers[0], answers[2], atol=1e-6)
    errors = [float(np.abs(answer - exact).max()) for answer in answers]
    assert min(abs(judged[INT8].agreement.max_error - error) for error in errors) < 1e-4


def test_verify_judges_every_batch_size_too(built: Bundle, labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(built.path), "--data", str(labelled), "--quiet", "--threads", "1"]
    assert main([*words, "--json"]) == 0
    judged = {row["variant"]: row["verdict"] for row in json.loads(capsys.readouterr().out)}
    assert [entry["size"] for entry in judged[INT8]["by_batch"]] == [1, 2, 4]
    assert (judged["graph"]["by_batch"], judged[FP32]["by_batch"]) == ([], [])
    interval = judged[INT8]["drop_interval"]
    assert interval["low"] <= interval["value"] <= interval["high"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "agreement by batch size" in table
    assert "at batch" in " ".join(table.split())


def test_verify_notes_a_drop_that_the_rows_cannot_show(
    built: Bundle, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = len(labelled.read_text().splitlines())
    words = ["verify", str(built.path), "--data", str(labelled), "--quiet", "--threads", "1", "--max-drop", "0.01"]
    main([*words, "--variant", FP32])
    message = " ".join(capsys.readouterr().err.split())
    assert f"{rows} rows cannot show a drop of 0.01 point: one row is" in message


def test_report_notes_a_drop_that_the_rows_cannot_show(
    tiny_classifier: Callable[..., Path], quick_build: Callable[..., Bundle], labelled: Path, tmp_path: Path
) -> None:
    rows = labelled.read_text().splitlines()
    (tmp_path / "train.jsonl").write_text(rows[0] + '\n{"text": "another"}\n', encoding="utf-8")
    options = {"data": labelled, "calibration": tmp_path / "train.jsonl", "max_drop": 0.5}
    report = quick_build(tiny_classifier("bert"), variants=[FP32], **options).report
    assert report.plan.calibration == str(tmp_path / "train.jsonl")
    assert report.notes == (
        f"{len(rows)} rows cannot show a drop of 0.5 point: one row is {100 / len(rows):.2g}",
        f"calibration and evaluation data share 1 of {len(rows)} rows: those are not used for calibration",
        "--calibration is not used: no variant to try is calibrated",
    )


def test_older_bundle_is_judged_at_one_batch_size(built: Bundle, labelled: Path) -> None:
    from hasten.core.plan import Gate
    from hasten.core.progress import SilentProgress
    from hasten.measure.data import read_rows
    from hasten.measure.verify_bundle import verify_bundle

    entries = tuple(replace(entry, depends_on_batch=False) for entry in built.manifest.variants)
    old = replace(built, manifest=replace(built.manifest, variants=entries))
    judged = verify_bundle(old, read_rows(labelled), Gate(), [INT8], 1, SilentProgress())
    assert judged[-1].verdict is not None
    assert judged[-1].verdict.by_batch == ()
