"""Engine processes and the sessions of API workers in front of them: real processes, tiny bundles."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import DeadlineError, HastenError, PlanError, StageError, UnavailableError
from hasten.core.tensors import Batch
from hasten.predictor import Predictor, open_predictor
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.processes import handshake
from hasten.server.processes.remote_session import RemoteSession, connect
from hasten.server.processes.shared_batches import write_batch
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.encoder_engine import EngineObserver
from hasten.server.scheduling.lost_session import SessionLostError
from hasten.server.settings import Settings
from support.engine_process import EngineProcess
from support.faulty_backend import faulty_environment
from support.wait import wait_until

pytest.importorskip("prometheus_client", reason="serving needs hasten[serve]")
TEXTS = ("the cat sat on the mat", "a dog", "what a wonderful film, I would watch it again tomorrow")
NAME = "classifier"


@pytest.fixture
def directory() -> Iterator[Path]:
    """The private directory of sockets; short, since paths of sockets are limited."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def engine(directory: Path, classifier: Bundle) -> Iterator[EngineProcess]:
    process = EngineProcess(directory, instances=1)
    assert process.call("load", classifier.path, NAME, 1) is None
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def local(classifier: Bundle) -> Predictor:
    return open_predictor(classifier, None, RunOptions(1))


def open_model(bundle: Bundle, directory: Path, generation: int = 1, **options: Any) -> EncoderModel:
    """Open a model as an API worker does."""
    remote = connect(directory, options.pop("engines", [0]), NAME, generation, encoders=1, **options)
    return EncoderModel(NAME, bundle, Settings(), CoreScheduler(1), EngineObserver(), remote)


class SubmittedText:
    """A submitted text and its outputs."""

    def __init__(self, model: EncoderModel, text: Any = TEXTS[0], timeout_s: float = 60.0) -> None:
        self._done = threading.Event()
        self.answer: Any = None
        model.submit_payload(lambda: [text], lambda outputs, _: dict(outputs), self._take, timeout_s=timeout_s)

    def _take(self, answer: Any, _: Any) -> None:
        self.answer = answer
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        assert self._done.wait(60), "no answer"
        return self.answer


def assert_answered(submitted: Sequence[SubmittedText]) -> None:
    for request in submitted:
        assert not isinstance(request.wait(), HastenError), request.answer


def write(file: Path, content: object) -> None:
    """Create a file whole: the faulty backend looks for it all the time."""
    part = file.with_suffix(".part")
    part.write_text(str(content))
    part.replace(file)


@contextmanager
def serving(
    bundle: Bundle, directory: Path, folder: Path | None = None, *, index: int = 0, ends: bool = False, **settings: Any
) -> Iterator[EngineProcess]:
    """Run an engine process; the faulty backend looks for its files in the folder."""
    environment = {} if folder is None else faulty_environment(bundle, folder)
    process = EngineProcess(directory, index, environment, **({"instances": 1} | settings))
    assert process.call("load", bundle.path, NAME, 1) is None
    yield process
    if process.process.poll() is None:
        assert process.stop() == 0
    elif not ends:
        assert process.process.returncode == -signal.SIGKILL


def tokens_in_flight(model: EncoderModel) -> int:
    return model.engine._workers[0].load


# Answers


@pytest.mark.usefixtures("engine")
def test_outputs_equal_those_of_a_local_session(directory: Path, local: Predictor) -> None:
    session = RemoteSession(directory, 0, NAME, 1)
    assert session.spec == local.session.spec
    for texts in (TEXTS[:1], TEXTS, TEXTS * 40):
        encoded = local.encode(list(texts))
        outputs, wanted = session.run(encoded.batch), local.session.run(encoded.batch)
        assert set(outputs) == set(wanted)
        for name, value in wanted.items():
            assert outputs[name].dtype == value.dtype
            np.testing.assert_allclose(outputs[name], value, rtol=1e-5, atol=1e-5)
    session.close()


