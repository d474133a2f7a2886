"""The published support table is reproduced: supported cells work, the others fail for the recorded reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest

import architecture_support
from hasten.core.system.hardware import usable_cores
from support.models import tiny_encoders

TABLE = json.loads(architecture_support.FILE.read_bytes())["tasks"]

Studies = Mapping[str, Future[dict[str, architecture_support.Entry]]]


@pytest.fixture(scope="module")
def studies(request: pytest.FixtureRequest) -> Iterator[Studies]:
    """Studies of the selected architectures, in one process per core: tiny models spend their time in Python."""
    import torch

    selected = [item.callspec.params["architecture"] for item in request.session.items if item.path == request.path]
    with ProcessPoolExecutor(usable_cores(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield {
            name: pool.submit(architecture_support.study, name, [architecture_support.ORT_FP32]) for name in selected
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("architecture", tiny_encoders.ARCHITECTURES)
def test_architecture_gives_the_recorded_results(studies: Studies, architecture: str) -> None:
    for task, entry in studies[architecture].result().items():
        recorded = TABLE[task][architecture]
        assert (
            entry.results[architecture_support.ORT_FP32.name] == recorded["results"][architecture_support.ORT_FP32.name]
        ), task
        assert (entry.attention_fused, entry.layers) == (recorded["attention_fused"], recorded["layers"]), task
