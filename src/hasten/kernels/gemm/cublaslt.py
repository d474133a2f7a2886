"""GEMMs by cuBLASLt with fused epilogues, and with algorithms of our choice.

PyTorch uses the first algorithm of the library's heuristic for a shape. Here the candidates can be timed once, and the
fastest be used from then on. It is named by its position among the candidates: the library runs only algorithms that
its own heuristic has just returned, never bytes from a file. The library is the one that PyTorch has loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten.core.errors import StageError
from hasten.kernels.ops.quantize import INT8, ActivationQuant

# As the library's documentation recommends for Hopper.
_WORKSPACE_BYTES = 32 * 2**20
MAX_CANDIDATES = 64
# Constants of the library's header.
_COMPUTE_FP32, _FP32 = 68, 0
_DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_INPUT_SCALE_POINTERS, _OUTPUT_SCALE_POINTER, _FAST_ACCUM, _BIAS_DATA_TYPE = (17, 18), 20, 25, 26
_TRANSPOSED = 1
_MAX_WORKSPACE = 1
_NO_EPILOGUE, _BIAS, _GELU_BIAS = 1, 4, 36
_ALGORITHM_BYTES = 64


@dataclass(frozen=True, slots=True)
class GemmShape:
    """The sizes, epilogue and dtypes of a GEMM (rows, depth) · (columns, depth)ᵀ."""

    rows: int
    columns: int
    depth: int
    has_bias: bool = False
    # In cuBLASLt always the tanh approximation: it has no other.
    has_gelu: bool = False
    # PyTorch's names (float8_e4m3fn, int8) of the dtypes; empty for half precision.
    input_dtype: str = ""
    output_dtype: str = ""


@dataclass(frozen=True, slots=True)
class GemmOperands:
    """The tensors of a GEMM: 8-bit inputs come with a scale, and an 8-bit output with a quantization."""

    x: Any
    weight: Any
    scale: Any | None = None
    bias: Any | None = None
    quant: ActivationQuant | None = None


class _HeuristicResult(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * (_ALGORITHM_BYTES // 8)),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLtGemms:
    """A cuBLASLt handle with its workspace and plans. Not thread-safe."""

    def __init__(self, dtype: Any, device: Any = "cuda", *, fast_accum: bool = False) -> None:
        """Set up the GEMMs. `fast_accum` accumulates fp8 in the tensor cores, with fewer bits than fp32."""
        self.dtype, self.fast_accum = dtype, fast_accum
        self._library = _load()
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._unit_scale = torch.ones(1, dtype=torch.float32, device=device)
        self._chosen: dict[GemmShape, int] = {}
        self._plans: dict[GemmShape, _Plan] = {}

    def __call__(self, x: Any, weight: Any, bias: Any | None = None, *, has_gelu: bool = False) -> Any:
        """Return x · weightᵀ + bias, or GELU of it, in half precision."""
        (rows, depth), columns = x.shape, weight.shape[0]
        if x.dtype != self.dtype:
            raise StageError(f"a GEMM for {self.dtype} received {x.dtype}")
        return self.run(GemmShape(rows, columns, depth, bias is not None, has_gelu), GemmOperands(x, weight, bias=bias))

    def run(self, shape: GemmShape, operands: GemmOperands, candidate: int | None = None) -> Any:
        """Run a GEMM with the given candidate, or else the chosen or first one of its shape, on the current stream."""
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plan(shape)
            try:
                plan.algorithms = self._candidates(plan, operands)
            except StageError:
                self._destroy(plan)
                raise
            self._plans[shape] = plan
        dtype = getattr(torch, shape.output_dtype) if shape.output_dtype else self.dtype
        out = torch.empty((shape.rows, shape.columns), dtype=dtype, device=operands.x.device)
        index = self._chosen.get(shape, 0) if candidate is None else candidate
        # A number from a file may exceed the candidates.
        self._launch(plan, plan.algorithms[index if 0 <= index < len(plan.algorithms) else 0], operands, out)
        return out

    def candidates(self, shape: GemmShape) -> range:
        """Return the numbers of the library's algorithms for a GEMM, in the order of its heuristic."""
        plan = self._plan(shape)
        try:
            return range(len(self._candidates(plan, random_operands(shape, self.dtype, self._workspace.device))))
        finally:
            self._destroy(plan)

    def choose(self, candidates: Mapping[GemmShape, int]) -> None:
        """Use these candidates from now on, and the library's first one for other shapes."""
        self._chosen = dict(candidates)

    def fastest(self, shape: GemmShape, measure_seconds: Callable[[Callable[[], Any]], float]) -> int:
        """Return the candidate that takes the fewest seconds on random operands."""
        operands = random_operands(shape, self.dtype, self._workspace.device)
        return min(
            self.candidates(shape),
            key=lambda candidate: measure_seconds(partial(self.run, shape, operands, candidate)),
        )

    def close(self) -> None:
        """Free the plans and the library's handle."""
        self._destroy_plans()
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = c_void_p()

    def _candidates(self, plan: _Plan, operands: GemmOperands) -> list[bytes]:
        # The candidates may depend on the pointers.
        self._set_pointers(plan, operands)
        preference, count = c_void_p(), c_int()
        results = (_HeuristicResult * MAX_CANDIDATES)()
        size = c_size_t(_WORKSPACE_BYTES)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, byref(size), c_size_t(8))
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, plan.descriptor, plan.weight, plan.x, plan.addend, plan.out,
            preference, MAX_CANDIDATES, results, byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        candidates = [bytes(result.algorithm) for result in results[: count.value] if result.state == 0]
        if not candidates:
            raise StageError("cuBLASLt has no algorithm for this GEMM")
        return candidates

    def _destroy_plans(self) -> None:
        for plan in self._plans.values():
            self._destroy(plan)
        self._plans.clear()

    def _destroy(self, plan: _Plan) -> None:
        self._call("cublasLtMatmulDescDestroy", plan.descriptor)
        for layout in (plan.weight, plan.x, plan.addend, plan.out):
            self._call("cublasLtMatrixLayoutDestroy", layout)

    def _plan(self, shape: GemmShape) -> _Plan:
        """Describe a GEMM to the library, which is column-major: everything is transposed."""
        descriptor = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(descriptor), _COMPUTE_FP32, _FP32)
        self._set(descriptor, _TRANSPOSE_A, c_int32(_TRANSPOSED))
        epilogue = _GELU_BIAS if shape.has_gelu else _BIAS if shape.has_bias else _NO_EPILOGUE
        self._set(descriptor, _EPILOGUE, c_uint32(epilogue))
        if shape.input_dtype:
            self._set(descriptor, _FAST_ACCUM, c_int8(self.fast_accum))
            if shape.has_bias:
                self._set(descriptor, _BIAS_DATA_TYPE, c_int32(_DATA_TYPES[self.dtype]))
        weight, x = (self._layout(shape.depth, side, shape.input_dtype) for side in (shape.columns, shape.rows))
        # Nothing is added (beta is 0), but the addend needs a data type that goes with the others.
        addend, out = (self._layout(shape.columns, shape.rows, dtype) for dtype in ("", shape.output_dtype))
        return _Plan(descriptor, weight, x, addend, out)

    def _layout(self, rows: int, columns: int, dtype: str) -> c_void_p:
        layout = c_void_p()
        data_type = _DATA_TYPES[getattr(torch, dtype) if dtype else self.dtype]
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), data_type, *sizes)
        return layout

    def _set(self, descriptor: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", descriptor, attribute, byref(value), size)

    def _set_pointers(self, plan: _Plan, operands: GemmOperands) -> None:
        pointers = {_BIAS_POINTER: operands.bias}
        if operands.scale is not None:
            pointers |= dict(zip(_INPUT_SCALE_POINTERS, (operands.scale, self._unit_scale), strict=True))
        if operands.quant is not None:
            pointers[_OUTPUT_SCALE_POINTER] = operands.quant.inverse_scales
        for attribute, tensor in pointers.items():
            if tensor is not None:
                self._set(plan.descriptor, attribute, c_void_p(tensor.data_ptr()))

    def _launch(self, plan: _Plan, algorithm: bytes, operands: GemmOperands, out: Any) -> None:
        self._set_pointers(plan, operands)
        out_pointer = c_void_p(out.data_ptr())
        # Nothing is added (beta is 0); an fp8 output has not the data type of the addend, which is null then.
        addend = out_pointer if operands.quant is None else c_void_p()
        self._call(
            "cublasLtMatmul", self._handle, plan.descriptor,
            byref(c_float(1.0)), c_void_p(operands.weight.data_ptr()), plan.weight,
            c_void_p(operands.x.data_ptr()), plan.x,
            byref(c_float(0.0)), addend, plan.addend, out_pointer, plan.out,
            algorithm, c_void_p(self._workspace.data_ptr()), c_size_t(_WORKSPACE_BYTES),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise StageError(f"{name} failed with status {status}")


@dataclass(slots=True)
class _Plan:
    """The library's descriptors of one GEMM, and its candidate algorithms."""

    descriptor: c_void_p
    weight: c_void_p
    x: c_void_p
    addend: c_void_p
    out: c_void_p
    algorithms: Sequence[bytes] = ()


def random_operands(shape: GemmShape, dtype: Any, device: Any) -> GemmOperands:
    """Return random operands of a GEMM whose half-precision tensors have the given dtype."""
    input_dtype = getattr(torch, shape.input_dtype) if shape.input_dtype else dtype
    deviation = 16 if shape.input_dtype else 1
    x, weight = (
        (torch.randn(rows, shape.depth, device=device) * deviation).clamp(-127, 127).to(input_dtype)
        for rows in (shape.rows, shape.columns)
    )
    scale = torch.full((shape.columns if input_dtype == INT8 else 1,), 1e-3, device=device)
    bias = torch.randn(shape.columns, device=device).to(dtype) if shape.has_bias else None
    inverse_scale = torch.full((1,), 16.0, device=device)
    quant = ActivationQuant(inverse_scale, getattr(torch, shape.output_dtype)) if shape.output_dtype else None
    return GemmOperands(x, weight, scale if shape.input_dtype else None, bias, quant)


def library_version() -> int:
    """Return cuBLASLt's version."""
    version: Callable[[], int] = _load().cublasLtGetVersion
    return version()


def _load() -> ctypes.CDLL:
    """Load the library that PyTorch has loaded, whose file name has CUDA's major version."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