def test_requests_of_several_workers_get_their_own_answers(
    engine: EngineProcess, directory: Path, classifier: Bundle, local: Predictor
) -> None:
    models = [open_model(classifier, directory) for _ in range(3)]
    texts = [" ".join(TEXTS[0].split()[: 1 + index % 6]) for index in range(120)]
    submitted = [SubmittedText(models[index % 3], text) for index, text in enumerate(texts)]
    assert_answered(submitted)
    for request, text in zip(submitted, texts, strict=True):
        for name, value in local.outputs(local.encode([text])).items():
            np.testing.assert_allclose(request.answer[name], value, rtol=1e-5, atol=1e-5)
    wait_until(lambda: tokens_in_flight(models[0]) == 0)
    assert f'hasten_batch_rows_sum{{model="{NAME}"}} 120.0' in engine.call("metrics")
    for model in models:
        assert model.close(5)


@pytest.mark.usefixtures("engine")
def test_batch_larger_than_the_region_is_answered(directory: Path, local: Predictor) -> None:
    """Both the batch and the outputs make the region larger."""
    session = RemoteSession(directory, 0, NAME, 1)
    rows = 40_000
    batch = Batch.concatenate([local.encode(["a dog"]).batch] * rows)
    before = session._region._size
    outputs = session.run(batch)
    assert session._region._size > before
    (logits,) = (outputs[name] for name in outputs)
    assert logits.shape[0] == rows
    np.testing.assert_allclose(logits, np.repeat(logits[:1], rows, axis=0), rtol=1e-4, atol=1e-4)
    session.close()


def test_error_of_the_engine_process_keeps_its_class_and_message(
    directory: Path, faulty_bundle: Bundle, tmp_path: Path, local: Predictor
) -> None:
    with serving(faulty_bundle, directory, tmp_path):
        session = RemoteSession(directory, 0, NAME, 1)
        batch = local.encode([TEXTS[0]]).batch
        session.run(batch)
        write(tmp_path / "fail", batch.longest)
        with pytest.raises(StageError, match=r"^the model failed: RuntimeError$"):
            session.run(batch)
        (tmp_path / "fail").unlink()
        session.run(batch)
        session.close()


