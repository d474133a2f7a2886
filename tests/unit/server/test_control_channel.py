"""The control channel between the parent and its child processes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.core.errors import BundleError, InputError, OverloadedError, StageError, UnavailableError
from hasten.server.processes.control import ChannelClosedError, ControlChannel
from hasten.server.processes.messages import (
    Done,
    Drain,
    MetricsText,
    ModelVersion,
    ReadMetrics,
    ReadStatus,
    Reply,
    Request,
    RetireModel,
    Status,
    decode_settings,
    encode_settings,
)
from hasten.server.settings import Replicas, Settings

LARGE = b"x" * 2**20


async def answer(request: Request) -> Reply:
    match request:
        case ReadStatus():
            return Status("a fault", can_serve=False)
        case ReadMetrics():
            return MetricsText(LARGE)
        case Drain(timeout_s=timeout_s):
            await asyncio.sleep(timeout_s)
            return Done()
        case RetireModel(version=version):
            errors = {
                "bundle": BundleError("damaged", hint="build it again"),
                "busy": OverloadedError("too much", retry_after_s=1.0),
                "bug": ValueError("a secret"),
            }
            raise errors[version.name]
    return Done()


def with_channel(work: Callable[[ControlChannel, ControlChannel, socket.socket], Awaitable[None]]) -> None:
    """Run a coroutine with both ends of a channel and the socket of the second."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        first = await ControlChannel.open(ours, answer)
        second = await ControlChannel.open(theirs, answer)
        await work(first, second, theirs)
        first.close()
        await asyncio.wait_for(second.closed.wait(), 20)

    asyncio.run(asyncio.wait_for(run(), 60))


def retire(name: str) -> RetireModel:
    return RetireModel(ModelVersion(name, 1, "/path", "digest"), 0.0)


def test_both_ends_send_requests_that_overtake_each_other() -> None:
    async def work(first: ControlChannel, second: ControlChannel, _: socket.socket) -> None:
        slow = asyncio.ensure_future(first.call(Drain(60.0), Done))
        status, text = await asyncio.gather(first.call(ReadStatus(), Status), second.call(ReadMetrics(), MetricsText))
        assert status == Status("a fault", can_serve=False)
        assert text.text == LARGE
        assert not slow.done()
        slow.cancel()

    with_channel(work)


def test_thread_waits_for_the_reply() -> None:
    async def work(first: ControlChannel, *_: object) -> None:
        assert (await asyncio.to_thread(first.call_from_thread, ReadMetrics(), MetricsText)).text == LARGE

    with_channel(work)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("bundle", BundleError, "damaged"), ("busy", UnavailableError, "too much"), ("bug", StageError, "ValueError")],
)
def test_errors_keep_their_class_and_message(
    name: str, kind: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(first: ControlChannel, *_: object) -> None:
        with pytest.raises(kind, match=message) as caught:
            await first.call(retire(name), Done)
        if name == "bundle":
            assert isinstance(caught.value, BundleError)
            assert caught.value.hint == "build it again"

    with caplog.at_level(logging.CRITICAL, logger="hasten"):
        with_channel(work)


def test_call_ends_with_its_timeout_or_the_other_process() -> None:
    async def work(first: ControlChannel, second: ControlChannel, _: socket.socket) -> None:
        with pytest.raises(UnavailableError, match=r"no reply to Drain within 0\.01 s"):
            await first.call(Drain(60.0), Done, 0.01)
        waiting = asyncio.ensure_future(first.call(Drain(60.0), Done))
        await asyncio.sleep(0)
        second.close()
        with pytest.raises(ChannelClosedError):
            await waiting
        with pytest.raises(ChannelClosedError):
            await first.call(ReadStatus(), Status)

    with_channel(work)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x03\x00\x00\x00abc"])
def test_bytes_that_are_no_message_close_the_channel(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            channel = await ControlChannel.open(ours, answer)
            theirs.sendall(data)
            await asyncio.wait_for(channel.closed.wait(), 20)

    with caplog.at_level(logging.ERROR, logger="hasten"):
        asyncio.run(run())
    assert "the control channel is broken" in caplog.text


def test_reply_of_another_kind_is_an_error() -> None:
    async def work(first: ControlChannel, *_: object) -> None:
        with pytest.raises(StageError, match="ReadStatus was answered with Status"):
            await first.call(ReadStatus(), Done)

    with_channel(work)


def test_settings_survive_the_way_to_another_process() -> None:
    settings = Settings(
        ("a", "b c"),
        host="::1",
        workers=4,
        max_slowdown=2.5,
        api_key_file=Path("/keys"),
        replicas=Replicas(1, None),
        log_requests=False,
    )
    assert decode_settings(encode_settings(settings)) == settings
    assert decode_settings(encode_settings(Settings())) == Settings()
    assert decode_settings(encode_settings(replace(settings, workers=None))) != settings


def test_unknown_error_class_becomes_a_stage_error() -> None:
    class UnknownError(InputError):
        pass

    async def fail(_: Request) -> Reply:
        raise UnknownError("of a plug-in")

    async def run() -> None:
        ours, theirs = socket.socketpair()
        first, _ = await ControlChannel.open(ours, answer), await ControlChannel.open(theirs, fail)
        with pytest.raises(StageError, match="of a plug-in"):
            await first.call(ReadStatus(), Status)
        first.close()

    asyncio.run(run())
