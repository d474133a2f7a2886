"""The words after a variant's precision that say how it came to it: `onnxruntime-int8+attention+smooth+split`."""

from __future__ import annotations

import re
from enum import StrEnum

from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.registry import did_you_mean
from hasten.core.targets import TARGETS
from hasten.core.variant import CUDA, Precision, Variant
from hasten.quantize.recipe import Calibrator, Method, Recipe

_KEEP = re.compile(r"keep([1-9]\d*)")


class Way(StrEnum):
    ATTENTION = "attention"  # fused attention is quantized too
    SMOOTH = "smooth"  # activation outliers moved into the weights
    SPLIT = "split"  # feed-forward channels with outliers computed in float
    GELU = "gelu"  # GELU by a cheaper formula
    FAST = "fast"  # products of fp8 added up in fewer bits than fp32
    MINMAX = "minmax"  # static ranges, found so
    ENTROPY = "entropy"
    PERCENTILE = "percentile"
    BLOCKS = "blocks"  # weights alone, in blocks
    QDQ = "qdq"  # by the quantizers that stand in the module itself


# What quantizers in a module make, which no graph and no recipe could: from one that was given with them …
OF_QUANTIZERS = Variant("onnxruntime", Precision.INT8, ways=(Way.QDQ,))
FUSED_OF_QUANTIZERS = {
    precision: Variant("fused", precision, CUDA, (Way.QDQ,)) for precision in (Precision.INT8, Precision.FP8)
}
# … and from any that they can be put into: it is the only int8 that is made for TensorRT.
ENGINE_OF_QUANTIZERS = Variant("tensorrt", Precision.INT8, CUDA, (Way.QDQ,))
_CALIBRATORS = {Way(calibrator.value): calibrator for calibrator in Calibrator}
# Words that are about ONNX Runtime's graphs, or about its products in bytes.
_NOT_FOR = {Method.NNCF: tuple(Way), Method.BLOCKS: (Way.ATTENTION,)}
# Words that are no way to quantize where these backends hear them.
_UNQUANTIZED = {"fused": (Way.GELU,), "onnxruntime": (Way.GELU,)}
# Backends that quantize by themselves, from the module: to what, and the words they know beside keepN.
_BY_THEMSELVES = {"fused": ((Precision.FP8, Precision.INT8), (Way.GELU, Way.FAST))}
_MAKERS = {Method.NNCF: "NNCF, which quantizes for OpenVINO,", Method.BLOCKS: "quantizing weights in blocks"}


def check_ways(variant: Variant) -> None:
    """Refuse words nobody knows, and words that do not go together."""
    known = [*Way, "keepN"]
    for word in variant.ways:
        if word not in list(Way) and not _KEEP.fullmatch(word):
            raise PlanError(
                f"'{variant}' is made in a way nobody knows, '{word}'{did_you_mean(word, known)}",
                hint=f"known: {', '.join(known)} (N products stay in float)",
            )
    words = ["keepN" if _KEEP.fullmatch(word) else word for word in variant.ways]
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise PlanError(f"'{variant}' says {twice} twice", hint="once is enough")
    if variant.backend == "onnxruntime" and variant.device == CUDA and is_quantized(variant):
        raise UnsupportedError(
            f"'{variant}' does not answer: ONNX Runtime's int8 graphs of encoders are for processors"
        )
    if is_of_quantizers(variant):
        made = (OF_QUANTIZERS, *FUSED_OF_QUANTIZERS.values(), ENGINE_OF_QUANTIZERS)
        if variant not in made:
            raise PlanError(f"'{variant}': quantizers in a module make {', '.join(map(str, made))}, and nothing else")
        return
    foreign = [word for word in variant.ways if word not in _UNQUANTIZED.get(variant.backend, ())]
    if foreign and not is_quantized(variant):
        raise PlanError(f"'{variant}': {foreign[0]} is a way to quantize, and {variant.precision} is not quantized")
    if is_by_itself(variant):
        _, taken = _BY_THEMSELVES[variant.backend]
        useless = next((word for word in words if word not in (*taken, "keepN")), None)
        if useless is not None:
            raise PlanError(f"'{variant}': {useless} is nothing that {variant.backend} can do")
        return
    if len([word for word in variant.ways if word in (*_CALIBRATORS, Way.BLOCKS)]) > 1:
        raise PlanError(
            f"'{variant}' names more than one method", hint="choose one of minmax, entropy, percentile, blocks"
        )
    if variant.precision is Precision.INT4 and Way.BLOCKS not in variant.ways:
        raise PlanError(
            f"'{variant}': four bits are for weights in blocks", hint=f"{_with_ways(variant, (Way.BLOCKS,))}"
        )
    method = method_of(variant)
    useless = next((word for word in words if word in _NOT_FOR.get(method, ())), None)
    if useless is not None:
        raise PlanError(f"'{variant}': {useless} is nothing that {_MAKERS[method]} can do")


