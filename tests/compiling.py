"""Compile the kernels for GPUs that are not here, in half precision or with eight bits: `python compiling.py 90 fp8`.

Types and shapes as a model of width 768 asks for them. What Triton's interpreter lets pass, its compiler may not.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hasten.kernels import (
    across,
    activation,
    attend,
    attention,
    contract,
    embed,
    expand,
    head,
    multiply,
    norm,
    pool,
    squeeze,
)

WIDTH, INNER, SIZE = 768, 3072, 64
POINTERS = {
    "ids": "*i32", "positions": "*i32", "types": "*i32", "work": "*i32", "sequence": "*i32", "starts": "*i32",
    "factors": "*fp32", "step": "*fp32", "total": "*fp32", "next_total": "*fp32",
}  # fmt: skip
FLOATS = ("eps", "scale_of_scores")
NARROW = {"fp16": ("*fp16", 0.0), "fp8": ("*fp8e4nv", 448.0), "int8": ("*i8", 127.0)}
# What a program may hold there.
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def compile_for(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], *, fits: bool = True, **options: int
) -> Any:
    """The kernel's other arguments are halves where they are pointers, and else sizes."""
    signature = {
        name: "constexpr" if name in constants else types.get(name) or POINTERS.get(name) or "*fp16"
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places)
    if constants.get("is_dependent"):
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if fits:
        assert compiled.metadata.shared <= SHARED_BYTES[capability], kernel
    return compiled


def kernels(capability: int, narrow: str) -> None:
    pointer, largest = NARROW[narrow]
    sizes = dict.fromkeys(("rows", "columns", "depth", "width", "tokens", "inner", "out_width", "distances"), "i32")
    is_dependent = capability >= 90
    for is_uniform in (True, False):
        common = {"largest": largest, "is_uniform": is_uniform}
        block = {"block": 1024, "is_dependent": is_dependent}
        if largest:
            compile_for(
                squeeze._squeeze, capability, {**sizes, "out": pointer}, {**common, "rows_at_once": 4, "columns": 512}
            )
        compile_for(
            activation._gelu, capability, {**sizes, "out": pointer},
            {**common, "is_tanh": False, "rows_at_once": 4, "columns": 512},
        )  # fmt: skip
        compile_for(
            norm._norm, capability, {**sizes, "eps": "fp32", "narrow": pointer},
            {**common, **block, "has_bias": True, "has_residual": True, "per_program": 4},
        )  # fmt: skip
        compile_for(
            embed._embed, capability, {**sizes, "eps": "fp32", "narrow": pointer},
            {**common, **block, "has_kinds": True, "has_norm": True},
        )  # fmt: skip
    compile_for(across._copy, capability, {"count": "i32"}, {"block": 2048})
    common = {"largest": largest, "is_uniform": narrow != "int8"}
    cuts = (*attention.CUTS.values(), attention.LONG, attention.LONE)
    for cut, (has_bias, size) in product(cuts, [(False, SIZE), (False, SIZE // 2), (True, SIZE)]):
        compile_for(
            attention._attention, capability, {**sizes, "scale": "fp32", "out": pointer},
            {**common, "has_bias": has_bias, "size": size, "block": size, "rows": cut.rows, "keys": cut.keys},
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    has_steps = narrow == "int8"
    few = {**common, "has_steps": has_steps, "is_dependent": is_dependent}
    compile_for(
        expand._expand, capability, {**sizes, "eps": "fp32", "weight": pointer},
        {
            **few, "width": WIDTH, "block": 1024, "rows": 16, "columns": 64, "share": 64,
            "has_gelu": True, "is_tanh": False,
        }, num_warps=8,
    )  # fmt: skip
    compile_for(
        attend._attend, capability, {**sizes, "scale": "fp32", "weight": pointer},
        {**few, "has_bias": False, "width": WIDTH, "size": SIZE, "rows": 16, "keys": 64, "columns": 128},
    )  # fmt: skip
    compile_for(
        contract._contract, capability, {**sizes, "weight": pointer}, {**few, "rows": 16, "columns": 64, "depth": 256}
    )
    for cut in (head._ROW, head._ROWS, head._MORE, head._FULL):
        x = {"x": "*fp32"} if cut is head._FULL else {}
        compile_for(
            head._dense, capability, {**sizes, **x, "rows": "*i32", "weight": "*fp32", "out": "*fp32", "count": "i32"},
            {
                "has_rows": True, "activation": "tanh", "depth": cut.depth or 1024,
                "columns_at_once": cut.columns, "rows_at_once": cut.rows,
            }, num_warps=cut.warps,
        )  # fmt: skip
    if not largest:
        compile_for(pool._pool, capability, sizes, {"kind": pool.MEAN, "rows": 32, "columns": 128})
        return
    for cut in multiply.CUTS:
        for is_squeezed in (True, False):
            compile_for(
                multiply._multiply, capability,
                {**sizes, "x": pointer, "weight": pointer, "out": pointer if is_squeezed else "*fp16"},
                {
                    **common, "largest": largest if is_squeezed else 0.0, "has_bias": is_squeezed,
                    "has_steps": has_steps, "has_gelu": is_squeezed, "is_tanh": False, "is_fp8": narrow == "fp8",
                    "sums_fast": not is_squeezed,
                    "is_even": True, "rows_at_once": cut.rows, "columns_at_once": cut.columns,
                    "depth_at_once": cut.depth, "group": 8,
                }, num_warps=cut.warps, num_stages=cut.stages, fits=cut == multiply.USUAL,
            )  # fmt: skip
        print(cut, flush=True)


if __name__ == "__main__":
    kernels(int(sys.argv[1]), sys.argv[2])
