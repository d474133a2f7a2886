"""Limits of `hasten serve`: sizes, times, connections, API keys, TLS."""

from __future__ import annotations

import http.client
import importlib
import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from hasten.bundle import Bundle
from support.server_operations import (
    BODY,
    LEAN,
    QUIET,
    TEXT,
    Running,
    asked,
    predict,
)

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
pytestmark = pytest.mark.usefixtures("workers")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return _make_certificate(tmp_path_factory.mktemp("tls"))


def _make_certificate(folder: Path) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which creates the certificate, is not installed")
    pair = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", pair[0], "-keyout", pair[1]],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return pair


def test_memory_limit_below_the_model_is_an_error(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--max-memory", "20MB", form="text") as server:
        assert server.end() == 2
        assert "before the first request, and its memory limit is 20 MB" in server.log
        assert "raise the limit" in server.log


def test_tls_serves_http_and_grpc(classifier_bundle: Bundle, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    health = importlib.import_module("grpc_health.v1.health_pb2")
    stubs = importlib.import_module("grpc_health.v1.health_pb2_grpc")
    cert, key = certificate
    words = (str(classifier_bundle.path), *LEAN, "--tls-cert", str(cert), "--tls-key", str(key))
    with Running(tmp_path, *words) as server:
        port = server.ready().port
        context = ssl.create_default_context(cafile=cert)
        connection = server.connect(context, port)
        assert asked(connection, "/predict", BODY)[0] == 200
        connection.close()
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", trusted) as channel:
            answer = stubs.HealthStub(channel).Check(health.HealthCheckRequest(), timeout=60)
            assert answer.status == health.HealthCheckResponse.SERVING
        with pytest.raises((OSError, http.client.HTTPException)):
            server.ask("/v2/health/live", port=port)  # without TLS
        with pytest.raises(ssl.SSLCertVerificationError):
            asked(server.connect(ssl.create_default_context(), port), "/v2/health/live")
        assert server.stop() == 0


def _copy(pair: tuple[Path, Path], folder: Path) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    cert, key = (Path(shutil.copy(file, folder)) for file in pair)
    return cert, key


def _peer_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=60)


def test_certificate_is_reloaded_without_closing_connections(
    classifier_bundle: Bundle, certificate: tuple[Path, Path], other_certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    grpc = pytest.importorskip("grpc")
    old, new = certificate[0].read_text(), other_certificate[0].read_text()
    cert, key = _copy(certificate, tmp_path / "tls")
    words = (str(classifier_bundle.path), *LEAN, "--tls-cert", str(cert), "--tls-key", str(key))
    with Running(tmp_path, *words) as server:
        port = server.ready().port
        connection = server.connect(ssl.create_default_context(cafile=certificate[0]), port)
        assert asked(connection, "/predict", BODY)[0] == 200
        assert ssl.PEM_cert_to_DER_cert(_peer_certificate(port)) == ssl.PEM_cert_to_DER_cert(old)
        cert.write_text("no certificate")
        server.signal(signal.SIGHUP)
        server.said("the TLS certificate was not reloaded")
        assert ssl.PEM_cert_to_DER_cert(_peer_certificate(port)) == ssl.PEM_cert_to_DER_cert(old)
        _copy(other_certificate, tmp_path / "tls")
        server.signal(signal.SIGHUP)
        server.said("reloaded the TLS certificate")
        for each in (port, server.grpc_port):
            assert ssl.PEM_cert_to_DER_cert(_peer_certificate(each)) == ssl.PEM_cert_to_DER_cert(new)
        assert asked(connection, "/predict", BODY)[0] == 200
        connection.close()
        trusted = grpc.ssl_channel_credentials(other_certificate[0].read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", trusted) as channel:
            grpc.channel_ready_future(channel).result(60)
        assert server.stop() == 0


def test_client_certificates_are_required(
    classifier_bundle: Bundle, certificate: tuple[Path, Path], other_certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    grpc = pytest.importorskip("grpc")
    cert, key = certificate
    words = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(other_certificate[0]))
    with Running(tmp_path, str(classifier_bundle.path), *LEAN, *words) as server:
        port, roots = server.ready().port, cert.read_bytes()
        context = ssl.create_default_context(cafile=cert)
        context.load_cert_chain(*other_certificate)
        with closing(server.connect(context, port)) as connection:
            assert asked(connection, "/predict", BODY)[0] == 200
        for chain in (None, certificate):
            stranger = ssl.create_default_context(cafile=cert)
            if chain is not None:
                stranger.load_cert_chain(*chain)
            with (
                closing(server.connect(stranger, port)) as connection,
                pytest.raises((OSError, http.client.HTTPException)),
            ):
                asked(connection, "/v2/health/live")
        known = grpc.ssl_channel_credentials(
            roots, other_certificate[1].read_bytes(), other_certificate[0].read_bytes()
        )
        for credentials, is_accepted in ((known, True), (grpc.ssl_channel_credentials(roots), False)):
            with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
                ready = grpc.channel_ready_future(channel)
                if is_accepted:
                    ready.result(60)
                else:
                    live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
                    with pytest.raises(grpc.RpcError):
                        live(b"", timeout=60)
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tls-client-ca", "no.pem"], "a certificate and its key"),
        (["--tls-cert", "no.pem"], "a certificate and its key"),
        (["--tls-cert", "no.pem", "--tls-key", "no.pem"], "cannot load "),
        (["--tls-cert", "no.pem", "--tls-key", "nowhere.pem"], "--tls-key: there is no file"),
    ],
)
def test_invalid_tls_files_are_rejected(
    classifier_bundle: Bundle, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "no.pem").write_text("no certificate")
    arguments = [word if word.startswith("-") else str(tmp_path / word) for word in words]
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, *arguments) as server:
        assert server.end() == 2
        assert message in server.lines[-1]["message"]


