"""Check a repository on a running tritonserver: that it loads, answers like the reference, and under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hasten.backends import PaddedSession, RunOptions
from hasten.bundle import Bundle
from hasten.core.batching import batch_in_order
from hasten.core.errors import UnsupportedError
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Verdict
from hasten.core.tensors import ATTENTION_MASK, Batch, Layout, Outputs, SessionSpec, gather, pad, unpad
from hasten.core.variant import CPU, Precision, Variant
from hasten.deploy.tritonserver.client import Array, Client, Statistics
from hasten.deploy.tritonserver.model_directory import Repository
from hasten.deploy.tritonserver.models.generate import SAMPLING
from hasten.families import family_of_bundle
from hasten.generation.generator import open_generator
from hasten.measure.encoder_gate import FP32_TOLERANCE, batch_sizes, expect, verify
from hasten.measure.generation_reference import prompts_of, stored_reference
from hasten.measure.verify_bundle import verify_bundle
from hasten.predictor import Predictor
from hasten.stress.client import ClientPool, StressTarget
from hasten.tasks import Row

READY = "READY"
CLIENTS = 32
# The number of reference rows sent to the inference model, and the duration of the load test.
_ROWS, _LOAD_S = 64, 5.0
# The maximum number of new tokens that a generative model is asked for.
_MAX_NEW_TOKENS = 32
# The interval between two reads of the statistics and their maximum number: other clients may use the server, too.
_POLL_S, _MAX_POLLS = 0.1, 50
# Scores of reduced precision depend on the shape of the batch that holds the row.
_REDUCED_TOLERANCE = 0.05
_OK = 200
_NO_BACKEND, _WAITING = "unable to find backend library", "waiting for"
# The errors of a configuration that names the first GPU, and of one for all GPUs.
_NO_GPU = ("invalid or unsupported gpu id", "has kind KIND_GPU but no GPUs are available")
# Two labels with equal scores may swap between batches of different shapes.
_MIN_SAME_ANSWERS = 0.98


@dataclass(frozen=True, slots=True)
class Load:
    """The result of the load test, in which each client sends its next request when the last is answered."""

    clients: int
    requests: int
    failed: int
    per_second: float
    p50_ms: float
    p99_ms: float
    # The rows that the model itself computed for these requests, and the batches in which they ran.
    rows: int
    executions: int


@dataclass(frozen=True, slots=True)
class Check:
    """The result of checking a repository."""

    server: str
    ready: tuple[str, ...]
    # The reason for each model that is not ready.
    not_ready: dict[str, str]
    # The model compared with the bundle's reference answers; for generation, the variant as it runs on this machine.
    verdict: Verdict | None = None
    # The share of texts whose answer equals the answer decoded from the model's outputs or, for generation, the text
    # that the variant generates on this machine.
    same_answers: float | None = None
    load: Load | None = None

    @property
    def is_accurate(self) -> bool:
        """Return whether the model passes the bundle's gate and the answers to texts are the same."""
        if self.verdict is None or self.same_answers is None:
            return False
        return self.verdict.passed and self.same_answers >= _MIN_SAME_ANSWERS

    @property
    def is_missing_backend(self) -> bool:
        """Return whether the only failure is a backend that this server does not have."""
        return self._is_only(_NO_BACKEND)

    @property
    def is_missing_gpu(self) -> bool:
        """Return whether the only failure is that this server has no GPU."""
        return self._is_only(*_NO_GPU)

    def _is_only(self, *causes: str) -> bool:
        reasons = [reason for reason in self.not_ready.values() if not reason.startswith(_WAITING)]
        return bool(reasons) and all(any(cause in reason for cause in causes) for reason in reasons)


def is_address(text: str) -> bool:
    """Return whether the text is an address such as http://127.0.0.1:8000, with or without the protocol."""
    return "://" in text or bool(re.fullmatch(r"[\w.-]+:\d+", text))


