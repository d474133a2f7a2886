"""`hasten stress` against scripted servers and against `hasten serve`."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import main
from hasten.stress.client import BROKEN, SILENT, StressTarget
from hasten.stress.load import LoadResult, closed_loop, load
from support.server_process import Server

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")

# The scripted server closes the connection without an answer.
HANG_UP = 0
Answer = Callable[[dict[str, str], bytes], Awaitable[int]]


@contextmanager
def scripted(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run a server in a thread that answers with the status that `answer` returns; yield its port."""
    loop = asyncio.new_event_loop()
    ready: list[int] = []
    has_started = threading.Event()
    stop = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
                status = await answer(headers, await reader.readexactly(int(headers["content-length"])))
                if status == HANG_UP:
                    break
                body = b"[]" if status == 200 else b'{"error": "scripted"}'
                writer.write(b"HTTP/1.1 %d It\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=tls, backlog=1000)
        ready.append(server.sockets[0].getsockname()[1])
        has_started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    has_started.wait(10)
    yield ready[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def answer_ok(*_: object) -> int:
    return 200


def stress(port: int, rate: float, seconds: float, timeout_s: float = 30.0) -> LoadResult:
    target = StressTarget.parse(f"127.0.0.1:{port}", "/predict", {})
    return asyncio.run(load(target, [target.request(b'{"inputs": "a"}')], rate, seconds, timeout_s=timeout_s))


def stress_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["stress", *words, "--json", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_stall_counts_for_all_requests_due_in_it() -> None:
    first: list[float] = []

    async def stalls(*_: object) -> int:
        first.append(time.monotonic())
        # No request is answered between 0.5 s and 1.5 s.
        now = time.monotonic() - first[0]
        if 0.5 < now < 1.5:
            await asyncio.sleep(1.5 - now)
        return 200

    with scripted(stalls) as port:
        run = stress(port, rate=200, seconds=2.0)
    assert (run.errors, run.sent) == (0, len(first))
    # Half of the requests were due in the stall and waited up to a second: one in ten for 0.8 s or longer.
    assert run.percentiles_ms["p90"] > 700
    assert run.p99_ms > 900
    assert run.connections > 100


def test_fairness_shows_a_client_that_is_starved() -> None:
    """The first connection is answered every 200 ms, the others at once."""
    first: list[object] = []

    async def answer(*_: object) -> int:
        connection = asyncio.current_task()
        first.append(first[0] if first else connection)
        if connection is first[0]:
            await asyncio.sleep(0.2)
        return 200

    with scripted(answer) as port:
        target = StressTarget.parse(f"127.0.0.1:{port}", "/predict", {})
        result = asyncio.run(closed_loop(target, [target.request(b"{}")], 4, 1.0))
    assert (result.statuses, result.connections, result.errors) == ({200: result.sent}, 4, 0)
    assert result.fairness is not None
    assert 0 < result.fairness < 0.5
    assert result.max_ms >= 200 > result.p50_ms


def test_errors_are_counted_by_kind() -> None:
    sent: Counter[int] = Counter()
    statuses = [200, 200, 500, 429, HANG_UP]

    async def varying(*_: object) -> int:
        status = statuses[sum(sent.values()) % len(statuses)]
        sent[status] += 1
        return status

    with scripted(varying) as port:
        run = stress(port, rate=100, seconds=1.0)
    assert run.statuses == dict(sent)
    assert run.errors == sent[500] + sent[429] + sent[HANG_UP]
    assert run.answered == sent[200] == sum(bar.count for bar in run.histogram)
    assert "rejected (429)" in run.describe_errors()
    assert "connection lost" in run.describe_errors()


def test_silence_times_out_and_invalid_http_counts_as_broken() -> None:
    async def silent(*_: object) -> int:
        await asyncio.sleep(60)
        return 200

    with scripted(silent) as port:
        run = stress(port, rate=20, seconds=0.5, timeout_s=0.3)
    assert (set(run.statuses), run.answered, run.histogram) == ({SILENT}, 0, ())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        run = stress(listener.getsockname()[1], rate=1, seconds=0.1)
        thread.join(10)
    assert run.statuses == {BROKEN: 1}


@pytest.mark.slow
def test_sweep_finds_the_capacity_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    # Low, so that a busy machine is no limit; a pause shorter than the objective does not matter.
    capacity = 40.0
    free_at = 0.0

    async def one_at_a_time(*_: object) -> int:
        nonlocal free_at
        free_at = max(free_at, time.monotonic()) + 1 / capacity
        await asyncio.sleep(free_at - time.monotonic())
        return 200

    with scripted(one_at_a_time) as port:
        result = stress_json(
            capsys,
            *(f"127.0.0.1:{port}", "--sweep", "--rate", "10", "--duration", "5s", "--slo-p99", "0.6s"),
        )
    assert 0.8 * capacity < result["best"]["rate"] < 1.2 * capacity, [run["rate"] for run in result["runs"]]
    assert result["objective_ms"] == 600


def test_rows_api_key_and_model_reach_the_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bodies: list[Any] = []
    keys = set()

    async def remember(headers: dict[str, str], body: bytes) -> int:
        bodies.append(json.loads(body))
        keys.add(headers["authorization"])
        return 200

    texts = ["a", "two words", "x " * 500]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"sentence": text, "label": "L"}) + "\n" for text in texts))
    words = ["--rate", "100", "--duration", "1s", "--data", str(rows), "--model", "m", "--api-key", "secret"]
    words += ["--columns", "text=sentence"]
    with scripted(remember) as port:
        result = stress_json(capsys, f"http://127.0.0.1:{port}", *words)
    assert keys == {"Bearer secret"}
    assert {body["inputs"] for body in bodies} == set(texts)
    assert {body["model"] for body in bodies} == {"m"}
    assert (result["statuses"], result["sent"]) == ({"200": result["sent"]}, len(bodies) - 1)
    assert result["percentiles_ms"]["p50"] <= result["percentiles_ms"]["p99.9"] <= result["max_ms"]


