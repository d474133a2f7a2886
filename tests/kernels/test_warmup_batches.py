"""Warm-up batches cover each bucket once, and all buckets of typical batches."""

from __future__ import annotations

import numpy as np

from hasten.backends import PreparesBuckets
from hasten.backends.fused.session import FusedSession
from hasten.core.tensors import BATCH, SEQUENCE, DType, Layout, SessionSpec, Signature, TensorSpec
from hasten.kernels.cuda.packed_buckets import Bucket
from hasten.kernels.cuda.replay import MAX_GRAPHS
from hasten.kernels.warmup_batches import covering_samples, samples

SIGNATURE = Signature(
    tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in ("input_ids", "token_type_ids")),
    (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),),
    max_length=512,
)
TOKENS, ROWS = 8192, 64


def test_each_bucket_is_warmed_up_once() -> None:
    batches = samples(TOKENS, ROWS, SIGNATURE)
    buckets = [Bucket.of(batch.tokens, len(batch)) for batch in batches]
    assert len(set(buckets)) == len(buckets)
    assert [bucket.sequences for bucket in buckets] == sorted(bucket.sequences for bucket in buckets)
    for batch in batches:
        assert batch.tokens <= TOKENS
        assert 1 <= batch.lengths.min() <= batch.lengths.max() <= SIGNATURE.max_length
        assert set(batch.values) == {"input_ids", "token_type_ids"}


def test_buckets_of_typical_batches_are_warmed_up() -> None:
    warmed_up = {Bucket.of(batch.tokens, len(batch)) for batch in samples(TOKENS, ROWS, SIGNATURE)}
    random = np.random.default_rng(0)
    for _ in range(2000):
        lengths = random.integers(8, SIGNATURE.max_length + 1, random.integers(1, ROWS + 1))
        fitting = lengths[np.cumsum(lengths) <= TOKENS]
        assert Bucket.of(int(np.sum(fitting)), len(fitting)) in warmed_up


def test_few_covering_buckets_hold_all_batches() -> None:
    for rows in (1, 60, 256):
        covering = {Bucket.of(batch.tokens, len(batch)) for batch in covering_samples(TOKENS, rows, SIGNATURE)}
        assert len(covering) <= 24
        for batch in samples(TOKENS, rows, SIGNATURE):
            bucket = Bucket.of(batch.tokens, len(batch))
            tokens = [other.tokens for other in covering if other.holds(bucket)]
            assert tokens
            assert min(tokens) <= max(64, 4 * bucket.tokens)


def test_fused_session_offers_as_many_batches_as_it_holds_graphs() -> None:
    session = object.__new__(FusedSession)  # needs no weights
    session.spec = SessionSpec(SIGNATURE, Layout.PACKED, "cuda", "fp16")
    session.uses_larger_buckets = False
    assert isinstance(session, PreparesBuckets)
    assert len(session.samples(session.max_batch_tokens, 256)) == MAX_GRAPHS
    assert [session.rounded(tokens) for tokens in (1, 17, 130)] == [16, 32, 144]
