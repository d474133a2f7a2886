"""A repository on a real tritonserver: whether it loads, answers like the original, and bears many clients."""

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
from hasten.core.batching import in_order
from hasten.core.errors import UnsupportedError
from hasten.core.plan import Gate
from hasten.core.progress import Progress, step
from hasten.core.report import Verdict
from hasten.core.tensors import ATTENTION_MASK, Batch, Layout, Outputs, SessionSpec, gather, pad, unpad
from hasten.core.variant import CPU, Precision, Variant
from hasten.deploy.tritonserver.client import Array, Client, Statistics
from hasten.deploy.tritonserver.models.generate import SAMPLING
from hasten.deploy.tritonserver.options import Repository
from hasten.generation.generator import open_generator
from hasten.measure.reverify import judged_rows, reverify
from hasten.measure.verify import FP32_TOLERANCE, batch_sizes, expect, verify
from hasten.predictor import Predictor
from hasten.stress.client import Clients, Target
from hasten.tasks import Row

READY = "READY"
CLIENTS = 32
# Rows of the reference that the inference model is asked, and how long clients ask it.
_ROWS, _SECONDS = 64, 5.0
# That a model that writes is asked for.
_TOKENS = 32
# Between two looks at what was counted, and how many at most: others may ask it too.
_SETTLED_S, _LOOKS = 0.1, 50
# Scores of reduced precision depend on the shape of the batch that a row came in.
_REDUCED_TOLERANCE = 0.05
_OK = 200
_NO_BACKEND, _WAITING = "unable to find backend library", "it waits for"
# Of a configuration that names the first, and of one for all there are.
_NO_GPU = ("invalid or unsupported gpu id", "has kind KIND_GPU but no GPUs are available")
# Two labels that fit equally well may change places between batches of another shape.
_MOST_ALIKE = 0.98


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that ask again as soon as they are answered."""

    clients: int
    requests: int
    failed: int
    per_second: float
    p50_ms: float
    p99_ms: float
    # Of the model itself: how many rows those requests were, and in how many batches they ran.
    rows: int
    executions: int


@dataclass(frozen=True, slots=True)
class Check:
    server: str
    ready: tuple[str, ...]
    # Why a model is not.
    not_ready: dict[str, str]
    # The model against the bundle's reference answers; of one that writes, its variant as it runs here.
    verdict: Verdict | None = None
    # Of texts asked from end to end, the share that is answered as the task answers from the model's own outputs, or
    # as the variant writes here.
    same_answers: float | None = None
    load: Load | None = None

    @property
    def is_right(self) -> bool:
        """Whether model and texts are answered as the bundle's gate wants it."""
        if self.verdict is None or self.same_answers is None:
            return False
        return self.verdict.passed and self.same_answers >= _MOST_ALIKE

    @property
    def is_missing_backend(self) -> bool:
        """Whether everything was accepted, but for a library that this server does not have."""
        return self._is_only(_NO_BACKEND)

    @property
    def is_missing_gpu(self) -> bool:
        return self._is_only(*_NO_GPU)

    def _is_only(self, *why: str) -> bool:
        reasons = [reason for reason in self.not_ready.values() if not reason.startswith(_WAITING)]
        return bool(reasons) and all(any(one in reason for one in why) for reason in reasons)


def is_address(where: str) -> bool:
    """http://127.0.0.1:8000, or the same without the protocol."""
    return "://" in where or bool(re.fullmatch(r"[\w.-]+:\d+", where))


