"""Compile the kernels for a GPU that need not be present, in fp16, fp8 or int8: `python compile_kernels.py 90 fp8`.

Types and shapes are those of a model of width 768. Triton's compiler rejects code that its interpreter accepts.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hasten.kernels.cuda import host_copy
from hasten.kernels.ops import (
    activation,
    attention,
    attention_out_proj,
    embed,
    embed_norm,
    gemm,
    glu,
    head,
    linear_accumulate,
    norm,
    norm_linear,
    pool,
    rms_linear,
    rms_norm,
    rotary,
)

WIDTH, INNER, SIZE = 768, 3072, 64
POINTERS = {
    "ids": "*i32", "positions": "*i32", "token_types": "*i32", "tiles": "*i32", "sequence": "*i32", "starts": "*i32",
    "inverse_scales": "*fp32", "scale": "*fp32", "total": "*fp32", "next_total": "*fp32",
}  # fmt: skip
QUANTIZED = {"fp16": ("*fp16", 0.0), "fp8": ("*fp8e4nv", 448.0), "int8": ("*i8", 127.0)}
# Shared memory per program, by compute capability.
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def compile_for(
    kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], *, fits: bool = True, **options: int
) -> Any:
    """Compile a kernel; arguments without a type are fp16 pointers."""
    signature = {
        name: "constexpr" if name in constants else types.get(name) or POINTERS.get(name) or "*fp16"
        for name in kernel.arg_names
    }
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, indexed)
    if constants.get("use_pdl"):
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if fits:
        assert compiled.metadata.shared <= SHARED_BYTES[capability], kernel
    return compiled


def compile_kernels(capability: int, precision: str) -> None:
    """Compile every kernel for a compute capability (90 is Hopper)."""
    pointer, max_value = QUANTIZED[precision]
    names = ("rows", "columns", "depth", "width", "tokens", "inner", "out_width", "distance_count")
    sizes = dict.fromkeys(names, "i32")
    use_pdl = capability >= 90
    for is_per_tensor in (True, False):
        common = {"max_value": max_value, "is_per_tensor": is_per_tensor}
        block = {"block": 1024, "use_pdl": use_pdl}
        for gelu_kind in (None, activation.EXACT, activation.TANH):
            compile_for(
                activation._activate, capability, {**sizes, "out": pointer},
                {**common, "gelu_kind": gelu_kind, "block_rows": 4, "block_columns": 512},
            )  # fmt: skip
        compile_for(
            norm._norm, capability, {**sizes, "eps": "fp32", "quantized_out": pointer},
            {**common, **block, "rows_per_program": 4},
        )  # fmt: skip
        compile_for(
            embed._embed, capability, {**sizes, "eps": "fp32", "quantized_out": pointer},
            {**common, **block},
        )  # fmt: skip
    compile_for(host_copy._copy, capability, {"count": "i32"}, {"block": 2048})
    common = {"max_value": max_value, "is_per_tensor": precision != "int8"}
    tile_configs = (*attention.TILE_CONFIGS.values(), attention.LONG_TILE_CONFIG, attention.SINGLE_ROW_TILE_CONFIG)
    for tile_config, (has_bias, size) in product(tile_configs, [(False, SIZE), (False, SIZE // 2), (True, SIZE)]):
        compile_for(
            attention._attention, capability, {**sizes, "softmax_scale": "fp32", "out": pointer},
            {
                **common, **({} if has_bias else {"bias": None}), "size": size, "block": size, "window": -1, "parts": 1,
                "rows": tile_config.rows, "keys": tile_config.keys,
            },
            num_warps=tile_config.warps, num_stages=tile_config.stages,
        )  # fmt: skip
    compile_pre_norm(capability, precision)
    has_channel_scales = precision == "int8"
    small_batch = {**common, "has_channel_scales": has_channel_scales, "use_pdl": use_pdl}
    compile_for(
        norm_linear._norm_linear, capability, {**sizes, "eps": "fp32", "weight": pointer},
        {
            **small_batch, "width": WIDTH, "block": 1024, "rows": 16, "columns": 64, "columns_per_program": 64,
            "gelu_kind": activation.EXACT,
        }, num_warps=8,
    )  # fmt: skip
    compile_for(
        attention_out_proj._attention_out_proj, capability, {**sizes, "softmax_scale": "fp32", "weight": pointer},
        {**small_batch, "bias": None, "width": WIDTH, "size": SIZE, "rows": 16, "keys": 64, "columns": 128},
    )  # fmt: skip
    compile_for(
        linear_accumulate._linear_accumulate,
        capability,
        {**sizes, "weight": pointer},
        {**small_batch, "rows": 16, "columns": 64, "depth": 256},
    )
    for tile_config in (head._SINGLE_ROW, head._FEW_ROWS, head._MANY_ROWS, head._FP32_ROWS):
        x = {"x": "*fp32"} if tile_config is head._FP32_ROWS else {}
        compile_for(
            head._dense, capability, {**sizes, **x, "rows": "*i32", "weight": "*fp32", "out": "*fp32", "count": "i32"},
            {
                "activation": "tanh", "block_depth": tile_config.depth or 1024,
                "block_columns": tile_config.columns, "block_rows": tile_config.rows,
            }, num_warps=tile_config.warps,
        )  # fmt: skip
    if not max_value:
        compile_for(pool._pool, capability, sizes, {"kind": pool.MEAN, "rows": 32, "columns": 128})
        return
    for tile_config in gemm.TILE_CONFIGS:
        for is_quantized in (True, False):
            compile_for(
                gemm._gemm, capability,
                {**sizes, "x": pointer, "weight": pointer, "out": pointer if is_quantized else "*fp16"},
                {
                    **common, **({} if is_quantized else {"bias": None, "max_value": 0.0}),
                    "has_channel_scales": has_channel_scales, "gelu_kind": activation.EXACT if is_quantized else None,
                    "is_fp8": precision == "fp8", "fast_accum": not is_quantized,
                    "is_depth_divisible": True, "block_rows": tile_config.rows, "block_columns": tile_config.columns,
                    "block_depth": tile_config.depth, "group_rows": 8,
                }, num_warps=tile_config.warps, num_stages=tile_config.stages,
                fits=tile_config == gemm.DEFAULT_TILES,
            )  # fmt: skip
        print(tile_config, flush=True)


def compile_pre_norm(capability: int, precision: str) -> None:
    """Compile the kernels of pre-norm encoders."""
    pointer, max_value = QUANTIZED[precision]
    names = ("rows", "columns", "depth", "width", "tokens", "rotated_columns", "distance_count")
    sizes = dict.fromkeys(names, "i32") | {"eps": "fp32", "softmax_scale": "fp32"}
    common = {"max_value": max_value, "is_per_tensor": precision != "int8"}
    quantized = {**sizes, "out": pointer, "total": "*fp16"}
    compile_for(embed_norm._embed_norm, capability, quantized, {**common, "block": 1024})
    compile_for(rms_norm._rms_norm, capability, quantized, {**common, "block": 1024, "rows_per_program": 4})
    blocks = {"block_rows": 4, "block_columns": 512}
    compile_for(glu._gated_activation, capability, quantized, {**common, **blocks, "gelu_kind": activation.EXACT})
    very_long = attention.VERY_LONG_TILE_CONFIG
    for tile_config, window in ((very_long, -1), (attention.windowed(very_long), 64)):
        compile_for(
            attention._attention, capability, quantized,
            {
                **common, "bias": None, "size": SIZE, "block": SIZE, "rows": tile_config.rows, "keys": tile_config.keys,
                "window": window, "parts": very_long.rows // tile_config.rows,
            }, num_warps=tile_config.warps, num_stages=tile_config.stages,
        )  # fmt: skip
    has_rotation = {"head_size": SIZE, "glu_kind": None}
    has_gate = {"positions": None, "table": None, "head_size": 0, "glu_kind": activation.EXACT}
    small_batch = {"use_pdl": capability >= 90, "width": WIDTH, "block": 1024, "block_rows": 16, "block_columns": 64}
    for epilogue in (has_rotation, has_gate):
        compile_for(
            rms_linear._rms_linear, capability, {**sizes, "x": "*fp32", "weight": pointer},
            {**common, **small_batch, **epilogue, "has_channel_scales": precision == "int8", "has_norm": True},
            num_warps=8,
        )  # fmt: skip
    if not max_value:
        compile_for(rotary._rotate, capability, sizes, {"head_size": SIZE, "block_rows": 8, "block_columns": 256})


if __name__ == "__main__":
    compile_kernels(int(sys.argv[1]), sys.argv[2])
