"""Variants by the words people know: a precision, or the levels and presets of Optimum's optimizer and quantizer."""

from __future__ import annotations

from collections.abc import Sequence

from hasten.backends import BACKENDS
from hasten.builder.search import LADDER, lacking
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.hardware import Machine
from hasten.core.registry import did_you_mean
from hasten.core.targets import TARGETS
from hasten.core.variant import CUDA, Variant

# Each is tried, and the fastest that answers like the original is chosen.
LEVELS = {
    # The graph as it was exported; folding constants and the like is the runtime's.
    "O1": ("graph-fp32",),
    # Attention, norms and GELU in one operator each, the last layer pruned to what the task reads.
    "O2": ("onnxruntime-fp32",),
    # GELU by a formula that is cheaper and not quite the same: what fp32 may differ by still holds.
    "O3": ("onnxruntime-fp32", "onnxruntime-fp32+gelu"),
    # Half precision, where something computes in it.
    "O4": ("onnxruntime-fp16@cuda", "fused-fp16@cuda", "fused-fp16+gelu@cuda", "openvino-fp16"),
}
INT8 = ("onnxruntime-int8", *LADDER["onnxruntime"])
_INT4 = ("onnxruntime-int4+blocks",)


def of_level(level: str | None, preset: str | None, machine: Machine, device: str | None = None) -> tuple[str, ...]:
    """What a level optimizes, a preset quantizes, or both; the preset is also the target that int8 is made for."""
    if preset is not None and preset not in TARGETS:
        raise PlanError(f"there is no preset '{preset}'{did_you_mean(preset, TARGETS)}", hint=f"{', '.join(TARGETS)}")
    if level is not None and level not in LEVELS:
        raise PlanError(f"there is no level '{level}'", hint=f"one of {', '.join(LEVELS)}")
    wanted = [name for name in LEVELS.get(level or "", ()) if device in (None, Variant.parse(name).device)]
    if device == CUDA and (preset is not None or not wanted):
        what = f"preset {preset}" if preset is not None else f"level {level}"
        raise PlanError(
            f"{what} is for processors, and device is cuda", hint="level O4 is for both, or leave out device"
        )
    probed = {name: _support(Variant.parse(name), machine) for name in wanted}
    found = tuple(name for name, reason in probed.items() if reason is None)
    if wanted and not found:
        told = "; ".join(f"{name}: {reason}" for name, reason in probed.items())
        raise UnsupportedError(f"nothing of level {level} runs here ({told})")
    return found + (INT8 if preset is not None else ())


def of_precision(precision: str, backend: str | None, device: str | None, machine: Machine) -> tuple[str, ...]:
    """All that computes in a precision, on a device or, without one, on a GPU where something does so there."""
    if device == CUDA and not machine.gpus:
        raise UnsupportedError("device cuda needs an NVIDIA GPU, and there is none here", hint="leave out device")
    known = [
        variant
        for one in (BACKENDS.all() if backend is None else [BACKENDS.get(backend)])
        if one.is_stored
        for variant in (*one.variants(machine), *_further(one.name))
        if _support(variant, machine) is None
    ]
    on_device = [variant for variant in known if variant.device == device or device is None]
    found = [variant for variant in on_device if variant.precision == precision]
    on_gpu = [variant for variant in found if variant.device == CUDA]
    if not found:
        where = "here" if device is None else f"on {device} here"
        offered = dict.fromkeys(variant.precision for variant in on_device)
        raise UnsupportedError(
            f"{backend or 'no backend'} {'computes' if backend is None else 'does not compute'} in {precision} {where}",
            hint=f"precision can be {', '.join(offered)}" if offered else "hasten doctor says what runs here",
        )
    return tuple(variant.name for variant in (on_gpu or found))


def _further(backend: str) -> Sequence[Variant]:
    names = (*LADDER.get(backend, ()), *(name for name in _INT4 if name.startswith(f"{backend}-")))
    return [Variant.parse(name) for name in names]


def _support(variant: Variant, machine: Machine) -> str | None:
    """Why a variant does not run here; None where it does."""
    support = BACKENDS.get(variant.backend).probe(machine, variant)
    package = lacking(variant)
    return support.reason if not support.ok else f"making it needs '{package}'" if package is not None else None
