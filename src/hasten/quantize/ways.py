"""The words after a variant's precision that say how it came to it: `onnxruntime-int8+attention+smooth+split`."""

from __future__ import annotations

import re
from enum import StrEnum

from hasten.core.errors import PlanError
from hasten.core.registry import did_you_mean
from hasten.core.variant import Precision, Variant
from hasten.quantize.recipe import Calibrator, Method

_KEEP = re.compile(r"keep([1-9]\d*)")


class Way(StrEnum):
    ATTENTION = "attention"  # fused attention is quantized too
    SMOOTH = "smooth"  # activation outliers moved into the weights
    SPLIT = "split"  # feed-forward channels with outliers computed in float
    GELU = "gelu"  # GELU by a cheaper formula
    MINMAX = "minmax"  # static ranges, found so
    ENTROPY = "entropy"
    PERCENTILE = "percentile"
    BLOCKS = "blocks"  # weights alone, in blocks


_CALIBRATORS = {Way(calibrator.value): calibrator for calibrator in Calibrator}


def check_ways(variant: Variant) -> None:
    """Refuse words nobody knows, and words that do not go together."""
    known = [*Way, "keepN"]
    for word in variant.ways:
        if word not in list(Way) and not _KEEP.fullmatch(word):
            raise PlanError(
                f"'{variant}' is made in a way nobody knows, '{word}'{did_you_mean(word, known)}",
                hint=f"known: {', '.join(known)} (N products stay in float)",
            )
    if variant.ways and variant.precision not in (Precision.INT8, Precision.INT4):
        raise PlanError(
            f"'{variant}': {variant.ways[0]} is a way to quantize, and {variant.precision} is not quantized"
        )
    if len([word for word in variant.ways if word in (*_CALIBRATORS, Way.BLOCKS)]) > 1:
        raise PlanError(
            f"'{variant}' names more than one method", hint="choose one of minmax, entropy, percentile, blocks"
        )
    if variant.precision is Precision.INT4 and Way.BLOCKS not in variant.ways:
        raise PlanError(f"'{variant}': four bits are for weights in blocks", hint=f"{variant}+blocks")


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
    if variant.precision not in (Precision.INT8, Precision.INT4):
        return False
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
