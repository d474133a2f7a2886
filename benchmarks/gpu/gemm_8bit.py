"""Time 8-bit GEMMs on a GPU: every GEMM backend at the shapes of `gpu.py`'s studies, beside the best fp16 GEMM.

    python benchmarks/gpu/gemm_8bit.py [--only RoBERTa-base …] [-o FILE]
    TRITON_INTERPRET=1 python benchmarks/gpu/gemm_8bit.py --dry-run    # on the CPU: tests the script, times nothing

Each backend is first compared with fp64 sums of the same 8-bit values; one that is wrong is reported and not timed.
Times are device milliseconds of one GEMM with its epilogue (GELU, quantization). `library, sums fast` is cuBLASLt with
fast accumulation, as in `+fastaccum`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.append(str(Path(__file__).parents[1]))

from encoders import STUDIES

from hasten.core.errors import StageError
from hasten.kernels.gemm.cublaslt import CublasLtGemms, GemmShape, random_operands
from hasten.kernels.gemm.dispatch import CUBLASLT, TORCH, GemmDispatch
from hasten.kernels.ops.activation import EXACT, TANH
from hasten.kernels.ops.gemm import reference
from hasten.kernels.tuning import measure_seconds
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "gemm_8bit.json"
FP8, INT8 = "float8_e4m3fn", "int8"
# Relative to the norm of the output: fp16 rounding. Where the output is quantized again, values between two 8-bit
# numbers may round either way.
MAX_ERROR, MAX_REQUANTIZED_ERROR = 5e-3, 1e-2


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["RoBERTa-base", "RoBERTa-large"], choices=list(STUDIES))
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="run the Triton kernel at small shapes on the CPU")
    args = parser.parse_args()
    if args.dry_run:
        for gemm in encoder_gemms(24, 32, 64):
            print(gemm, study(gemm, EXACT, None, None))
        return
    results: dict[str, Any] = {
        **provenance(),
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
        "rows": [],
    }
    cublaslt, fast_cublaslt = CublasLtGemms(torch.float16), CublasLtGemms(torch.float16, fast_accum=True)
    for name in args.only:
        config = STUDIES[name].config
        width, inner = config.get("hidden_size", 768), config.get("intermediate_size", 3072)
        for shape in STUDIES[name].shapes:
            for gemm in encoder_gemms(shape.batch * shape.sequence, width, inner):
                for gelu in (EXACT, TANH) if gemm.has_gelu else (EXACT,):
                    row = {"model": name, "shape": str(shape), "product": gemm, "gelu": gelu if gemm.has_gelu else ""}
                    row |= study(gemm, gelu, cublaslt, fast_cublaslt)
                    results["rows"].append(row)
                    print(msgspec.json.encode(row).decode(), flush=True)
        args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def encoder_gemms(tokens: int, width: int, inner: int) -> Iterator[GemmShape]:
    """Yield the four GEMMs of an encoder layer in fp8 and int8."""
    for dtype in (FP8, INT8):
        yield GemmShape(tokens, 3 * width, width, has_bias=True, input_dtype=dtype)
        yield GemmShape(tokens, width, width, input_dtype=dtype)
        yield GemmShape(tokens, inner, width, has_bias=True, has_gelu=True, input_dtype=dtype, output_dtype=dtype)
        yield GemmShape(tokens, width, inner, input_dtype=dtype)


def study(
    gemm: GemmShape, gelu: str, cublaslt: CublasLtGemms | None, fast_cublaslt: CublasLtGemms | None
) -> dict[str, Any]:
    """Return the fastest time of each kind of GEMM backend, and the backends that failed or were wrong."""
    dtype = torch.float16 if cublaslt is not None else torch.float32
    dispatch = GemmDispatch(gelu, dtype, cublaslt)
    best: dict[str, float] = {}
    wrong: dict[str, str] = {}
    device = "cuda" if cublaslt is not None else "cpu"
    operands = random_operands(gemm, dtype, device)
    gelu_kind = gelu if gemm.has_gelu else None
    expected = reference(operands.x, operands.weight, operands.scale, operands.bias, gelu_kind, operands.quant)
    torch_backend = [TORCH] if cublaslt is not None and gemm.input_dtype == FP8 else []
    for backend in dict.fromkeys([*dispatch.candidates(gemm), *torch_backend]):
        try:
            error = relative_error(dispatch.run(backend, gemm, operands), expected)
        except (StageError, RuntimeError) as reason:
            wrong[backend] = str(reason).splitlines()[0]
            continue
        kind = backend.split()[0]
        if not error <= (MAX_REQUANTIZED_ERROR if gemm.output_dtype else MAX_ERROR):
            wrong[backend] = f"relative error {error:.1e}"
        elif cublaslt is not None:
            milliseconds = measure_seconds(partial(dispatch.run, backend, gemm, operands)) * 1e3
            best[kind] = min(milliseconds, best.get(kind, float("inf")))
    if fast_cublaslt is not None and gemm.input_dtype == FP8:
        fast_dispatch = GemmDispatch(gelu, dtype, fast_cublaslt)
        candidates = [backend for backend in fast_dispatch.candidates(gemm) if backend.startswith(CUBLASLT)]
        times = [measure_seconds(partial(fast_dispatch.run, backend, gemm, operands)) * 1e3 for backend in candidates]
        best |= {"library, sums fast": min(times, default=float("inf"))}
    if cublaslt is not None:
        # For comparison: cuBLASLt's fastest algorithm in fp16, without the epilogue.
        fp16_gemm = GemmShape(gemm.rows, gemm.columns, gemm.depth, gemm.has_bias)
        cublaslt.choose({fp16_gemm: cublaslt.fastest(fp16_gemm, measure_seconds)})
        x, weight = (torch.randn(rows, gemm.depth, device=device).half() for rows in (gemm.rows, gemm.columns))
        bias = torch.randn(gemm.columns, device=device).half() if gemm.has_bias else None
        best["fp16 product alone"] = measure_seconds(lambda: cublaslt(x, weight, bias)) * 1e3
    return {"ms": best, "wrong": wrong}


def relative_error(output: Any, expected: Any) -> float:
    """Return the norm of the error over the norm of the expected output."""
    return float((output.float() - expected.float()).norm() / expected.float().norm())


if __name__ == "__main__":
    main()
