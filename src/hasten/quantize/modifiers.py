"""Parse and check the modifiers of a variant, which say how it is quantized: `onnxruntime-int8+attention+smooth`."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum

from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.registry import did_you_mean
from hasten.core.system.cpu_targets import TARGETS
from hasten.core.variant import CUDA, Precision, Variant
from hasten.quantize.recipe import Calibrator, Method, Recipe

_KEEP = re.compile(r"keep([1-9]\d*)")


class Modifier(StrEnum):
    """The suffixes of a variant's name, besides `keepN` (N matmuls stay in float)."""

    ATTENTION = "attention"  # fused attention is quantized too
    SMOOTH = "smooth"  # activation outliers are moved into the weights
    SPLIT = "split"  # feed-forward channels with outliers are computed in float
    TANH_GELU = "tanhgelu"  # GELU by its tanh approximation
    FAST_ACCUM = "fastaccum"  # fp8 matmuls accumulate in lower precision than fp32
    MINMAX = "minmax"  # static ranges by this calibrator
    ENTROPY = "entropy"
    PERCENTILE = "percentile"
    BLOCKS = "blocks"  # block-wise weight-only quantization
    DYNAMIC = "dynamic"  # OpenVINO quantizes activations at run time
    QDQ = "qdq"  # by the quantizers inside the PyTorch module


# Variants made from a module with quantizers, without a recipe: these from a module that the user calibrated …
ORT_QDQ = Variant("onnxruntime", Precision.INT8, modifiers=(Modifier.QDQ,))
FUSED_QDQ = {
    precision: Variant("fused", precision, CUDA, (Modifier.QDQ,)) for precision in (Precision.INT8, Precision.FP8)
}
# … and these from any module that can be patched: they are the only int8 variants for TensorRT and TensorRT for RTX.
TENSORRT_QDQ = {
    backend: Variant(backend, Precision.INT8, CUDA, (Modifier.QDQ,)) for backend in ("tensorrt", "tensorrt-rtx")
}
# Modifiers that rewrite ONNX Runtime's graphs, or quantize their activations, and the one for OpenVINO alone.
_UNSUPPORTED = {
    Method.NNCF: tuple(Modifier),
    Method.WEIGHTS: tuple(modifier for modifier in Modifier if modifier is not Modifier.DYNAMIC),
    Method.BLOCKS: (Modifier.ATTENTION, Modifier.DYNAMIC),
    Method.DYNAMIC: (Modifier.DYNAMIC,),
    Method.STATIC: (Modifier.DYNAMIC,),
}
# Modifiers that these backends also apply to variants that are not quantized.
_FLOAT_MODIFIERS = {"fused": (Modifier.TANH_GELU,), "onnxruntime": (Modifier.TANH_GELU,)}
# Backends that quantize the module themselves: the precisions, and the modifiers they support besides keepN.
_SELF_QUANTIZING = {"fused": ((Precision.FP8, Precision.INT8), (Modifier.TANH_GELU, Modifier.FAST_ACCUM))}
_METHOD_NAMES = {
    Method.NNCF: "NNCF, which quantizes for OpenVINO",
    Method.WEIGHTS: "OpenVINO's dynamic quantization",
    Method.BLOCKS: "block-wise quantization",
    Method.DYNAMIC: "ONNX Runtime, whose int8 is dynamic by default",
    Method.STATIC: "static quantization",
}


def check_modifiers(variant: Variant) -> None:
    """Raise for unknown modifiers and for unsupported combinations."""
    known = [*Modifier, "keepN"]
    for word in variant.modifiers:
        if word not in list(Modifier) and not _KEEP.fullmatch(word):
            raise PlanError(
                f"'{variant}' has an unknown modifier '{word}'{did_you_mean(word, known)}",
                hint=f"known: {', '.join(known)} (N matmuls stay in float)",
            )
    words = ["keepN" if _KEEP.fullmatch(word) else word for word in variant.modifiers]
    repeated = next((word for word in words if words.count(word) > 1), None)
    if repeated is not None:
        raise PlanError(f"'{variant}' repeats the modifier {repeated}", hint="name it once")
    if variant.backend == "onnxruntime" and variant.device == CUDA and is_quantized(variant):
        raise UnsupportedError(f"'{variant}' is not supported: ONNX Runtime runs int8 encoder graphs only on CPUs")
    if is_qdq(variant):
        supported = (ORT_QDQ, *FUSED_QDQ.values(), *TENSORRT_QDQ.values())
        if variant not in supported:
            raise PlanError(f"'{variant}' is not supported: +qdq exists only as {', '.join(map(str, supported))}")
        return
    foreign = [word for word in variant.modifiers if word not in _FLOAT_MODIFIERS.get(variant.backend, ())]
    if foreign and not is_quantized(variant):
        raise PlanError(f"'{variant}': {foreign[0]} modifies quantization, and {variant.precision} is not quantized")
    if backend_quantizes_module(variant):
        _, supported_words = _SELF_QUANTIZING[variant.backend]
        unsupported = next((word for word in words if word not in (*supported_words, "keepN")), None)
        if unsupported is not None:
            raise PlanError(f"'{variant}': {unsupported} is not supported by {variant.backend}")
        return
    if len([word for word in variant.modifiers if word in (*Calibrator, Modifier.BLOCKS)]) > 1:
        raise PlanError(
            f"'{variant}' names more than one method", hint="choose one of minmax, entropy, percentile, blocks"
        )
    if variant.precision is Precision.INT4 and Modifier.BLOCKS not in variant.modifiers:
        raise PlanError(
            f"'{variant}': int4 is supported only with block-wise quantization",
            hint=replace(variant, modifiers=(Modifier.BLOCKS,)).name,
        )
    method = method_of(variant)
    unsupported = next((word for word in words if word in _UNSUPPORTED.get(method, ())), None)
    if unsupported is not None:
        raise PlanError(f"'{variant}': {unsupported} is not supported by {_METHOD_NAMES[method]}")