def check(bundle: Bundle, repository: Repository, url: str, progress: Progress, seconds: float = _SECONDS) -> Check:
    with Client(url) as client:
        server, index = client.version(), client.index()
        states = {name: index.get(name, ("", "the server does not know it")) for name in repository.names}
        ready = tuple(name for name, (state, _) in states.items() if state == READY)
        # An ensemble whose model does not load has neither a state nor a reason.
        waiting = f"{_WAITING} {repository.model}"
        not_ready = {name: reason or waiting for name, (state, reason) in states.items() if state != READY}
        if not_ready:
            return Check(server, ready, not_ready)
        prove = _answered if bundle.manifest.generation is None else _written
        proof = prove(client, bundle, repository, progress)
        before = _settled(client, repository.model)
        with step(progress, f"{CLIENTS} clients"):
            times, failed, took_s = asyncio.run(_load(url, proof, seconds))
        after = _settled(client, repository.model)
    some = times or [float("nan")]
    load = Load(
        clients=CLIENTS,
        requests=len(times),
        failed=failed,
        per_second=(len(times) - failed) / took_s,
        p50_ms=float(np.percentile(some, 50)),
        p99_ms=float(np.percentile(some, 99)),
        rows=after.rows - before.rows,
        executions=after.executions - before.executions,
    )
    return Check(server, ready, not_ready, proof.verdict, proof.same_answers, load)


@dataclass(frozen=True, slots=True)
class _Proof:
    """What the server answered, judged, and with what clients ask for more of it."""

    verdict: Verdict
    same_answers: float
    path: str
    bodies: Sequence[bytes]


def _answered(client: Client, bundle: Bundle, repository: Repository, progress: Progress) -> _Proof:
    remote = Predictor(bundle.manifest.task, bundle.tokenizer(), _Remote(client, bundle, repository))
    reference = bundle.reference()
    expected = expect(remote, reference.rows, progress, reference.outputs, bundle.manifest.gate.metric)
    sizes = batch_sizes(bundle, repository.variant)
    verdict = verify(remote, repository.variant, expected, bundle.manifest.gate, progress, sizes)
    asked = _askable(repository, reference.rows)
    with step(progress, "ask texts"):
        same = _same_answers(client, remote, repository, asked[:_ROWS])
    bodies = [_json_body(repository, row) for row in asked]
    return _Proof(verdict, same, f"/v2/models/{repository.inference}/infer", bodies)


def _written(client: Client, bundle: Bundle, repository: Repository, progress: Progress) -> _Proof:
    """Logits never leave a model that writes: the variant is judged here, and the server must write the same texts."""
    (candidate,) = reverify(bundle, None, Gate(), [repository.variant], None, progress)
    assert candidate.verdict is not None
    prompts = [row["text"] for row in judged_rows(bundle, None)]
    sampling: dict[str, Any] = {"max_tokens": _TOKENS, "temperature": 0}
    text, answer = repository.inputs[0].name, repository.outputs[0].name
    bodies = [msgspec.json.encode({text: prompt, SAMPLING: json.dumps(sampling)}) for prompt in prompts]
    with step(progress, "ask texts"), open_generator(bundle, repository.variant, RunOptions()) as here:
        expected = [one["generated_text"] for (one,) in here(prompts, return_full_text=False, **sampling)]
        found = [client.generate(repository.inference, body)[answer] for body in bodies]
    same = sum(map(operator.eq, found, expected)) / len(prompts)
    return _Proof(candidate.verdict, same, f"/v2/models/{repository.inference}/generate", bodies)


class _Remote(PaddedSession):
    """The server's model as a session, so that it is judged like any other."""

    def __init__(self, client: Client, bundle: Bundle, repository: Repository) -> None:
        self._client, self._repository = client, repository
        variant = Variant.parse(repository.variant)
        self.spec = SessionSpec(bundle.manifest.signature, Layout.PADDED, CPU, variant.precision)
        self._max_rows = bundle.report.plan.shapes.batch.max

    def run_padded(self, batch: Batch) -> Outputs:
        signature = self.spec.signature
        if len(batch) > self._max_rows:
            parts = [(rows, self.run_padded(batch.take(rows))) for rows in in_order(len(batch), self._max_rows)]
            return gather(parts, batch, signature)
        feeds = {name: feed for name, feed in pad(batch, signature).items() if name in self._repository.tokens}
        outputs = self._client.infer(self._repository.model, feeds, [spec.name for spec in signature.outputs])
        return unpad(outputs, batch, signature)