def check(bundle: Bundle, repository: Repository, url: str, progress: Progress, seconds: float = _LOAD_S) -> Check:
    """Check a repository on the server at `url`, then load it for some seconds."""
    with Client(url) as client:
        server, index = client.version(), client.index()
        states = {name: index.get(name, ("", "unknown to the server")) for name in repository.names}
        ready = tuple(name for name, (state, _) in states.items() if state == READY)
        # An ensemble has neither a state nor a reason if one of its models does not load.
        waiting = f"{_WAITING} {repository.model}"
        not_ready = {name: reason or waiting for name, (state, reason) in states.items() if state != READY}
        if not_ready:
            return Check(server, ready, not_ready)
        comparison = family_of_bundle(bundle).compare_tritonserver(client, bundle, repository, progress)
        before = _settled_statistics(client, repository.model)
        with step(progress, f"{CLIENTS} clients"):
            times, failed, duration_s = asyncio.run(_run_load(url, comparison, seconds))
        after = _settled_statistics(client, repository.model)
    latencies_ms = times or [float("nan")]
    load = Load(
        clients=CLIENTS,
        requests=len(times),
        failed=failed,
        per_second=(len(times) - failed) / duration_s,
        p50_ms=float(np.percentile(latencies_ms, 50)),
        p99_ms=float(np.percentile(latencies_ms, 99)),
        rows=after.rows - before.rows,
        executions=after.executions - before.executions,
    )
    return Check(server, ready, not_ready, comparison.verdict, comparison.same_answers, load)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict about the server's answers, and the requests of the load test."""

    verdict: Verdict
    same_answers: float
    path: str
    bodies: Sequence[bytes]


def compare_encoder(client: Client, bundle: Bundle, repository: Repository, progress: Progress) -> Comparison:
    """Judge the server's model like a variant, and compare its answers to texts with those decoded from its outputs."""
    remote = Predictor(bundle.manifest.task, bundle.tokenizer(), _RemoteSession(client, bundle, repository))
    reference = bundle.reference()
    expected = expect(remote, reference.rows, progress, reference.outputs, bundle.manifest.gate.metric)
    sizes = batch_sizes(bundle, repository.variant)
    verdict = verify(remote, repository.variant, expected, bundle.manifest.gate, progress, sizes)
    rows = _request_rows(repository, reference.rows)
    with step(progress, "compare answers"):
        same = _same_answers(client, remote, repository, rows[:_ROWS])
    bodies = [_json_body(repository, row) for row in rows]
    return Comparison(verdict, same, f"/v2/models/{repository.inference}/infer", bodies)


def compare_generator(client: Client, bundle: Bundle, repository: Repository, progress: Progress) -> Comparison:
    """Judge the variant on this machine and compare the server's texts with its own: the server returns no logits."""
    (candidate,) = verify_bundle(bundle, None, Gate(), [repository.variant], None, progress)
    assert candidate.verdict is not None
    prompts = [row["text"] for row in prompts_of(stored_reference(bundle), bundle.tokenizer())]
    sampling: dict[str, Any] = {"max_tokens": _MAX_NEW_TOKENS, "temperature": 0}
    text, answer = repository.inputs[0].name, repository.outputs[0].name
    bodies = [msgspec.json.encode({text: prompt, SAMPLING: json.dumps(sampling)}) for prompt in prompts]
    with step(progress, "compare texts"), open_generator(bundle, repository.variant, RunOptions()) as generator:
        expected = [result["generated_text"] for (result,) in generator(prompts, return_full_text=False, **sampling)]
        texts = [client.generate(repository.inference, body)[answer] for body in bodies]
    same = sum(map(operator.eq, texts, expected)) / len(prompts)
    return Comparison(candidate.verdict, same, f"/v2/models/{repository.inference}/generate", bodies)


