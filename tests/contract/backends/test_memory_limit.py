"""Test that sessions on CPUs keep the process below its memory limit, and answer the same."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Session, Source
from hasten.core.errors import PlanError, TooLargeError
from hasten.core.system import memory_limit
from hasten.core.system.hardware import resident_memory_bytes, this_machine
from hasten.core.system.memory_limit import trim_heap
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.core.variant import Variant
from hasten.predictor import open_session

pytestmark = pytest.mark.skipif(resident_memory_bytes() is None, reason="only Linux reports resident memory")

MAX_LENGTH = 1024
ROWS = 32
# A row of the maximum length takes at least one matrix of 4 MB, 32 rows 128 MB.
ROOM_BYTES = 90 * 2**20


@pytest.fixture(scope="module", params=["onnxruntime-fp32", "openvino-fp32"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a model whose memory grows with the square of the length, as attention scores do."""
    onnx = pytest.importorskip("onnx")
    variant = Variant.parse(request.param)
    backend = BACKENDS.get(variant.backend)
    if not (support := backend.probe(this_machine(), variant)).ok:
        pytest.skip(f"{variant}: {support.reason}")
    helper, types = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["values"], to=types.FLOAT),
        helper.make_node("Unsqueeze", ["values", "last"], ["column"]),
        helper.make_node("Unsqueeze", ["values", "middle"], ["row"]),
        helper.make_node("MatMul", ["column", "row"], ["scores"]),
        # Without it OpenVINO would recognize attention, and compute it without the matrix of scores.
        helper.make_node("CumSum", ["scores", "last"], ["sums"]),
        helper.make_node("Softmax", ["sums"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "column"], ["context"]),
        helper.make_node("ReduceMean", ["context", "middle"], ["logits"], keepdims=0),
    ]
    axes = [helper.make_tensor(name, types.INT64, [1], [axis]) for name, axis in (("last", 2), ("middle", 1))]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("input_ids", types.INT32, [BATCH, SEQUENCE])],
        [helper.make_tensor_value_info("logits", types.FLOAT, [BATCH, 1])],
        axes,
    )
    folder = tmp_path_factory.mktemp("memory")
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "source.onnx"
    )
    inputs = (TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE)),)
    outputs = (TensorSpec("logits", DType.FLOAT32, (BATCH, 1)),)
    # Padding would change the mean: rows of equal length run together.
    signature = Signature(inputs, outputs, MAX_LENGTH, ignores_padding=False)
    (folder / "made").mkdir()
    model = backend.make(Source(signature, {MODEL: folder / "source.onnx"}), variant, folder / "made")
    # The first session also loads the runtime's libraries.
    with open_session(model, RunOptions(1)) as session:
        session.run(batch_of([64]))
    return model


def batch_of(lengths: list[int]) -> Batch:
    ids = np.random.default_rng(0).integers(1, 3, sum(lengths)).astype(np.int32)
    return Batch({"input_ids": ids}, np.array(lengths, np.int32))


@contextmanager
def sampled_memory() -> Iterator[list[int]]:
    """Sample the resident memory of this process once a millisecond."""
    samples = [resident_memory_bytes() or 0]
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.001):
            samples.append(resident_memory_bytes() or 0)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def room(size: int) -> int:
    gc.collect()
    trim_heap()
    return (resident_memory_bytes() or 0) + size


def test_stream_of_all_lengths_stays_below_the_limit(artifact: Artifact) -> None:
    lengths = [*range(1, MAX_LENGTH + 1, 97), MAX_LENGTH]
    batches = [batch_of([length] * ROWS) for length in np.random.default_rng(1).permutation(lengths).tolist()]
    limit = room(ROOM_BYTES)
    with open_session(artifact, RunOptions(1, limit)) as session, sampled_memory() as samples:
        answers = [session.run(batch)["logits"] for batch in batches]
    assert max(samples) <= limit
    with open_session(artifact, RunOptions(1)) as session, sampled_memory() as samples:
        expected = [session.run(batch)["logits"] for batch in batches]
    assert max(samples) > limit
    for answer, reference in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, reference, rtol=1e-4)


def test_sessions_share_the_limit(artifact: Artifact) -> None:
    """Each alone would fit: they wait for each other, and an idle one releases what it retains."""
    limit = room(200 * 2**20)
    options = RunOptions(1, limit)
    batch = batch_of([MAX_LENGTH] * 16)

    def run(session: Session) -> None:
        for _ in range(4):
            session.run(batch)

    with (
        open_session(artifact, options) as first,
        open_session(artifact, options) as second,
        sampled_memory() as samples,
        ThreadPoolExecutor(2) as pool,
    ):
        list(pool.map(run, (first, second)))
        first.run(batch)
        second.run(batch)
    assert max(samples) <= limit


def test_text_that_never_fits_is_rejected_at_once(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for memory would stop the batches of all other clients."""
    monkeypatch.setattr(memory_limit, "_IDLE_WAIT_S", 300.0)
    monkeypatch.setattr(memory_limit, "_MAX_WAIT_S", 300.0)
    with open_session(artifact, RunOptions(1)) as session:
        session.run(batch_of([64]))
        limit = room(12 * 2**20)
    with open_session(artifact, RunOptions(1, limit)) as session:
        assert len(session.run(batch_of([64, 64]))["logits"]) == 2
        with pytest.raises(TooLargeError, match=f"a text of {MAX_LENGTH} tokens needs about"):
            session.run(batch_of([MAX_LENGTH]))


def test_limit_below_the_process_is_an_error(artifact: Artifact) -> None:
    with pytest.raises(PlanError, match="before the first request"):
        open_session(artifact, RunOptions(1, 2**20))


@pytest.mark.parametrize("limit", [0, -1, 1.5])
def test_invalid_limit_is_an_error(limit: object) -> None:
    with pytest.raises(PlanError, match="max_memory"):
        RunOptions(max_memory=limit)  # type: ignore[arg-type]
