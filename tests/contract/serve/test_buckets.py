"""A session with buckets, as on a GPU: all are prepared at start, and batches are filled by tokens."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from hasten.backends import Artifact, RunOptions, Session, uniform_batch
from hasten.bundle import Bundle
from hasten.core.tensors import Batch, Shape
from hasten.server.models import encoder_model
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.encoder_engine import EngineObserver
from hasten.server.scheduling.queue import BatchJob
from hasten.server.settings import Settings
from support.wait import wait_until

BUCKETS = (16, 32, 64)


class BatchRecorder(EngineObserver):
    def __init__(self) -> None:
        self.jobs: list[BatchJob] = []

    def on_batch(self, job: BatchJob, seconds: float) -> None:
        self.jobs.append(job)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """All batches that sessions run, which now report buckets."""
    batches: list[Batch] = []

    def open_session(artifact: Artifact, options: RunOptions) -> Session:
        session: Any = real(artifact, options)
        run = session.run
        session.max_batch_tokens = BUCKETS[-1]
        session.rounded = lambda tokens: next(bucket for bucket in BUCKETS if bucket >= tokens)
        session.samples = lambda tokens, _: [
            uniform_batch(Shape(1, bucket), artifact.signature) for bucket in BUCKETS if bucket <= tokens
        ]
        session.run = lambda batch: (batches.append(batch), run(batch))[1]
        opened: Session = session
        return opened

    real = encoder_model.open_session
    monkeypatch.setattr(encoder_model, "open_session", open_session)
    return batches


def test_buckets_are_prepared_and_batches_fit_them(
    classifier_bundle: Bundle, ran: list[Batch], caplog: pytest.LogCaptureFixture
) -> None:
    observer, done, answers = BatchRecorder(), threading.Event(), []
    settings = Settings(variant="onnxruntime-fp32", instances=2, threads=1)
    with caplog.at_level(logging.INFO, "hasten"):
        model = EncoderModel("model", classifier_bundle, settings, CoreScheduler(2), observer)
    assert [batch.tokens for batch in ran[: 2 * len(BUCKETS)]] == [*BUCKETS, *BUCKETS]
    assert caplog.text.count("model: prepared 3 of 3 buckets") == 2
    assert model.limits.tokens_per_batch == BUCKETS[-1]

    def take(answer: Any, _: object) -> None:
        answers.append(answer)
        done.set()

    texts = ["a cat", "the plot is dull and the acting is worse, and a dog ran across the green field", "the rain"]
    model.submit_payload(lambda: texts, lambda outputs, _: outputs["logits"].tolist(), take)
    assert done.wait(60)
    wait_until(lambda: observer.jobs, "the batch statistics")  # which follow the answer
    assert model.close(60)
    (job,) = observer.jobs
    assert len(set(job.batch.lengths.tolist())) > 1
    assert job.padding == next(bucket for bucket in BUCKETS if bucket >= job.batch.tokens) - job.batch.tokens
    assert len(answers[0]) == len(texts)


def test_requests_are_answered_before_all_buckets_are_prepared(
    classifier_bundle: Bundle, ran: list[Batch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared: list[int] = []
    may_prepare = threading.Semaphore(0)
    with_buckets = encoder_model.open_session

    def open_session(artifact: Artifact, options: RunOptions) -> Session:
        session: Any = with_buckets(artifact, options)

        def prepare(batch: Batch) -> None:
            assert may_prepare.acquire(timeout=60)
            prepared.append(batch.tokens)

        session.uses_larger_buckets = False
        session.prepare = prepare
        session.covering_samples = lambda *_: [uniform_batch(Shape(1, BUCKETS[-1]), artifact.signature)]
        opened: Session = session
        return opened

    monkeypatch.setattr(encoder_model, "open_session", open_session)
    settings = Settings(variant="onnxruntime-fp32", instances=2, threads=1)
    with caplog.at_level(logging.INFO, "hasten"):
        model = EncoderModel("model", classifier_bundle, settings, CoreScheduler(2), EngineObserver())
        assert [batch.tokens for batch in ran[:2]] == [BUCKETS[-1]] * 2
        assert not prepared
        done = threading.Event()
        # One session prepares a bucket; the other one answers.
        model.submit_payload(lambda: ["a cat"], lambda outputs, _: outputs["logits"], lambda *_: done.set())
        assert done.wait(60)
        assert not prepared
        may_prepare.release(2 * len(BUCKETS))
        wait_until(lambda: caplog.text.count("model: prepared 3 buckets in the background") == 2, "all buckets")
    assert sorted(prepared) == sorted([*BUCKETS, *BUCKETS])
    assert model.close(60)
