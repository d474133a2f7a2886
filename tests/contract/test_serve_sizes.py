"""A session that computes in sizes made ready before, as one on a GPU does: warmed in all, batched by tokens."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from hasten.backends import Artifact, RunOptions, Session, uniform_batch
from hasten.bundle import Bundle
from hasten.core.tensors import Batch, Shape
from hasten.server import served
from hasten.server.engine import Observer
from hasten.server.fairness import Turns
from hasten.server.queue import Job
from hasten.server.served import ModelSettings, Served
from operating import until

SIZES = (16, 32, 64)


class Batches(Observer):
    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def on_batch(self, job: Job, seconds: float) -> None:
        self.jobs.append(job)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """All that sessions run, which now say what sizes they have."""
    batches: list[Batch] = []

    def open_session(artifact: Artifact, options: RunOptions) -> Session:
        session: Any = real(artifact, options)
        run = session.run
        session.most_tokens = SIZES[-1]
        session.rounded = lambda tokens: next(size for size in SIZES if size >= tokens)
        session.samples = lambda tokens, _: [
            uniform_batch(Shape(1, size), artifact.signature) for size in SIZES if size <= tokens
        ]
        session.run = lambda batch: (batches.append(batch), run(batch))[1]
        opened: Session = session
        return opened

    real = served.open_session
    monkeypatch.setattr(served, "open_session", open_session)
    return batches


def test_sizes_are_ready_and_batches_fit_them(
    classifier_bundle: Bundle, ran: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    observer, done, answers = Batches(), threading.Event(), []
    settings = ModelSettings(variant="onnxruntime-fp32", instances=2, threads=1)
    with caplog.at_level(logging.INFO, "hasten"):
        model = Served("it", classifier_bundle, settings, Turns(2), observer)
    assert [batch.tokens for batch in ran[: 2 * len(SIZES)]] == [*SIZES, *SIZES]
    assert caplog.text.count("it: 3 of 3 sizes of batches are ready") == 2
    assert model.limits.tokens_per_batch == SIZES[-1]

    def take(answer: Any, _: object) -> None:
        answers.append(answer)
        done.set()

    texts = ["a cat", "the plot is dull and the acting is worse, and a dog ran across the green field", "the rain"]
    model.ask(lambda: texts, lambda outputs, _: outputs["logits"].tolist(), take)
    assert done.wait(60)
    until(lambda: observer.jobs, "the count of its batch")  # after the answer
    assert model.close(60)
    (job,) = observer.jobs
    assert len(set(job.batch.lengths.tolist())) > 1
    assert job.padding == next(size for size in SIZES if size >= job.batch.tokens) - job.batch.tokens
    assert len(answers[0]) == len(texts)
