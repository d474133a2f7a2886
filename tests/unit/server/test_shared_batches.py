"""Batches and outputs in shared memory: what is written is read again, and claims of the other process are checked."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.errors import (
    DeadlineError,
    HastenError,
    InputError,
    OverloadedError,
    StageError,
    TooLargeError,
    UnavailableError,
)
from hasten.core.tensors import BATCH, SEQUENCE, Batch, DType, Signature, TensorSpec
from hasten.server.processes.shared_batches import (
    MESSAGE_BYTES,
    BatchFormat,
    ProtocolError,
    Region,
    message_bytes,
    read_batch,
    read_error,
    read_outputs,
    write_batch,
    write_error,
    write_outputs,
)
from hasten.server.scheduling.engine_lifecycle import RetiredError

FORMAT = BatchFormat.of(
    Signature(
        tuple(TensorSpec(name, DType.INT32, (BATCH, SEQUENCE)) for name in ("input_ids", "attention_mask", "types")),
        tuple(TensorSpec(name, DType.FLOAT32, (BATCH,)) for name in ("scores", "states")),
        512,
    )
)
# Number, rows, tokens, type and flag of a batch; number, size and count of a reply; type and dimensions of an output.
BATCH_MESSAGE, REPLY, OUTPUT = struct.Struct("<IIIBB2x"), struct.Struct("<IHB1x"), struct.Struct("<BB2x4I")


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create()
    yield region
    region.close()


def batch_of(lengths: list[int], dtype: Any = np.int32) -> Batch:
    ids = np.arange(sum(lengths), dtype=dtype)
    return Batch({"input_ids": ids, "types": ids % 2}, np.array(lengths, np.int32))


def read(region: Region, message: bytes, number: int = 7) -> dict[str, Any]:
    return dict(read_outputs(region, FORMAT, memoryview(message), number))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.sampled_from([np.int32, np.int64]), st.booleans())
def test_batch_is_read_as_it_was_written(lengths: list[int], dtype: Any, is_suspect: bool) -> None:
    region = Region.create()
    batch = batch_of(lengths, dtype)
    received = read_batch(region, FORMAT, write_batch(region, FORMAT, batch, 2**32 - 1, is_suspect=is_suspect))
    assert (received.number, received.tokens, received.is_suspect) == (2**32 - 1, sum(lengths), is_suspect)
    assert received.batch.lengths.tolist() == lengths
    for name, values in batch.values.items():
        np.testing.assert_array_equal(received.batch.values[name], values)
    region.close()


def test_batch_is_a_copy(region: Region) -> None:
    """The region is written again, while rows of a request that has failed may still be queued."""
    received = read_batch(region, FORMAT, write_batch(region, FORMAT, batch_of([3, 4]), 1, is_suspect=False))
    write_batch(region, FORMAT, batch_of([900]), 2, is_suspect=False)
    assert received.batch.values["input_ids"].tolist() == list(range(7))


def test_ids_beyond_32_bits_are_kept(region: Region) -> None:
    ids = np.array([2**40, -1], np.int64)
    message = write_batch(region, FORMAT, Batch({"input_ids": ids, "types": ids}, np.array([2])), 1, is_suspect=False)
    assert read_batch(region, FORMAT, message).batch.values["input_ids"].tolist() == [2**40, -1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int64, np.uint8, np.bool_])
def test_outputs_are_read_as_they_were_written(region: Region, dtype: Any) -> None:
    generator = np.random.default_rng(0)
    outputs = {
        "states": generator.integers(0, 2, (5, 3, 7)).astype(dtype),
        "scores": generator.normal(size=(11,)).astype(np.float32),
    }
    answer = read(region, write_outputs(region, FORMAT, outputs, 7))
    for name, value in outputs.items():
        assert answer[name].dtype == value.dtype
        np.testing.assert_array_equal(answer[name], value)
    region.memory[:2000] = bytes(2000)
    np.testing.assert_array_equal(answer["scores"], outputs["scores"])


def test_slices_and_empty_outputs_are_read_as_they_were_written(region: Region) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    answer = read(region, write_outputs(region, FORMAT, {"scores": whole[1:3, ::2], "states": whole[:0]}, 7))
    assert answer["scores"].tolist() == whole[1:3, ::2].tolist()
    assert answer["states"].shape == (0, 6)


def test_region_grows_on_both_sides() -> None:
    writer = Region.create()
    reader = Region(os.dup(writer.fd))
    batch = batch_of([512] * 4000)
    received = read_batch(reader, FORMAT, write_batch(writer, FORMAT, batch, 1, is_suspect=False))
    assert received.tokens == batch.tokens
    outputs = {"scores": np.ones((3, 2**21), np.float32), "states": np.zeros(1, np.float32)}
    assert read(writer, write_outputs(reader, FORMAT, outputs, 7))["scores"].sum() == 3 * 2**21
    for region in (writer, reader):
        region.close()


def test_start_of_a_batch_is_seen_by_the_other_side() -> None:
    client = Region.create()
    engine = Region(os.dup(client.fd))
    write_batch(client, FORMAT, batch_of([1]), 1, is_suspect=False)
    assert not client.is_running
    engine.is_running = True
    assert client.is_running
    write_batch(client, FORMAT, batch_of([1]), 2, is_suspect=False)
    assert not engine.is_running
    for region in (client, engine):
        region.close()


@pytest.mark.parametrize(
    "claim",
    [
        (1, 2, 7, 2, 0),  # unknown type
        (1, 0, 0, 0, 0),
        (1, 3, 2, 0, 0),  # more rows than tokens
        (1, 2, 2**19, 0, 0),  # beyond the region
        (1, 2, 2**32 - 1, 1, 0),
        (1, 2, 8, 0, 0),  # one token more than the lengths say
    ],
)
def test_invalid_claims_about_a_batch_are_rejected(region: Region, claim: tuple[int, ...]) -> None:
    write_batch(region, FORMAT, batch_of([3, 4]), 1, is_suspect=False)
    with pytest.raises(ProtocolError):
        read_batch(region, FORMAT, BATCH_MESSAGE.pack(*claim))


def test_negative_length_is_rejected(region: Region) -> None:
    message = write_batch(region, FORMAT, batch_of([3, 4]), 1, is_suspect=False)
    region.integers[0][:2] = [-1, 8]
    with pytest.raises(ProtocolError, match="do not add up"):
        read_batch(region, FORMAT, message)


@pytest.mark.parametrize("message", [b"", b"x" * 15, b"x" * 17])
def test_message_of_another_size_is_rejected(region: Region, message: bytes) -> None:
    with pytest.raises(ProtocolError, match="bytes instead of 16"):
        read_batch(region, FORMAT, message)


@pytest.mark.parametrize(
    "message",
    [
        REPLY.pack(8, 0, 0),  # the answer to another batch
        REPLY.pack(7, 0, 0),
        REPLY.pack(7, 40, 2) + OUTPUT.pack(0, 1, 1, 0, 0, 0),  # shorter than it says
        REPLY.pack(7, 20, 1) + OUTPUT.pack(0, 1, 1, 0, 0, 0),  # an output is missing
        REPLY.pack(7, 40, 2) + 2 * OUTPUT.pack(99, 1, 1, 0, 0, 0),
        REPLY.pack(7, 40, 2) + 2 * OUTPUT.pack(0, 9, 1, 0, 0, 0),
        REPLY.pack(7, 40, 2) + 2 * OUTPUT.pack(0, 4, *[2**32 - 1] * 4),
        REPLY.pack(7, 40, 2) + 2 * OUTPUT.pack(0, 1, 2**18, 0, 0, 0),  # beyond the region
        REPLY.pack(7, 4, 255) + b"null",
    ],
)
def test_invalid_reply_is_rejected(region: Region, message: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(region, message)


@pytest.mark.parametrize(
    "error",
    [
        StageError("the model failed: RuntimeError"),
        InputError("no text", hint="send one"),
        TooLargeError("the row is too long"),
        DeadlineError("too late"),
        UnavailableError("the model is being unloaded"),
        OverloadedError("too little memory", retry_after_s=2.5),
    ],
)
def test_error_keeps_its_class_message_and_hint(region: Region, error: HastenError) -> None:
    with pytest.raises(type(error)) as caught:
        read(region, write_error(error, 7))
    assert (caught.value.message, caught.value.hint) == (error.message, error.hint)
    assert getattr(caught.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_error_of_a_private_class_becomes_its_base(region: Region) -> None:
    with pytest.raises(UnavailableError) as caught:
        read(region, write_error(RetiredError("gone"), 7))
    assert type(caught.value) is UnavailableError


def test_class_that_is_no_error_of_hasten_is_not_raised() -> None:
    assert type(read_error(b'{"kind": "SystemExit", "message": "x"}')) is StageError


def test_long_error_fits_into_a_message() -> None:
    message = write_error(StageError('"€' * 10_000, hint='"€' * 10_000), 7)
    assert len(message) == message_bytes(memoryview(message)) <= MESSAGE_BYTES


def test_output_that_cannot_be_passed_is_an_error(region: Region) -> None:
    scores = np.zeros(1, np.float32)
    for states in (np.zeros(1, np.complex64), np.zeros((1,) * 5, np.float32)):
        with pytest.raises(StageError, match="cannot leave the engine process"):
            write_outputs(region, FORMAT, {"scores": scores, "states": states}, 7)
