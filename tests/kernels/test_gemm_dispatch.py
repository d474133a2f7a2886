"""All backends of 8-bit GEMMs agree, and tuning stores their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hasten.core.errors import StageError
from hasten.kernels import tuning
from hasten.kernels.encoder import Encoder, Geometry
from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmOperands, GemmShape, random_operands
from hasten.kernels.gemm.dispatch import BACKEND_NAME, CUBLASLT, TORCH, TRITON, GemmDispatch
from hasten.kernels.ops.activation import EXACT, TANH
from hasten.kernels.ops.gemm import TILE_CONFIGS, TileConfig, reference
from hasten.kernels.tuning import FILE, Tuning, find
from support.models.fused_encoders import DEVICE

FP8 = "float8_e4m3fn"
UP = GemmShape(48, 64, 32, has_bias=True, has_gelu=True, input_dtype=FP8, output_dtype=FP8)
ODD = GemmShape(48, 56, 40, has_bias=True, has_gelu=True, input_dtype=FP8, output_dtype=FP8)
PLAIN = GemmShape(48, 64, 32, has_bias=True, input_dtype=FP8)
HALF = torch.float32 if DEVICE == "cpu" else torch.float16


# Relative errors. In the interpreter 8-bit outputs did not differ, and fp32 outputs by 5e-9 (x86-64 with AVX-512,
# 2026-11). The order of additions may change that: one neighbouring fp8 value among 48 rows of 64 is 1e-3.
QUANTIZED_TOLERANCE = 2e-3 if DEVICE == "cpu" else 5e-3
PLAIN_TOLERANCE = 2e-7 if DEVICE == "cpu" else 2e-3


def expected_output(operands: GemmOperands, gelu_kind: str | None) -> Any:
    return reference(operands.x, operands.weight, operands.scale, operands.bias, gelu_kind, operands.quant)


def relative_error(actual: Any, expected: Any) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    "name",
    [
        TRITON,
        TORCH,
        CUBLASLT,
        f"{CUBLASLT} 7",
        f"{CUBLASLT} 63",
        *(f"{TRITON} {tile_config}" for tile_config in TILE_CONFIGS),
    ],
)
def test_backend_names_are_valid(name: str) -> None:
    assert BACKEND_NAME.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    ["", "triton 1x2", "cublaslt 0f", "cublaslt 123", f"cublaslt {'0f' * 64}", "torch 3", "rm -rf", "triton 1x2x3x4x5"],
)
def test_other_names_are_invalid(name: str) -> None:
    assert not BACKEND_NAME.fullmatch(name)
    assert TileConfig.parse(str(TILE_CONFIGS[0])) == TILE_CONFIGS[0]


def record_backends(dispatch: GemmDispatch, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    backends: list[str] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda backend, *args: backends.append(backend) or run(backend, *args))
    return backends


@pytest.mark.parametrize("shape", [UP, PLAIN], ids=["quantized", "plain"])
def test_chosen_backend_is_used(shape: GemmShape, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, tile_config = GemmDispatch(EXACT, HALF), TileConfig(32, 32, 32, 4, 2)
    backends = record_backends(dispatch, monkeypatch)
    operands = random_operands(shape, HALF, DEVICE)
    dispatch.choose({shape: f"{TRITON} {tile_config}"})
    actual = dispatch(operands, has_gelu=shape.has_gelu)
    tolerance = PLAIN_TOLERANCE if shape is PLAIN else 2e-3
    assert backends == [f"{TRITON} {tile_config}"]
    assert relative_error(actual, expected_output(operands, EXACT if shape.has_gelu else None)) <= tolerance


@pytest.mark.parametrize(("shape", "fallback"), [(UP, TORCH), (ODD, TRITON)], ids=["even", "odd"])
def test_shape_without_cublaslt_algorithm_falls_back(
    shape: GemmShape, fallback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, PyTorch's fp8 GEMMs need sides that are multiples of 16; on the CPU they do not."""

    class NoAlgorithms:
        fast_accum = False
        calls = 0

        def run(self, *_: Any) -> Any:
            self.calls += 1
            raise StageError("cuBLASLt has no algorithm for this GEMM")

        def candidates(self, _: GemmShape) -> Any:
            raise StageError("cuBLASLt has no algorithm for this GEMM")

    cublaslt: Any = NoAlgorithms()
    dispatch = GemmDispatch(EXACT, HALF, cublaslt)
    backends = record_backends(dispatch, monkeypatch)
    operands = random_operands(shape, HALF, DEVICE)
    expected = expected_output(operands, EXACT)
    for _ in range(2):
        assert relative_error(dispatch(operands, has_gelu=True), expected) <= QUANTIZED_TOLERANCE
    assert cublaslt.calls == 1
    assert backends == [CUBLASLT, fallback, fallback]
    assert (TORCH in dispatch.candidates(shape)) is (fallback == TORCH)