def _settled(client: Client, model: str) -> Statistics:
    """tritonserver counts a request after it has answered it."""
    now = client.statistics(model)
    for _ in range(_LOOKS):
        time.sleep(_SETTLED_S)
        before, now = now, client.statistics(model)
        if now == before:
            break
    return now


def _askable(repository: Repository, rows: Sequence[Row]) -> list[Row]:
    """Rows with what must be given and nothing but what is taken, labels aside."""
    names = {text.name.lower(): text.is_optional for text in repository.inputs}
    needed = [name for name, is_optional in names.items() if not is_optional]
    found: list[Row] = []
    for row in rows:
        if isinstance(words := row.get("tokens"), list):
            row = {"text": " ".join(words)}
        has_pair = row.get("text_pair") is not None
        if all(row.get(name) is not None for name in needed) and (not has_pair or "text_pair" in names):
            found.append({name: row[name] for name in names if row.get(name) is not None})
    if not found:
        raise UnsupportedError(f"no row of the bundle's reference has {' and '.join(needed)}")
    return found


def strings(repository: Repository, rows: Sequence[Row]) -> dict[str, Array]:
    """The inputs of a request for rows that have the same fields."""
    shape = (len(rows),) if repository.max_rows == 0 else (len(rows), 1)
    return {name.upper(): np.array([_text(row[name]) for row in rows], object).reshape(shape) for name in rows[0]}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _same_answers(client: Client, remote: Predictor, repository: Repository, rows: Sequence[Row]) -> float:
    task, options = remote.task, remote.task.options(remote.spec, {})
    names = [output.name for output in repository.outputs]
    is_exact = remote.session.spec.precision == Precision.FP32
    tolerance = FP32_TOLERANCE if is_exact else _REDUCED_TOLERANCE
    same = 0
    for row in rows:
        encoded = remote.encode([row])
        outputs = remote.outputs(encoded)
        found = client.infer(repository.inference, strings(repository, [row]), names)
        if repository.is_raw:
            expected: Any = [value.tolist() for value in outputs.values()]
            mask = found[ATTENTION_MASK][0] != 0 if ATTENTION_MASK in found else None
            given = [found[name] for name in names if name != ATTENTION_MASK]
            answer: Any = [(value[0][mask] if mask is not None else value).tolist() for value in given]
        else:
            decoded = task.decode(outputs, encoded, options)
            expected = msgspec.json.decode(msgspec.json.encode(decoded, enc_hook=lambda value: value.tolist()))
            answer = [msgspec.json.decode(text) for text in found[names[0]].reshape(-1)]
        same += are_alike(answer, expected, tolerance)
    return same / len(rows)


def are_alike(one: object, other: object, tolerance: float) -> bool:
    """The same, but that numbers may differ by so much, in parts of the larger where they are large."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other) <= tolerance * max(1.0, abs(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_alike, one, other, itertools.repeat(tolerance)))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key], tolerance) for key in one)
    return one == other


async def _load(url: str, proof: _Proof, seconds: float) -> tuple[list[float], int, float]:
    """The time of each request in ms, how many failed, and how long it all took."""
    target = Target.parse(url, proof.path, {})
    requests = [target.request(body) for body in proof.bodies]
    clients, turns = Clients(target, timeout_s=60.0), itertools.count()
    times: list[float] = []
    failed = 0
    begin = time.perf_counter()

    async def ask() -> None:
        nonlocal failed
        while time.perf_counter() - begin < seconds:
            answered: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            start = time.perf_counter()
            clients.ask(requests[next(turns) % len(requests)], answered.set_result)
            failed += await answered != _OK
            times.append(1e3 * (time.perf_counter() - start))

    await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    took_s = time.perf_counter() - begin
    await clients.close()
    return times, failed, took_s


def _json_body(repository: Repository, row: Row) -> bytes:
    return msgspec.json.encode(
        {
            "inputs": [
                {"name": name, "shape": list(value.shape), "datatype": "BYTES", "data": value.reshape(-1).tolist()}
                for name, value in strings(repository, [row]).items()
            ]
        }
    )
