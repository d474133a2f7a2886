"""A server that hangs or dies, and whoever starts it again."""

from __future__ import annotations

import http.client
import os
import signal
import socket
from pathlib import Path

import pytest

from hasten.bundle import Bundle
from operating import (
    BODY,
    QUIET,
    Running,
    is_refused,
    is_waited_for,
    obstinacy,
    predict,
    request,
    swap,
    until,
)

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")


def test_a_session_that_hangs_ends_the_process(obstinate_bundle: Bundle, tmp_path: Path) -> None:
    with Running(
        tmp_path, str(obstinate_bundle.path), *QUIET, "--hang", "0.5s", **obstinacy(obstinate_bundle, tmp_path)
    ) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: server.ask("/v2/health/live", port=port)[0] == 503, "the loss of liveness")
            assert server.ask("/v2/health/ready", port=port)[0] == 503
            assert server.end() == 70
        assert server.lines[-1]["level"] == "critical"


def child_of(server: Running) -> int | None:
    """The process that a supervisor has started."""
    try:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    except FileNotFoundError:
        pytest.skip("who is whose child cannot be told here")
    return int(children[0]) if children else None


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_a_supervisor_starts_it_again(obstinate_bundle: Bundle, tmp_path: Path, free_port: int) -> None:
    words = (str(obstinate_bundle.path), *QUIET, "--port", str(free_port), "--hang", "0.5s", "--supervise")
    with Running(tmp_path, *words, **obstinacy(obstinate_bundle, tmp_path)) as server:
        assert predict(server.ready(), port=free_port) == 200
        first = child_of(server)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        server.said("was killed by signal 9")
        until(lambda: answers(server, free_port), "the second one")
        second = child_of(server)
        assert second not in (None, first)

        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", free_port), timeout=60) as client:
            client.sendall(request(BODY))
            server.said("the server ended with 70")
        (tmp_path / "hang").unlink()
        # Its heart beats from when it is ready on; it may answer before.
        until(lambda: sum(line["message"] == "ready" for line in server.lines) == 3, "the third one")
        assert answers(server, free_port)
        third = child_of(server)

        # One whose event loop stands still cannot even say that it hangs.
        assert third is not None
        os.kill(third, signal.SIGSTOP)
        server.said("the server does not answer any more")
        until(lambda: answers(server, free_port), "the fourth one")
        fourth = child_of(server)
        assert fourth not in (None, first, second, third)
        assert server.stop() == 0
        assert fourth is not None
        assert is_gone(fourth)


def answers(server: Running, port: int) -> bool:
    try:
        return predict(server, port=port) == 200
    except (OSError, http.client.HTTPException):
        return False


def test_ctrl_c_reaches_a_supervised_server_once(obstinate_bundle: Bundle, tmp_path: Path) -> None:
    """Twice would mean at once, and what was taken would be lost."""
    words = (str(obstinate_bundle.path), *QUIET, "--supervise", "--drain", "1h")
    with Running(tmp_path, *words, **obstinacy(obstinate_bundle, tmp_path)) as server:
        port = server.ready().port
        (tmp_path / "hang").touch()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(request(BODY))
            until(lambda: is_waited_for(server, port), "the request")
            child = child_of(server)
            assert child is not None
            assert os.getpgid(child) != server.process.pid  # the terminal does not send it to both
            os.killpg(server.process.pid, signal.SIGINT)
            until(lambda: is_refused(port), "the socket's end")
            (tmp_path / "hang").unlink()
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        assert server.end() == 0


def test_without_its_supervisor_it_leaves(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--supervise") as server:
        child = child_of(server.ready())
        assert child is not None
        server.signal(signal.SIGKILL)
        server.end()
        until(lambda: is_gone(child), "the server's end")
        assert server.said("the supervisor is gone")


def test_a_supervisor_does_not_start_what_cannot_start(tmp_path: Path) -> None:
    with Running(tmp_path, str(tmp_path / "nothing"), *QUIET, "--supervise") as server:
        assert server.end() == 2
        assert sum("no such directory" in line["message"] for line in server.lines) == 1


def test_sighup_reaches_a_supervised_server(classifier_bundle: Bundle, other_bundle: Bundle, tmp_path: Path) -> None:
    link = tmp_path / "current"
    swap(link, classifier_bundle.path)
    with Running(tmp_path, str(link), *QUIET, "--supervise") as server:
        server.ready()
        swap(link, other_bundle.path)
        server.signal(signal.SIGHUP)
        server.said("current has changed: onnxruntime-fp32 is served now")
        assert server.stop() == 0
