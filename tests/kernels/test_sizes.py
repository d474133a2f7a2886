"""Which sizes are made ready before anyone asks: a batch of each, and every one that usual batches have."""

from __future__ import annotations

import numpy as np

from hasten.backends import HasSizes
from hasten.backends.fused.session import FusedSession
from hasten.core.tensors import BATCH, SEQUENCE, DType, Layout, SessionSpec, Signature, TensorSpec
from hasten.kernels.packing import Bucket
from hasten.kernels.replay import MOST_GRAPHS
from hasten.kernels.sizes import samples

SIGNATURE = Signature(
    tuple(TensorSpec(name, DType.INT64, (BATCH, SEQUENCE)) for name in ("input_ids", "token_type_ids")),
    (TensorSpec("logits", DType.FLOAT32, (BATCH, 2)),),
    max_length=512,
)
TOKENS, ROWS = 8192, 64


def test_each_size_once() -> None:
    batches = samples(TOKENS, ROWS, SIGNATURE)
    buckets = [Bucket.of(batch.tokens, len(batch)) for batch in batches]
    assert len(set(buckets)) == len(buckets)
    assert [bucket.sequences for bucket in buckets] == sorted(bucket.sequences for bucket in buckets)
    for batch in batches:
        assert batch.tokens <= TOKENS
        assert 1 <= batch.lengths.min() <= batch.lengths.max() <= SIGNATURE.max_length
        assert set(batch.values) == {"input_ids", "token_type_ids"}


def test_all_that_usual_batches_have() -> None:
    known = {Bucket.of(batch.tokens, len(batch)) for batch in samples(TOKENS, ROWS, SIGNATURE)}
    random = np.random.default_rng(0)
    for _ in range(2000):
        lengths = random.integers(8, SIGNATURE.max_length + 1, random.integers(1, ROWS + 1))
        fitting = lengths[np.cumsum(lengths) <= TOKENS]
        assert Bucket.of(int(np.sum(fitting)), len(fitting)) in known


def test_the_fused_backend_offers_as_many_as_it_holds() -> None:
    session = object.__new__(FusedSession)  # no weights are needed to tell
    session.spec = SessionSpec(SIGNATURE, Layout.PACKED, "cuda", "fp16")
    assert isinstance(session, HasSizes)
    assert len(session.samples(session.most_tokens, 256)) == MOST_GRAPHS
    assert [session.rounded(tokens) for tokens in (1, 17, 130)] == [16, 32, 144]
