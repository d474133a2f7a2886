"""The support table, found again: a cell that says yes works, one that says no fails for the same reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import support
import tiny
from hasten.core.hardware import usable_cores

TABLE = json.loads(support.FILE.read_bytes())["tasks"]

Studies = Mapping[str, Future[dict[str, support.Entry]]]


@pytest.fixture(scope="module")
def studies(request: pytest.FixtureRequest) -> Iterator[Studies]:
    """Of all that are asked for, in a process a core: tiny models spend their time in Python."""
    import torch

    asked = [item.callspec.params["architecture"] for item in request.session.items if item.path == request.path]
    with ProcessPoolExecutor(usable_cores(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield {name: pool.submit(support.study, name, [support.ORT_FP32]) for name in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_table_tells_the_truth(studies: Studies, architecture: str) -> None:
    for task, entry in studies[architecture].result().items():
        written = TABLE[task][architecture]
        assert entry.results[support.ORT_FP32.name] == written["results"][support.ORT_FP32.name], task
        assert (entry.attention_fused, entry.layers) == (written["attention_fused"], written["layers"]), task
