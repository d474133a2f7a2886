"""Products by cuBLASLt, which PyTorch brings: what is added to them rides along, and the algorithm is our choice.

PyTorch takes the first algorithm that the library proposes for a shape. Here the proposals can be timed once, and the
fastest be named from then on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hasten.core.errors import StageError

# What the library's documentation asks for on Hopper.
_WORKSPACE = 32 * 2**20
_PROPOSALS = 64
# Names of the library's header.
_COMPUTE_FP32, _REAL_FP32 = 68, 0
_REALS = {torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
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

    def __init__(self, dtype: Any, device: Any = "cuda") -> None:
        self.dtype = dtype
        self._library = _load()
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._chosen: dict[Product, bytes] = {}
        self._plans: dict[Product, _Plan] = {}

    def __call__(self, x: Any, weight: Any, bias: Any | None = None, *, has_gelu: bool = False) -> Any:
        """x · weightᵀ + bias, and GELU of it; on PyTorch's current stream."""
        (rows, depth), columns = x.shape, weight.shape[0]
        what = Product(rows, columns, depth, bias is not None, has_gelu)
        if x.dtype != self.dtype:
            raise StageError(f"a product of {x.dtype} was asked of one who multiplies {self.dtype}")
        plan = self._plans.get(what)
        if plan is None:
            plan = self._plan(what)
            plan.algorithm = self._chosen.get(what) or self._proposals(plan)[0]
            self._plans[what] = plan
        out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        self._launch(plan, plan.algorithm, x, weight, bias, out)
        return out

    def _proposals(self, plan: _Plan) -> list[bytes]:
        preference, found = c_void_p(), c_int()
        results = (_Proposal * _PROPOSALS)()
        size = c_size_t(_WORKSPACE)
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, byref(size), c_size_t(8))
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, plan.about, plan.weight, plan.x, plan.out, plan.out,
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
        x, weight = self._draw(what.rows, what.depth), self._draw(what.columns, what.depth)
        out, bias = self._draw(what.rows, what.columns), self._draw(what.columns) if what.has_bias else None
        plan = self._plan(what)
        launches = {
            algorithm: partial(self._launch, plan, algorithm, x, weight, bias, out)
            for algorithm in self._proposals(plan)
        }
        fastest = min(launches, key=lambda algorithm: seconds(launches[algorithm]))
        self._destroy(plan)
        return fastest

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
        for layout in (plan.weight, plan.x, plan.out):
            self._call("cublasLtMatrixLayoutDestroy", layout)

    def _draw(self, *shape: int) -> Any:
        return torch.randn(*shape, device=self._workspace.device).to(self.dtype)

    def _plan(self, what: Product) -> _Plan:
        """The library counts by columns, so that it is told of everything transposed."""
        about = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(about), _COMPUTE_FP32, _REAL_FP32)
        self._set(about, _TRANSPOSE_A, c_int32(_TRANSPOSED))
        epilogue = _GELU_BIAS if what.has_gelu else _BIAS if what.has_bias else _PLAIN
        self._set(about, _EPILOGUE, c_uint32(epilogue))
        weight = self._layout(what.depth, what.columns)
        return _Plan(about, weight, self._layout(what.depth, what.rows), self._layout(what.columns, what.rows))

    def _layout(self, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        sizes = c_uint64(rows), c_uint64(columns), c_int64(rows)
        self._call("cublasLtMatrixLayoutCreate", byref(layout), _REALS[self.dtype], *sizes)
        return layout

    def _set(self, about: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", about, attribute, byref(value), size)

    def _launch(self, plan: _Plan, algorithm: bytes, x: Any, weight: Any, bias: Any | None, out: Any) -> None:
        if bias is not None:
            self._set(plan.about, _BIAS_POINTER, c_void_p(bias.data_ptr()))
        there = c_void_p(out.data_ptr())
        self._call(
            "cublasLtMatmul", self._handle, plan.about,
            byref(c_float(1.0)), c_void_p(weight.data_ptr()), plan.weight, c_void_p(x.data_ptr()), plan.x,
            byref(c_float(0.0)), there, plan.out, there, plan.out,
            algorithm, c_void_p(self._workspace.data_ptr()), c_size_t(_WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise StageError(f"{name} failed with status {status}")


@dataclass(slots=True)
class _Plan:
    """The library's descriptions of one product."""

    about: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p
    algorithm: bytes = b""


def library_version() -> int:
    version: Callable[[], int] = _load().cublasLtGetVersion
    return version()


def _load() -> ctypes.CDLL:
    """The one that PyTorch has loaded, which goes by the first number of its CUDA."""
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').partition('.')[0]}")
