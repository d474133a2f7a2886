"""Closed-loop clients in several processes: one could not keep a GPU busy. Each sends texts of its own."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from clients import closed_loop
from http_requests import post
from vocabulary import UnseenTexts

from hasten.bundle import open_bundle

# Half of the texts are sentences and half paragraphs; 92 tokens on average.
SENTENCE_TOKENS, PARAGRAPH_TOKENS = (8, 48), (64, 248)
_JSON = "content-type: application/json"
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that send requests with this many texts, each after the answer to its last, for some seconds."""

    texts: int
    clients: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadAnswers:
    """The answers to all clients of a load."""

    per_second: float
    texts_per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    # Answers of the client that got the fewest, as a share of the median client's.
    fairness: float
    # The cores that the clients used.
    client_cores: float


class LoadProcesses:
    """Processes that wait with prepared texts for loads to send."""

    def __init__(self, bundle: Path, processes: int, texts: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for seed in range(processes):
            pipe, theirs = spawn.Pipe()
            spawn.Process(target=_serve, args=(theirs, bundle, texts // processes, seed), daemon=True).start()
            theirs.close()
            self._pipes.append(pipe)
        for pipe in self._pipes:
            if not pipe.poll(_START_TIMEOUT_S):
                raise SystemExit("a load process did not start")
            pipe.recv()

    def run(self, port: int, load: Load) -> LoadAnswers:
        """Send a load to a server, and return what its clients measured."""
        shares = [
            load.clients // len(self._pipes) + (i < load.clients % len(self._pipes)) for i in range(len(self._pipes))
        ]
        busy = [(pipe, clients) for pipe, clients in zip(self._pipes, shares, strict=True) if clients]
        for pipe, clients in busy:
            pipe.send((port, Load(load.texts, clients, load.seconds)))
        results = [pipe.recv() for pipe, _ in busy]
        if errors := [error for *_, error in results if error]:
            raise SystemExit(f"the server answers {errors[0]}")
        seconds = np.concatenate([result[0] for result in results])
        per_client = np.concatenate([result[1] for result in results])
        elapsed = max(result[2] for result in results)
        return LoadAnswers(
            per_second=len(seconds) / elapsed,
            texts_per_second=load.texts * len(seconds) / elapsed,
            p50_ms=float(np.percentile(seconds, 50)) * 1e3,
            p99_ms=float(np.percentile(seconds, 99)) * 1e3,
            max_ms=float(seconds.max()) * 1e3,
            fairness=float(per_client.min() / np.median(per_client)),
            client_cores=sum(result[3] for result in results),
        )


def _serve(pipe: Connection, bundle: Path, count: int, seed: int) -> None:
    """Generate texts, then run the loads that come by pipe; the main of a process."""
    random = np.random.default_rng(seed)
    lengths = [
        int(random.integers(*range_)) for range_ in (SENTENCE_TOKENS, PARAGRAPH_TOKENS) for _ in range(count // 2)
    ]
    random.shuffle(lengths)
    texts = UnseenTexts(open_bundle(bundle), seed).take(lengths)
    # Requests are encoded before the first load, so that the clients only send and receive.
    encoded: dict[int, list[bytes]] = {}
    positions: dict[int, int] = {}
    pipe.send("ready")
    while True:
        try:
            port, load = pipe.recv()
        except EOFError:
            sys.exit()
        if load.texts not in encoded:
            encoded[load.texts] = [
                _request(texts[i : i + load.texts]) for i in range(0, len(texts) - load.texts + 1, load.texts)
            ]
        requests, start = encoded[load.texts], positions.get(load.texts, 0)
        stream = itertools.islice(itertools.cycle(requests), start, None)
        answers = closed_loop(port, ((0, request) for request in stream), clients=load.clients, seconds=load.seconds)
        positions[load.texts] = (start + len(answers.seconds)) % len(requests)
        error = answers.errors[0] if answers.errors else None
        pipe.send(
            (np.array(answers.seconds), np.array(answers.per_client), answers.elapsed_s, answers.client_share, error)
        )


def _request(texts: Sequence[str]) -> bytes:
    return post("/predict", json.dumps({"inputs": texts[0] if len(texts) == 1 else list(texts)}).encode(), _JSON)
