"""Products by cuBLASLt, which PyTorch brings: what is added to them rides along, and the algorithm is our choice.

PyTorch takes the first algorithm that the library proposes for a shape. Here the proposals can be timed once, and the
fastest be named from then on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten.core.errors import StageError

# What the library's documentation asks for on Hopper.
_WORKSPACE = 32 * 2**20
# Where products count, each in a place of its own as long as there are any (`counters.py`); as far apart as the library
# wants a workspace to begin.
_PLACES, _APART = 1024, 256
_PROPOSALS = 64
# Names of the library's header.
_COMPUTE_FP32, _REAL_FP32 = 68, 0
_REALS = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
_STEP_POINTERS, _FACTOR_POINTER, _FAST_SUMS, _BIAS_REAL = (17, 18), 20, 25, 26
_TRANSPOSED = 1
_MAX_WORKSPACE = 1
_PLAIN, _BIAS, _GELU_BIAS = 1, 4, 36
ALGORITHM_BYTES = 64


@dataclass(frozen=True, slots=True)
class Product:
    """One shape of it: (rows, depth) · (columns, depth)ᵀ, with what rides along."""

    rows: int
    columns: int
    depth: int
    has_bias: bool = False
    # Of the kind that goes by tanh: the library knows no other.
    has_gelu: bool = False
    # PyTorch's names of what it multiplies and what it gives, where those are no halves: float8_e4m3fn, int8.
    takes: str = ""
    gives: str = ""


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * (ALGORITHM_BYTES // 8)),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Products:
    """One thread's: it has a workspace."""

    def __init__(self, dtype: Any, device: Any = "cuda", *, sums_fast: bool = False) -> None:
        """`sums_fast`: products of fp8 are added up in the fewer bits that tensor cores have, not in fp32."""
        self.dtype, self.sums_fast = dtype, sums_fast
        self._library = _load()
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = torch.empty(_PLACES * _APART + _WORKSPACE, dtype=torch.uint8, device=device)
        self._turn = 0
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self._chosen: dict[Product, bytes] = {}
        self._plans: dict[Product, _Plan] = {}

    def __call__(self, x: Any, weight: Any, bias: Any | None = None, *, has_gelu: bool = False) -> Any:
        """x · weightᵀ + bias, and GELU of it; on PyTorch's current stream."""
        (rows, depth), columns = x.shape, weight.shape[0]
        what = Product(rows, columns, depth, bias is not None, has_gelu)
        if x.dtype != self.dtype:
            raise StageError(f"a product of {x.dtype} was asked of one who multiplies {self.dtype}")
        return self.multiply(what, _Operands(x, weight, bias))

    def squeezed(
        self, what: Product, x: Any, weight: Any, step: Any, bias: Any | None, factor: Any | None, algorithm: bytes
    ) -> Any:
        """The same of fp8, times a step, by a given algorithm or, where that is empty, by the library's first.

        With a factor what it gives is multiplied by that and is fp8 too.
        """
        return self.multiply(what, _Operands(x, weight, bias, step, factor), algorithm)

    def multiply(self, what: Product, operands: _Operands, algorithm: bytes = b"") -> Any:
        plan = self._plans.get(what)
        if plan is None:
            plan = self._plan(what)
            try:
                plan.algorithm = self._chosen.get(what) or self._proposals(plan, operands)[0]
            except StageError:
                self._destroy(plan)
                raise
            self._plans[what] = plan
        x, dtype = operands.x, getattr(torch, what.gives) if what.gives else self.dtype
        out = torch.empty((what.rows, what.columns), dtype=dtype, device=x.device)
        self._launch(plan, algorithm or plan.algorithm, operands, out)
        return out

    @property
    def counters(self) -> range:
        """Addresses of the places where products count."""
        begin = self._workspace.data_ptr()
        return range(begin, begin + _PLACES * _APART, _APART)

    def rewind(self) -> None:
        """Begin again with the places where products count."""
        self._turn = 0

    def proposals(self, what: Product) -> list[bytes]:
        """All of the library's algorithms for a product, its favourite first."""
        plan = self._plan(what)
        try:
            return self._proposals(plan, self._drawn(what))
        finally:
            self._destroy(plan)

    def _proposals(self, plan: _Plan, operands: _Operands) -> list[bytes]:
        # What it proposes may depend on what there is to point to.
        self._point(plan, operands)
        preference, found = c_void_p(), c_int()
        results = (_Proposal * _PROPOSALS)()
        size = c_size_t(_WORKSPACE)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, byref(size), c_size_t(8))
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, plan.about, plan.weight, plan.x, plan.added, plan.out,
            preference, _PROPOSALS, results, byref(found),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        proposals = [bytes(results[place].algorithm) for place in range(found.value) if results[place].state == 0]
        if not proposals:
            raise StageError("cuBLASLt proposes no algorithm")
        return proposals

    def choose(self, algorithms: Mapping[Product, bytes]) -> None:
        """Of products that were timed; of others the library's first proposal is taken."""
        self._chosen = dict(algorithms)
        self._forget()

    def fastest(self, what: Product, seconds: Callable[[Callable[[], Any]], float]) -> bytes:
        """The proposal that takes the fewest `seconds`, on values like those of a model."""
        operands, out = self._drawn(what), self._draw(what.rows, what.columns)
        plan = self._plan(what)
        try:
            launches = {
                algorithm: partial(self._launch, plan, algorithm, operands, out)
                for algorithm in self._proposals(plan, operands)
            }
            return min(launches, key=lambda algorithm: seconds(launches[algorithm]))
        finally:
            self._destroy(plan)

    def close(self) -> None:
        """Give back what the library holds for it."""
        self._forget()
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = c_void_p()

    def _forget(self) -> None:
        for plan in self._plans.values():
            self._destroy(plan)
        self._plans.clear()

    def _destroy(self, plan: _Plan) -> None:
        self._call("cublasLtMatmulDescDestroy", plan.about)
        for layout in (plan.weight, plan.x, plan.added, plan.out):
            self._call("cublasLtMatrixLayoutDestroy", layout)

    def _drawn(self, what: Product) -> _Operands:
        """Values like those of a model."""
        dtype = getattr(torch, what.takes) if what.takes else self.dtype
        x, weight = (self._draw(rows, what.depth).to(dtype) for rows in (what.rows, what.columns))
        bias = self._draw(what.columns) if what.has_bias else None
        return _Operands(x, weight, bias, self._one if what.takes else None, self._one if what.gives else None)

    def _draw(self, *shape: int) -> Any:
        return torch.randn(*shape, device=self._workspace.device).to(self.dtype)

    def _plan(self, what: Product) -> _Plan:
        """The library counts by columns, so that it is told of everything transposed."""
        about = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(about), _COMPUTE_FP32, _REAL_FP32)
        self._set(about, _TRANSPOSE_A, c_int32(_TRANSPOSED))
        epilogue = _GELU_BIAS if what.has_gelu else _BIAS if what.has_bias else _PLAIN
        self._set(about, _EPILOGUE, c_uint32(epilogue))
        if what.takes:
            self._set(about, _FAST_SUMS, c_int8(self.sums_fast))
            if what.has_bias:
                self._set(about, _BIAS_REAL, c_int32(_REALS[self.dtype]))
        weight, x = (self._layout(what.depth, side, what.takes) for side in (what.columns, what.rows))
        # What would be added is none, but has to be of a type that goes with the others.
        added, out = (self._layout(what.columns, what.rows, name) for name in ("", what.gives))
        return _Plan(about, weight, x, added, out)

    def _layout(self, rows: int, columns: int, name: str) -> c_void_p:
        layout = c_void_p()
        real = _REALS[getattr(torch, name) if name else self.dtype]
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), real, *sizes)
        return layout

    def _set(self, about: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", about, attribute, byref(value), size)

    def _point(self, plan: _Plan, operands: _Operands) -> None:
        pointers = {_BIAS_POINTER: operands.bias, _FACTOR_POINTER: operands.factor}
        if operands.step is not None:
            pointers |= dict(zip(_STEP_POINTERS, (operands.step, self._one), strict=True))
        for attribute, tensor in pointers.items():
            if tensor is not None:
                self._set(plan.about, attribute, c_void_p(tensor.data_ptr()))

    def _launch(self, plan: _Plan, algorithm: bytes, operands: _Operands, out: Any) -> None:
        self._point(plan, operands)
        there = c_void_p(out.data_ptr())
        # Nothing is added; and what gives fp8 has nothing of the kind that could be.
        added = there if operands.factor is None else c_void_p()
        # Downwards: what a product leaves behind its counters stands where those before it had theirs.
        workspace = self.counters[_PLACES - 1 - self._turn % _PLACES]
        self._turn += 1
        self._call(
            "cublasLtMatmul", self._handle, plan.about,
            byref(c_float(1.0)), c_void_p(operands.weight.data_ptr()), plan.weight,
            c_void_p(operands.x.data_ptr()), plan.x,
            byref(c_float(0.0)), added, plan.added, there, plan.out,
            algorithm, c_void_p(workspace), c_size_t(_WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise StageError(f"{name} failed with status {status}")


@dataclass(frozen=True, slots=True)
class _Operands:
    """Tensors: of fp8 with a step, and with a factor where what comes of them is fp8 again."""

    x: Any
    weight: Any
    bias: Any | None
    step: Any | None = None
    factor: Any | None = None


@dataclass(slots=True)
class _Plan:
    """The library's descriptions of one product."""

    about: c_void_p
    weight: c_void_p
    x: c_void_p
    added: c_void_p
    out: c_void_p
    algorithm: bytes = b""


def library_version() -> int:
    version: Callable[[], int] = _load().cublasLtGetVersion
    return version()


def _load() -> ctypes.CDLL:
    """The one that PyTorch has loaded, which goes by the first number of its CUDA."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