def test_tuning_results_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "environment", lambda _: "one GPU")
    encoder, cublaslt = Encoder(Geometry(1, 32, 2, 64, 1e-5, "gelu"), {}), None
    gemms = ((UP, f"{TRITON} {TILE_CONFIGS[0]}"), (PLAIN, f"{CUBLASLT} 7"))
    Tuning("one GPU", 0, gemms).write(tmp_path / FILE)
    tuned = find(encoder, cublaslt, tmp_path)  # type: ignore[arg-type]
    assert tuned is not None
    assert dict(tuned.gemms)[UP] == f"{TRITON} {TILE_CONFIGS[0]}"
    # A candidate without a backend is valid in half precision only.
    (tmp_path / FILE).write_bytes(msgspec.json.encode(Tuning("one GPU", 0, ((UP, 7),))))
    assert find(encoder, cublaslt, tmp_path) is None  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLASLt needs a GPU")
@pytest.mark.parametrize("kind", [EXACT, TANH])
@pytest.mark.parametrize("rows", [1, 17, 144, 2048])
@pytest.mark.parametrize("has_gelu", [True, False])
def test_all_backends_agree(has_gelu: bool, rows: int, kind: str) -> None:
    dispatch = GemmDispatch(kind, torch.float16, CublasLtGemms(torch.float16))
    output_dtype = FP8 if has_gelu else ""
    shape = GemmShape(rows, 384, 256, has_bias=True, has_gelu=has_gelu, input_dtype=FP8, output_dtype=output_dtype)
    operands = random_operands(shape, torch.float16, "cuda")
    expected = expected_output(operands, kind if has_gelu else None)
    candidates = dispatch.candidates(shape)
    assert {backend.split()[0] for backend in candidates} == {CUBLASLT, TRITON}
    errors = {
        backend: relative_error(dispatch.run(backend, shape, operands), expected) for backend in (*candidates, TORCH)
    }
    # Intermediate rounding to fp16 moves a few values to the neighbouring 8-bit value.
    assert max(errors.values()) <= (1e-2 if has_gelu else 5e-3), errors
    assert dispatch.fastest(shape, tuning.measure_seconds) in candidates


@pytest.mark.skipif(DEVICE == "cpu", reason="cuBLASLt needs a GPU")
@pytest.mark.parametrize("input_dtype", ["", FP8])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(8192, 768, 768), (144, 384, 1536)])
def test_all_cublaslt_algorithms_agree(input_dtype: str, rows: int, columns: int, depth: int) -> None:
    cublaslt, shape = CublasLtGemms(torch.float16), GemmShape(rows, columns, depth, input_dtype=input_dtype)
    operands = random_operands(shape, torch.float16, "cuda")
    expected = operands.x.float() @ operands.weight.float().T * (1 if operands.scale is None else operands.scale)
    for candidate in cublaslt.candidates(shape):
        assert relative_error(cublaslt.run(shape, operands, candidate), expected) <= 2e-3
    # More candidates than there are here: the first one runs.
    assert relative_error(cublaslt.run(shape, operands, 63), expected) <= 2e-3