def test_api_keys_are_compared_with_their_scheme(tmp_path: Path) -> None:
    from hasten.core.errors import PlanError, UnauthorizedError
    from hasten.server.auth import ApiKeys

    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n")
    keys = ApiKeys.read(file, {"HASTEN_API_KEYS": "second, third"})
    for header in ("Bearer first", "bearer second", "BEARER  third "):
        keys.check(header)
    for header in ("", "first", "Bearer", "Bearer ", "Bearer firs", "Bearer first2", "Basic first", "Bearer # ours"):
        with pytest.raises(UnauthorizedError):
            keys.check(header)
    ApiKeys.read(None, {}).check("")  # no key is required
    for content, message in (("# none\n", "contains no key"), ("schlüssel\n", "ASCII")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(PlanError, match=message):
            ApiKeys.read(file, {})


def test_silent_tls_client_is_disconnected(
    classifier_bundle: Bundle, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    words = ("--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]), "--read-timeout", "0.3s")
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, *words) as server:
        with socket.create_connection(("127.0.0.1", server.ready().port), timeout=60) as silent:
            assert silent.recv(1) == b""
        assert server.stop() == 0


def test_limits_are_enforced(classifier_bundle: Bundle, tmp_path: Path, workers: int) -> None:
    limits = (
        "--max-body",
        "2KB",
        "--max-client-batch-size",
        "3",
        "--max-request-tokens",
        "20",
        "--max-connections",
        "4",
    )
    times = ("--read-timeout", "0.3s", "--idle-timeout", "1s")
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, *limits, *times) as server:
        port = server.ready().port
        for inputs, words in (
            ("a" * 5000, "larger than 2048 bytes"),
            ([TEXT] * 4, "the request has 4 items; the limit is 3"),
            (["so " * 15] * 2, "tokens; the limit is 20"),
        ):
            # Closed, so that it does not count as one of the four below.
            status, answer = server.ask("/predict", {"inputs": inputs}, port=port, Connection="close")
            assert (status, words in answer) == (413, True), answer
        with ExitStack() as opened:
            connect = partial(socket.create_connection, ("127.0.0.1", port), timeout=60)
            answers = [client.recv(2**16) for client in [opened.enter_context(connect()) for _ in range(5)]]
            # The others are closed a second later. Each of four workers accepts one connection.
            rejected = [answer for answer in answers if answer]
            assert all(answer.startswith(b"HTTP/1.1 503") for answer in rejected)
            assert len(rejected) == 1 if workers == 1 else len(rejected) >= 1
            slow = opened.enter_context(connect())
            slow.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\n")
            assert slow.recv(2**16).startswith(b"HTTP/1.1 408")  # a third of a second later
        assert predict(server, port=port) == 200


def test_request_past_its_deadline_gets_504(classifier_bundle: Bundle, tmp_path: Path) -> None:
    with Running(tmp_path, str(classifier_bundle.path), *QUIET, "--timeout", "0.000001s") as server:
        status, answer = server.ready().ask("/predict", BODY)
        assert (status, "deadline exceeded" in answer) == (504, True), answer