@pytest.mark.usefixtures("engine")
def test_worker_process_loads_neither_torch_nor_a_runtime(directory: Path, classifier: Bundle) -> None:
    program = """
import sys
from pathlib import Path
from hasten.bundle import open_bundle
from hasten.server.models.encoder_model import EncoderModel
from hasten.server.processes.remote_session import connect
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.encoder_engine import EngineObserver
from hasten.server.settings import Settings
bundle = open_bundle(Path(sys.argv[1]))
remote = connect(Path(sys.argv[2]), [0], "classifier", 1, encoders=1)
model = EncoderModel("classifier", bundle, Settings(), CoreScheduler(1), EngineObserver(), remote)
model.submit_payload(lambda: ["a dog"], lambda outputs, _: outputs, lambda answer, _: None)
assert model.close(5)
print([name for name in ("torch", "transformers", "onnxruntime", "openvino") if name in sys.modules])
"""
    command = [sys.executable, "-c", program, str(classifier.path), str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Engine processes that end


def test_requests_survive_the_end_of_the_engine_process(directory: Path, faulty_bundle: Bundle, tmp_path: Path) -> None:
    with serving(faulty_bundle, directory, tmp_path) as process:
        model = open_model(faulty_bundle, directory, slots=2)
        assert_answered([SubmittedText(model, text) for text in TEXTS])
        (tmp_path / "hang").touch()
        submitted = [SubmittedText(model, text) for text in TEXTS * 20]
        wait_until((tmp_path / "hangs").exists)
        process.kill()
        (tmp_path / "hang").unlink()
        wait_until(lambda: model.engine.is_recovering)
        assert model.engine.fault() is None
        assert not any(request.is_done for request in submitted)
        with serving(faulty_bundle, directory, tmp_path):
            assert_answered(submitted)
            wait_until(lambda: not model.engine.is_recovering)
            assert model.close(5)


def test_idle_sessions_find_the_new_engine_process(directory: Path, classifier: Bundle) -> None:
    """A batch that no process has received is not counted as lost, however many sessions were."""
    with serving(classifier, directory) as process:
        model = open_model(classifier, directory, slots=4)
        process.kill()
    with serving(classifier, directory):
        assert_answered([SubmittedText(model, text) for text in TEXTS * 3])
        assert model.close(5)


def test_deadlines_are_enforced_while_there_is_no_engine_process(directory: Path, classifier: Bundle) -> None:
    with serving(classifier, directory) as process:
        model = open_model(classifier, directory)
        process.kill()
    late, later = SubmittedText(model, timeout_s=0.2), SubmittedText(model)
    wait_until(lambda: model.engine.expire(time.monotonic()) or late.is_done)
    assert isinstance(late.wait(), DeadlineError)
    assert not later.is_done
    assert not model.close()
    assert isinstance(later.wait(), UnavailableError)


def test_request_that_ends_the_engine_process_twice_fails_alone(
    directory: Path, faulty_bundle: Bundle, tmp_path: Path, local: Predictor
) -> None:
    """The requests that ran beside it are answered."""
    # As long as none of the rows that the process warms up and tests itself with.
    poison, fine = "a " * 39, TEXTS[0]
    write(tmp_path / "die", local.encode([poison]).batch.longest)
    submitted: list[SubmittedText] = []
    for deaths in range(3):
        with serving(faulty_bundle, directory, tmp_path, ends=deaths < 2) as process:
            if not deaths:
                model = open_model(faulty_bundle, directory, slots=1)
                submitted = [SubmittedText(model, text) for text in (fine, poison, fine, fine)]
            if deaths < 2:
                wait_until(lambda: process.process.poll() is not None)
            else:
                failed = submitted.pop(1).wait()
                assert_answered(submitted)
                assert model.close(5)
    assert isinstance(failed, StageError)
    assert failed.message == "the engine process ended twice while it ran this request"


def test_session_rejects_another_bundle_of_the_same_name(
    directory: Path, classifier: Bundle, faulty_bundle: Bundle, tmp_path: Path, local: Predictor
) -> None:
    with serving(classifier, directory):
        session = RemoteSession(directory, 0, NAME, 1)
    with pytest.raises(SessionLostError):
        session.run(local.encode([TEXTS[0]]).batch)
    with serving(faulty_bundle, directory, tmp_path):
        assert not session.reconnect()
    with serving(classifier, directory):
        assert session.reconnect()
        session.close()


def test_least_loaded_engine_process_runs_the_next_batch(
    directory: Path, faulty_bundle: Bundle, tmp_path: Path
) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    with serving(faulty_bundle, directory, first), serving(faulty_bundle, directory, second, index=1):
        model = open_model(faulty_bundle, directory, engines=[0, 1], slots=2)
        for folder in (first, second):
            (folder / "hang").touch()
            hangs = folder / "hangs"
            # Requests go to both processes until one of them is stuck.
            stuck = SubmittedText(model)
            while not hangs.exists():
                if stuck.is_done:
                    stuck = SubmittedText(model)
            for _ in range(10):
                assert_answered([SubmittedText(model)])
            assert not stuck.is_done
            (folder / "hang").unlink()
            assert_answered([stuck])
            hangs.unlink()
            wait_until(lambda: all(worker.load == 0 for worker in model.engine._workers))
        assert model.close(5)


# Workers that end, and models that change


def test_batches_of_a_lost_worker_are_cancelled(
    directory: Path, faulty_bundle: Bundle, tmp_path: Path, local: Predictor
) -> None:
    with serving(faulty_bundle, directory, tmp_path) as process:
        model = open_model(faulty_bundle, directory)
        other = connect(directory, [0], NAME, 1, encoders=1, slots=2).sessions
        (tmp_path / "hang").touch()
        batch = local.encode([TEXTS[0]]).batch
        for session in other:
            assert isinstance(session, RemoteSession)
            assert session._socket is not None
            session._socket.sendall(write_batch(session._region, session._format, batch, 1, is_suspect=False))
        wait_until(lambda: other[0].load == 2 * batch.tokens)  # type: ignore[attr-defined]
        for session in other:
            session.close()
        wait_until(lambda: tokens_in_flight(model) == 0)
        (tmp_path / "hang").unlink()
        assert_answered([SubmittedText(model, text) for text in TEXTS])
        assert process.call("fault") is None
        assert model.close(5)


def test_generations_serve_side_by_side(directory: Path, classifier: Bundle) -> None:
    with serving(classifier, directory) as process:
        with pytest.raises(UnavailableError, match=r"has not loaded 'classifier' \(generation 2\)"):
            RemoteSession(directory, 0, NAME, 2)
        old = open_model(classifier, directory)
        assert process.call("load", classifier.path, NAME, 2) is None
        new = open_model(classifier, directory, generation=2)
        assert_answered([SubmittedText(old), SubmittedText(new)])
        assert old.close(5)
        assert process.call("unload", NAME, 1, 5.0) is True
        assert_answered([SubmittedText(new)])
        with pytest.raises(UnavailableError):
            RemoteSession(directory, 0, NAME, 1)
        assert process.call("unload", NAME, 1, 5.0)["error"] == "PlanError"
        assert new.close(5)


def test_unloaded_model_disconnects_its_sessions(directory: Path, classifier: Bundle, local: Predictor) -> None:
    with serving(classifier, directory) as process:
        session = RemoteSession(directory, 0, NAME, 1)
        assert process.call("unload", NAME, 1) is True
        with pytest.raises(SessionLostError) as caught:
            session.run(local.encode([TEXTS[0]]).batch)
        assert not caught.value.was_running
        assert not session.reconnect()


def test_stalled_session_is_a_fault_of_the_engine_process_only(
    directory: Path, faulty_bundle: Bundle, tmp_path: Path
) -> None:
    with serving(faulty_bundle, directory, tmp_path, stall_timeout=0.01) as process:
        model = open_model(faulty_bundle, directory)
        assert_answered([SubmittedText(model)])
        assert process.call("can_serve") is True
        (tmp_path / "hang").touch()
        stuck = SubmittedText(model)
        fault = wait_until(lambda: process.call("fault"))
        assert fault == f"a session of {NAME} has stalled"
        assert process.call("can_serve") is False
        assert (model.engine.stalled_for_s(time.monotonic() + 600), model.engine.fault()) == (0.0, None)
        (tmp_path / "hang").unlink()
        assert_answered([stuck])
        assert model.close(5)


def test_session_that_fails_for_a_while_recovers(directory: Path, faulty_bundle: Bundle, tmp_path: Path) -> None:
    """A worker does not count its sessions as broken: only the engine process knows."""
    with serving(faulty_bundle, directory, tmp_path, instances=1) as process:
        model = open_model(faulty_bundle, directory, slots=1)
        write(tmp_path / "fail", "")
        assert isinstance(SubmittedText(model).wait(), StageError)
        wait_until(lambda: process.call("fault"))
        assert model.engine.fault() is None
        (tmp_path / "fail").unlink()
        wait_until(lambda: not model.engine.is_recovering)
        assert_answered([SubmittedText(model)])
        assert model.close(5)


# Peers that do not keep to the protocol


def test_directory_that_others_may_enter_is_rejected(directory: Path) -> None:
    from hasten.server.processes.batch_receiver import BatchReceiver

    directory.chmod(0o755)
    with pytest.raises(PlanError, match="is not a private directory"):
        BatchReceiver(directory, 0, lambda *_: None)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x04\0\0\0null", b"\x02\0\0\0{}", b"\x02\0\0\0{", b""])
@pytest.mark.usefixtures("engine")
def test_invalid_handshake_closes_its_connection_only(directory: Path, local: Predictor, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(handshake.socket_path(directory, 0))
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(30)
        assert peer.recv(1) == b""
    session = RemoteSession(directory, 0, NAME, 1)
    session.run(local.encode([TEXTS[0]]).batch)
    session.close()


@pytest.mark.parametrize(
    "message",
    [
        struct.pack("<IIIBB2x", 1, 1, 2**23, 0, 0),  # more than the region has
        struct.pack("<IIIBB2x", 1, 1, 2**31, 0, 0),
        struct.pack("<IIIBB2x", 1, 0, 0, 0, 0),
        struct.pack("<IIIBB2x", 1, 5, 4, 0, 0),  # more rows than tokens
        struct.pack("<IIIBB2x", 1, 1, 5, 0, 0),  # lengths that do not add up
        struct.pack("<IIIBB2x", 1, 1, 4, 9, 0),  # unknown type
        b"short",
        b"long" * 10,
    ],
)
def test_invalid_batch_closes_its_connection_only(
    engine: EngineProcess, directory: Path, local: Predictor, message: bytes
) -> None:
    session, other = (RemoteSession(directory, 0, NAME, 1) for _ in range(2))
    batch = local.encode(["a dog"]).batch
    assert batch.tokens == 4
    write_batch(session._region, session._format, batch, 1, is_suspect=False)
    assert session._socket is not None
    session._socket.sendall(message)
    assert session._socket.recv(1) == b""
    other.run(batch)
    assert engine.call("fault") is None
    for each in (session, other):
        each.close()
