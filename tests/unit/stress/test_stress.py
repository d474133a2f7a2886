"""Load generation without a server: arrival times, request bodies and the search for the highest rate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import InputError, PlanError
from hasten.stress.bodies import body
from hasten.stress.client import StressTarget
from hasten.stress.load import LoadResult, arrivals
from hasten.stress.sweep import Sweep, meets, sweep


def load_result(
    rate: float, p99_ms: float, *, errors: int = 0, backlog_s: float = 0.0, p50_ms: float = 1.0
) -> LoadResult:
    sent = 100
    return LoadResult(
        rate=rate,
        duration_s=1.0,
        seconds=1.0 + backlog_s,
        sent=sent,
        answered=sent - errors,
        per_second=rate,
        statuses={200: sent - errors, 429: errors},
        percentiles_ms={"p50": p50_ms, "p99": p99_ms},
        max_ms=p99_ms,
        mean_ms=p50_ms,
        failed_p99_ms=None,
        connections=1,
        late=0.0,
        histogram=(),
    )


def test_arrivals_are_a_poisson_process() -> None:
    due = arrivals(500.0, 20.0, seed=1)
    assert due[0] == 0.0
    assert 0.95 * 10_000 < len(due) < 1.05 * 10_000
    gaps = np.diff(due)
    # A Poisson process: gaps vary as much as they are long.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert arrivals(500.0, 20.0, seed=1).tolist() == due.tolist() != arrivals(500.0, 20.0, seed=2).tolist()


def test_at_least_one_request_is_sent() -> None:
    assert arrivals(0.01, 0.1, seed=0).tolist() == [0.0]


@pytest.mark.parametrize(
    ("path", "row", "expected"),
    [
        ("/predict", {"text": "a", "label": "X", "idx": 3}, {"inputs": "a", "model": "m"}),
        ("/predict", {"text": "a", "text_pair": "b"}, {"inputs": {"text": "a", "text_pair": "b"}, "model": "m"}),
        (
            "/predict",
            {"question": "q", "context": "c", "id": "1", "answers": {}},
            {"inputs": {"question": "q", "context": "c"}, "model": "m"},
        ),
        ("/v1/embeddings", {"text": "a"}, {"input": "a", "model": "m"}),
        ("/score", {"text": "q", "text_pair": "d"}, {"text_1": "q", "text_2": "d", "model": "m"}),
        ("/rerank", {"query": "q", "documents": ["d"]}, {"query": "q", "texts": ["d"], "model": "m"}),
        (
            "/v2/models/m/infer",
            {"query": "q", "documents": ["d"]},
            {
                "inputs": [
                    {"name": "query", "shape": [1], "datatype": "BYTES", "data": ["q"]},
                    {"name": "documents", "shape": [1], "datatype": "BYTES", "data": ['["d"]']},
                ]
            },
        ),
    ],
)
def test_body_follows_the_protocol_of_the_path(path: str, row: Mapping[str, Any], expected: Any) -> None:
    assert json.loads(body(path, row, "m")) == expected


def test_embedding_of_a_pair_is_rejected() -> None:
    with pytest.raises(InputError, match="one text"):
        body("/v1/embeddings", {"text": "a", "text_pair": "b"}, "")


def test_target_is_parsed_from_an_address() -> None:
    plain = StressTarget.parse("localhost:8000", "/predict", {})
    assert (plain.host, plain.port, plain.path, plain.tls) == ("localhost", 8000, "/predict", None)
    secure = StressTarget.parse("https://[::1]/v2/models/m/infer/", "/predict", {"authorization": "Bearer k"})
    assert (secure.port, secure.path, secure.tls is not None) == (443, "/v2/models/m/infer", True)
    request = secure.request(b"{}")
    assert request.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\nhost: [::1]:443\r\n")
    assert b"\r\nauthorization: Bearer k\r\n\r\n{}" in request
    for address in ("ftp://host", "http://", "http://host:port", "http://host:0", "http://host:99999"):
        with pytest.raises(PlanError, match="is not an HTTP address"):
            StressTarget.parse(address, "/predict", {})


def test_run_meets_objective_without_errors_or_backlog() -> None:
    assert meets(load_result(10, p99_ms=50), 50)
    assert not meets(load_result(10, p99_ms=51), 50)
    assert not meets(load_result(10, p99_ms=20, errors=1), 50)
    # All within the objective, but a tenth of the work was left at the end of the run.
    assert not meets(load_result(10, p99_ms=400, backlog_s=0.1), 500)
    # The backlog is as long as a single request takes.
    assert meets(load_result(10, p99_ms=450, backlog_s=0.4, p50_ms=390), 500)


@pytest.mark.parametrize("first", [10, 150, 5000])
def test_sweep_finds_the_limit_from_either_side(first: float) -> None:
    result = search(limit=300, first=first)
    assert result.best is not None
    assert 300 / 1.1 < result.best.rate <= 300
    assert len(result.runs) < 15


def test_sweep_without_a_passing_rate_has_no_best_run() -> None:
    result = search(limit=0, first=10)
    assert (result.best, [run.rate for run in result.runs]) == (None, [10, 5, 2.5, 1.25])


def search(*, limit: float, first: float) -> Sweep:
    async def run_at(rate: float) -> LoadResult:
        return load_result(rate, p99_ms=10 if rate <= limit else 100)

    return asyncio.run(sweep(run_at, first, 50))