def test_result_is_printed_and_plotted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with scripted(answer_ok) as port:
        words = [f"127.0.0.1:{port}", "--rate", "50", "--duration", "1s", "--plot", str(tmp_path / "plot.svg")]
        assert main(["stress", *words]) == 0
    printed = capsys.readouterr()
    assert "p99.9" in printed.out
    assert "█" in printed.out
    assert "50 requests/s" in printed.err
    drawing = xml.etree.ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert drawing.tag.endswith("svg")
    assert "p99.9" in "".join(drawing.itertext())


def test_stress_over_tls_verifies_the_certificate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with scripted(answer_ok, context) as port:
        assert main(["stress", f"https://127.0.0.1:{port}", "--quiet"]) == 7
        assert "certificate verify failed" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        result = stress_json(capsys, f"https://127.0.0.1:{port}", "--rate", "20", "--duration", "0.5s")
    assert result["answered"] == result["sent"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["ftp://host"], 2, "is not an HTTP address"),
        (["http://127.0.0.1:{closed}"], 7, "does not answer: Connection refused"),
        (["http://127.0.0.1:{open}/elsewhere"], 7, "answered POST /elsewhere with 404: scripted"),
        (["http://no-such-host.invalid"], 7, "does not answer"),
        (["127.0.0.1:{open}", "--rate", "0"], 2, "--rate must be more than 0"),
        (["127.0.0.1:{open}", "--rate", "nan"], 2, "--rate must be more than 0"),
        (["127.0.0.1:{open}", "--clients", "0"], 2, "--clients must be between 1 and"),
        (["127.0.0.1:{open}", "--clients", "2", "--sweep"], 2, "--sweep searches for a rate"),
        (["127.0.0.1:{open}", "--duration", "soon"], 2, "is not a duration"),
        (["127.0.0.1:{open}", "--data", "/nowhere.jsonl"], 2, "/nowhere.jsonl"),
        (["127.0.0.1:{open}", "--columns", "text=sentence"], 2, "--columns needs a file"),
        (["127.0.0.1:{open}", "--sweep", "--slo-p99", "0"], 2, "is not a positive duration"),
        (["127.0.0.1:{open}", "--plot", "/nowhere/plot.svg"], 2, "no directory /nowhere"),
    ],
)
def test_usage_errors_are_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    async def nothing_here(*_: object) -> int:
        return 404

    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    with scripted(nothing_here) as port:
        assert main(["stress", *(word.format(open=port, closed=closed) for word in words)]) == code
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: ")
    assert message in errors[0]
    assert len(errors) <= 2


@pytest.mark.slow
def test_stress_runs_against_our_own_server(
    tiny_classifier: Any, quick_build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = quick_build(tiny_classifier("bert"), tmp_path / "classifier", variants=["onnxruntime-fp32"])
    server = Server(str(bundle.path), "--threads", "1", "--no-grpc", HASTEN_API_KEYS="secret")
    address = f"127.0.0.1:{server.port}"
    words = ["--rate", "50", "--duration", "1s", "--api-key", "secret"]
    for url in (address, f"http://{address}/v2/models/classifier/infer", f"{address}/models/classifier"):
        result = stress_json(capsys, url, *words)
        assert (result["answered"], result["per_second"] > 10) == (result["sent"], True)
    assert main(["stress", address]) == 7
    assert "with 401" in capsys.readouterr().err
    assert server.stop()[0] == 0