def check_recipe(recipe: Recipe) -> None:
    """Refuse one that contradicts the name of what it makes: it may have been written by hand."""
    variant = Variant.parse(recipe.variant)
    check_ways(variant)
    if not is_quantized(variant):
        raise PlanError(f"the recipe is for {variant}, which is not quantized")
    if is_by_itself(variant) or is_of_quantizers(variant):
        raise PlanError(f"the recipe is for {variant}, which is made without one")
    if recipe.method is not method_of(variant):
        raise PlanError(f"the recipe's method is {recipe.method}, and {variant} is made by {method_of(variant)}")
    if recipe.target not in TARGETS:
        raise PlanError(
            f"the recipe is for a target nobody knows, '{recipe.target}'{did_you_mean(recipe.target, TARGETS)}",
            hint=f"known: {', '.join(TARGETS)}",
        )


def is_quantized(variant: Variant) -> bool:
    return variant.precision in (Precision.INT8, Precision.INT4) or is_by_itself(variant)


def is_by_itself(variant: Variant) -> bool:
    """Whether its backend quantizes the module: no graph is rewritten, and there is no recipe."""
    precisions, _ = _BY_THEMSELVES.get(variant.backend, ((), ()))
    return variant.precision in precisions


def is_of_quantizers(variant: Variant) -> bool:
    return Way.QDQ in variant.ways


def is_of_given_quantizers(variant: Variant) -> bool:
    """Whether it takes a module that brings them."""
    return is_of_quantizers(variant) and variant != ENGINE_OF_QUANTIZERS


def is_of_quantized_graph(variant: Variant) -> bool:
    """Whether nothing makes it but a graph that was given in its precision."""
    is_engine = variant.backend == ENGINE_OF_QUANTIZERS.backend
    return is_engine and variant.precision in (Precision.INT8, Precision.FP8) and not is_of_quantizers(variant)


def method_of(variant: Variant) -> Method:
    if variant.backend == "openvino":
        return Method.NNCF
    if Way.BLOCKS in variant.ways:
        return Method.BLOCKS
    return Method.STATIC if calibrator_of(variant) else Method.DYNAMIC


def calibrator_of(variant: Variant) -> Calibrator | None:
    return next((calibrator for way, calibrator in _CALIBRATORS.items() if way in variant.ways), None)


def needs_calibration(variant: Variant) -> bool:
    """Whether making it takes rows: to find ranges, outliers, or what may stay in float."""
    if not is_quantized(variant):
        return False
    if is_by_itself(variant) or variant == ENGINE_OF_QUANTIZERS:
        return True
    is_found = bool(kept_products(variant)) or any(way in variant.ways for way in (Way.SMOOTH, Way.SPLIT))
    return is_found or method_of(variant) in (Method.STATIC, Method.NNCF)


def kept_products(variant: Variant) -> int:
    """How many products stay in float."""
    return next((int(match[1]) for word in variant.ways if (match := _KEEP.fullmatch(word))), 0)


def without_kept(variant: Variant) -> Variant:
    return _with_ways(variant, tuple(word for word in variant.ways if not _KEEP.fullmatch(word)))


def with_kept(variant: Variant, count: int) -> Variant:
    plain = without_kept(variant)
    return _with_ways(plain, (*plain.ways, f"keep{count}"))


def _with_ways(variant: Variant, ways: tuple[str, ...]) -> Variant:
    return Variant(variant.backend, variant.precision, variant.device, ways)