class _RemoteSession(PaddedSession):
    """A session that runs the server's model, so that it can be verified like any other."""

    def __init__(self, client: Client, bundle: Bundle, repository: Repository) -> None:
        self._client, self._repository = client, repository
        variant = Variant.parse(repository.variant)
        self.spec = SessionSpec(bundle.manifest.signature, Layout.PADDED, CPU, variant.precision)
        self._max_rows = bundle.report.plan.shapes.batch.max

    def run_padded(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        if len(batch) > self._max_rows:
            parts = [(rows, self.run_padded(batch.take(rows))) for rows in batch_in_order(len(batch), self._max_rows)]
            return gather(parts, batch, signature)
        feeds = {name: feed for name, feed in pad(batch, signature).items() if name in self._repository.tokens}
        outputs = self._client.infer(self._repository.model, feeds, [spec.name for spec in signature.outputs])
        return unpad(outputs, batch, signature)


def _settled_statistics(client: Client, model: str) -> Statistics:
    """Return the statistics when they stop changing: tritonserver counts a request after answering it."""
    now = client.statistics(model)
    for _ in range(_MAX_POLLS):
        time.sleep(_POLL_S)
        before, now = now, client.statistics(model)
        if now == before:
            break
    return now


def _request_rows(repository: Repository, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that have all required fields, reduced to the inputs of the inference model."""
    names = {text.name.lower(): text.is_optional for text in repository.inputs}
    required = [name for name, is_optional in names.items() if not is_optional]
    usable: list[Row] = []
    for row in rows:
        if isinstance(words := row.get("tokens"), list):
            row = {"text": " ".join(words)}
        has_pair = row.get("text_pair") is not None
        if all(row.get(name) is not None for name in required) and (not has_pair or "text_pair" in names):
            usable.append({name: row[name] for name in names if row.get(name) is not None})
    if not usable:
        raise UnsupportedError(f"no row of the bundle's reference has {' and '.join(required)}")
    return usable


def _strings(repository: Repository, row: Row) -> dict[str, Array]:
    """Return the inputs of a request for one row; lists are encoded as JSON."""
    texts = {
        name: text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for name, text in row.items()
    }
    shape = (1,) if repository.max_rows == 0 else (1, 1)
    return {name.upper(): np.array([text], object).reshape(shape) for name, text in texts.items()}


def _same_answers(client: Client, remote: Predictor, repository: Repository, rows: Sequence[Row]) -> float:
    task, options = remote.task, remote.task.options(remote.spec, {})
    names = [output.name for output in repository.outputs]
    is_exact = remote.session.spec.precision == Precision.FP32
    tolerance = FP32_TOLERANCE if is_exact else _REDUCED_TOLERANCE
    same = 0
    for row in rows:
        encoded = remote.encode([row])
        outputs = remote.outputs(encoded)
        response = client.infer(repository.inference, _strings(repository, row), names)
        if repository.is_raw:
            expected: Any = [value.tolist() for value in outputs.values()]
            mask = response[ATTENTION_MASK][0] != 0 if ATTENTION_MASK in response else None
            tensors = [response[name] for name in names if name != ATTENTION_MASK]
            answer: Any = [(value[0][mask] if mask is not None else value).tolist() for value in tensors]
        else:
            decoded = task.decode(outputs, encoded, options)
            expected = msgspec.json.decode(msgspec.json.encode(decoded, enc_hook=lambda value: value.tolist()))
            answer = [msgspec.json.decode(text) for text in response[names[0]].reshape(-1)]
        same += are_close(answer, expected, tolerance)
    return same / len(rows)


def are_close(answer: object, expected: object, tolerance: float) -> bool:
    """Return whether two answers are equal, except that numbers may differ by the tolerance.

    The tolerance is absolute for expected numbers up to 1, and relative beyond.
    """
    if isinstance(answer, float | int) and isinstance(expected, float | int):
        return abs(answer - expected) <= tolerance * max(1.0, abs(expected))
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(are_close, answer, expected, itertools.repeat(tolerance)))
    if isinstance(answer, Mapping) and isinstance(expected, Mapping):
        has_same_keys = answer.keys() == expected.keys()
        return has_same_keys and all(are_close(answer[key], expected[key], tolerance) for key in answer)
    return answer == expected


async def _run_load(url: str, comparison: Comparison, seconds: float) -> tuple[list[float], int, float]:
    """Return the latency of each request in ms, the number of failures, and the duration in seconds."""
    target = StressTarget.parse(url, comparison.path, {})
    requests = [target.request(body) for body in comparison.bodies]
    clients, counter = ClientPool(target, timeout_s=60.0), itertools.count()
    times: list[float] = []
    failed = 0
    begin = time.perf_counter()

    async def send_requests() -> None:
        nonlocal failed
        while time.perf_counter() - begin < seconds:
            status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            start = time.perf_counter()
            clients.ask(requests[next(counter) % len(requests)], status.set_result)
            failed += await status != _OK
            times.append(1e3 * (time.perf_counter() - start))

    await asyncio.gather(*(send_requests() for _ in range(CLIENTS)))
    duration_s = time.perf_counter() - begin
    await clients.close()
    return times, failed, duration_s


def _json_body(repository: Repository, row: Row) -> bytes:
    inputs = [
        {"name": name, "shape": list(value.shape), "datatype": "BYTES", "data": value.reshape(-1).tolist()}
        for name, value in _strings(repository, row).items()
    ]
    return msgspec.json.encode({"inputs": inputs})
