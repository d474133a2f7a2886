"""Tuning results are used only in the environment they were measured in. Measuring needs a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.kernels import tuning
from hasten.kernels.cuda.packed_buckets import round_up
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmShape
from hasten.kernels.packing import MAX_TOKENS
from hasten.kernels.tuning import FILE, Tuning, bucket_sizes, cache_file, find
from support.models.fused_encoders import DEVICE

SHAPE = GemmShape(144, 96, 32, has_bias=True)
LOW_PRECISION = GemmShape(144, 96, 32, has_bias=True, input_dtype="float8_e4m3fn")
CANDIDATE = 3
# A stranger may put these into a bundle: the bytes of an algorithm, which cuBLASLt would follow anywhere, candidates
# that do not exist, tiles that compile for minutes, a choice of the wrong kind.
HOSTILE = [(SHAPE, "0f" * 64), (SHAPE, "3"), (SHAPE, -1), (SHAPE, 64), (SHAPE, 2**80), (LOW_PRECISION, 3),
           (LOW_PRECISION, f"cublaslt {'0f' * 64}"), (LOW_PRECISION, "cublaslt -1"), (LOW_PRECISION, "cublaslt 999"),
           (LOW_PRECISION, "triton 65536x65536x65536x8x4")]  # fmt: skip


@pytest.fixture
def encoder() -> Encoder:
    return Encoder(Geometry(1, 32, 2, 64, 1e-5, "gelu"), {})


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Return a dictionary whose "name" the tuning module takes for its environment."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    current = {"name": "one GPU"}
    monkeypatch.setattr(tuning, "environment", lambda _: current["name"])
    return current


def test_results_are_found_in_bundle_or_cache(encoder: Encoder, environment: dict[str, str], tmp_path: Path) -> None:
    cublaslt: Any = None
    assert find(encoder, cublaslt, tmp_path) is None
    Tuning("one GPU", 16, ((SHAPE, CANDIDATE),)).write(tmp_path / FILE)
    tuned = find(encoder, cublaslt, tmp_path)
    assert tuned == Tuning("one GPU", 16, ((SHAPE, CANDIDATE),))
    environment["name"] = "another GPU"
    assert find(encoder, cublaslt, tmp_path) is None
    Tuning("another GPU", 32, ()).write(cache_file(encoder, cublaslt))
    assert find(encoder, cublaslt, tmp_path) == Tuning("another GPU", 32, ())


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("content", [b"", b"[]", b"not JSON", b"\xff\xfe"])
def test_broken_file_is_ignored(encoder: Encoder, tmp_path: Path, content: bytes) -> None:
    cublaslt: Any = None
    (tmp_path / FILE).write_bytes(content)
    assert find(encoder, cublaslt, tmp_path) is None


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("choice", HOSTILE, ids=lambda choice: str(choice[1])[:20])
def test_hostile_choice_is_ignored(encoder: Encoder, tmp_path: Path, choice: tuple[GemmShape, Any]) -> None:
    cublaslt: Any = None
    shape, value = choice
    text = json.dumps({"environment": "one GPU", "small_batch_max_tokens": 16, "gemms": [[asdict(shape), value]]})
    (tmp_path / FILE).write_text(text)
    assert find(encoder, cublaslt, tmp_path) is None


def test_every_bucket_size_is_tuned() -> None:
    assert set(map(round_up, range(16, MAX_TOKENS + 1))) == set(bucket_sizes(MAX_TOKENS))


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLASLt needs a GPU")
@pytest.mark.parametrize("has_gelu", [True, False])
def test_default_and_tuned_algorithms_agree(has_gelu: bool) -> None:
    cublaslt = CublasLtGemms(torch.float16)
    x, weight, bias = (torch.randn(*shape, device="cuda").half() for shape in ((144, 32), (96, 32), (96,)))
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    if has_gelu:
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
    shape = GemmShape(144, 96, 32, has_bias=True, has_gelu=has_gelu)
    default = cublaslt(x, weight, bias, has_gelu=has_gelu)
    cublaslt.choose({shape: cublaslt.fastest(shape, tuning.measure_seconds)})
    for actual in (default, cublaslt(x, weight, bias, has_gelu=has_gelu)):
        assert ((actual.float() - expected).norm() / expected.norm()).item() <= 2e-3
