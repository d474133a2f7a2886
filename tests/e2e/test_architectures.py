"""The support table, found again: a cell that says yes works, one that says no fails for the same reason."""

from __future__ import annotations

import json

import pytest

import support
import tiny

TABLE = json.loads(support.FILE.read_bytes())["tasks"]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_table_tells_the_truth(architecture: str) -> None:
    for task, entry in support.study(architecture, [support.ORT_FP32]).items():
        written = TABLE[task][architecture]
        assert entry.results[support.ORT_FP32.name] == written["results"][support.ORT_FP32.name], task
        assert (entry.attention_fused, entry.layers) == (written["attention_fused"], written["layers"]), task