def check_recipe(recipe: Recipe) -> None:
    """Raise for a recipe that contradicts its variant's name: people may edit recipes."""
    variant = Variant.parse(recipe.variant)
    check_modifiers(variant)
    if not is_quantized(variant):
        raise PlanError(f"the recipe is for {variant}, which is not quantized")
    if backend_quantizes_module(variant) or is_qdq(variant):
        raise PlanError(f"the recipe is for {variant}, which does not take a recipe")
    if recipe.method is not method_of(variant):
        raise PlanError(f"the recipe's method is {recipe.method}, but the method of {variant} is {method_of(variant)}")
    if recipe.target not in TARGETS:
        raise PlanError(
            f"the recipe has an unknown target '{recipe.target}'{did_you_mean(recipe.target, TARGETS)}",
            hint=f"known: {', '.join(TARGETS)}",
        )


def is_quantized(variant: Variant) -> bool:
    """Return whether a variant computes in lower precision than its floating-point type."""
    return variant.precision in (Precision.INT8, Precision.INT4) or backend_quantizes_module(variant)


def backend_quantizes_module(variant: Variant) -> bool:
    """Return whether the backend quantizes the module itself, without a rewritten graph or a recipe."""
    precisions, _ = _SELF_QUANTIZING.get(variant.backend, ((), ()))
    return variant.precision in precisions


def is_qdq(variant: Variant) -> bool:
    """Return whether the variant is made by quantizers inside the module."""
    return Modifier.QDQ in variant.modifiers


def needs_qdq_module(variant: Variant) -> bool:
    """Return whether the variant needs a module that already has quantizers."""
    return is_qdq(variant) and variant not in TENSORRT_QDQ.values()


def is_quantized_graph(variant: Variant) -> bool:
    """Return whether the variant can only be made from an ONNX graph that is quantized already."""
    return is_quantized_engine(variant) and not is_qdq(variant)


def is_quantized_engine(variant: Variant) -> bool:
    """Return whether the variant is an engine of TensorRT whose matmuls run in 8 bits, and all else in fp16."""
    return variant.backend in TENSORRT_QDQ and variant.precision in (Precision.INT8, Precision.FP8)


def method_of(variant: Variant) -> Method:
    """Return the quantization method of a variant whose graph is quantized."""
    if variant.backend == "openvino":
        return Method.WEIGHTS if Modifier.DYNAMIC in variant.modifiers else Method.NNCF
    if Modifier.BLOCKS in variant.modifiers:
        return Method.BLOCKS
    return Method.STATIC if calibrator_of(variant) else Method.DYNAMIC


def calibrator_of(variant: Variant) -> Calibrator | None:
    """Return the calibrator that a variant names."""
    return next((calibrator for calibrator in Calibrator if calibrator in variant.modifiers), None)


def needs_calibration(variant: Variant) -> bool:
    """Return whether making the variant takes rows, to find ranges, outliers or sensitive matmuls."""
    if not is_quantized(variant):
        return False
    if backend_quantizes_module(variant) or variant in TENSORRT_QDQ.values():
        return True
    is_searched = any(word in variant.modifiers for word in (Modifier.SMOOTH, Modifier.SPLIT))
    return bool(kept_matmuls(variant)) or is_searched or method_of(variant) in (Method.STATIC, Method.NNCF)


def kept_matmuls(variant: Variant) -> int:
    """Return how many matmuls stay in float."""
    return next((int(match[1]) for word in variant.modifiers if (match := _KEEP.fullmatch(word))), 0)


def without_kept(variant: Variant) -> Variant:
    """Return the variant without keepN."""
    return replace(variant, modifiers=tuple(word for word in variant.modifiers if not _KEEP.fullmatch(word)))


def with_kept(variant: Variant, count: int) -> Variant:
    """Return the variant with `count` matmuls in float."""
    return replace(variant, modifiers=(*without_kept(variant).modifiers, f"keep{count}"))
