"""Name variants by a precision, or by the levels and presets of Optimum's optimizer and quantizer."""

from __future__ import annotations

from hasten.backends import BACKENDS
from hasten.backends.onnxruntime import stored_precision
from hasten.builder.search.search import EXPERIMENTAL_BACKENDS, SEARCH_ORDER, missing_requirement
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.locate import fetch_weights
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.plan import Plan
from hasten.core.registry import did_you_mean
from hasten.core.system.cpu_targets import TARGETS
from hasten.core.system.hardware import Machine, this_machine
from hasten.core.variant import BEST, CUDA, Precision, Variant, VariantChoice

# All variants of a level are tried, and the fastest that passes the accuracy gate is chosen.
PRESETS = {
    # The graph as it was exported; the runtime folds constants.
    "O1": ("graph-fp32",),
    # Attention, norms and GELU fused into one operator each, the last layer pruned to the outputs of the task.
    "O2": ("onnxruntime-fp32",),
    # GELU by a cheaper approximation; the tolerance of fp32 applies to it.
    "O3": ("onnxruntime-fp32", "onnxruntime-fp32+tanhgelu"),
    # fp16, on devices that compute in it.
    "O4": ("onnxruntime-fp16@cuda", "fused-fp16@cuda", "fused-fp16+tanhgelu@cuda", "openvino-fp16"),
}
INT8 = ("onnxruntime-int8", *SEARCH_ORDER["onnxruntime"])
# Further variants of backends that can be chosen by their precision.
_BY_PRECISION = {**SEARCH_ORDER, "onnxruntime": (*SEARCH_ORDER["onnxruntime"], "onnxruntime-int4+blocks")}


def candidates_for_level(
    level: str | None, preset: str | None, machine: Machine, device: str | None = None
) -> tuple[str, ...]:
    """Return the variants of an optimization level, of a quantization preset, or of both.

    The preset is the CPU target that int8 is made for.
    """
    if preset is not None and preset not in TARGETS:
        raise PlanError(f"there is no preset '{preset}'{did_you_mean(preset, TARGETS)}", hint=f"{', '.join(TARGETS)}")
    if level is not None and level not in PRESETS:
        raise PlanError(f"there is no level '{level}'", hint=f"one of {', '.join(PRESETS)}")
    names = [name for name in PRESETS.get(level or "", ()) if device in (None, Variant.parse(name).device)]
    if device == CUDA and (preset is not None or not names):
        option = f"preset {preset}" if preset is not None else f"level {level}"
        raise PlanError(f"{option} is for CPUs, and device is cuda", hint="level O4 is for both, or leave out device")
    reasons = {name: _unsupported_reason(Variant.parse(name), machine) for name in names}
    supported = tuple(name for name, reason in reasons.items() if reason is None)
    if names and not supported:
        details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no variant of level {level} runs here ({details})")
    return supported + (INT8 if preset is not None else ())


def candidates_for_precision(
    precision: str, backend: str | None, device: str | None, machine: Machine
) -> tuple[str, ...]:
    """Return the variants of a precision for a device or, without one, for the GPU if a variant runs there."""
    if device == CUDA and not machine.gpus:
        raise UnsupportedError("device cuda needs an NVIDIA GPU, and this machine has none", hint="leave out device")
    if backend is not None:
        backends = [BACKENDS.get(backend)]
    else:
        backends = [candidate for candidate in BACKENDS.all() if candidate.name not in EXPERIMENTAL_BACKENDS]
    supported = [
        variant
        for candidate in backends
        if candidate.is_stored
        for variant in (*candidate.variants(machine), *map(Variant.parse, _BY_PRECISION.get(candidate.name, ())))
        if _unsupported_reason(variant, machine) is None
    ]
    on_device = [variant for variant in supported if variant.device == device or device is None]
    matches = [variant for variant in on_device if variant.precision == precision]
    on_gpu = [variant for variant in matches if variant.device == CUDA]
    if not matches:
        where = "here" if device is None else f"on {device} here"
        precisions = dict.fromkeys(variant.precision for variant in on_device)
        raise UnsupportedError(
            f"{backend or 'no backend'} {'computes' if backend is None else 'does not compute'} in {precision} {where}",
            hint=f"precision can be {', '.join(precisions)}" if precisions else "'hasten doctor' lists what runs here",
        )
    return tuple(variant.name for variant in (on_gpu or matches))


def candidates_for_choice(choice: VariantChoice, model: ModelDirectory, plan: Plan) -> tuple[str, ...]:
    """Return the variants of an encoder for a choice; the default precision is that of its weights or its graph."""
    if choice.precision == BEST:
        if choice.backend is not None:
            raise PlanError('precision "best" searches all backends', hint="leave out backend, or name a precision")
        return ()
    precision = Precision.FP32
    if model.graph is not None:
        model = fetch_weights(model, plan)  # the precision is read from the file
        precision = stored_precision(model.path / str(model.graph))
    if precision in (Precision.INT8, Precision.INT4):
        if choice.precision not in (None, precision):
            raise PlanError(f"{model.graph} is already in {precision}, and cannot be converted to {choice.precision}")
        return (f"graph-{precision}",)
    return candidates_for_precision(choice.precision or Precision.FP32, choice.backend, choice.device, this_machine())


def _unsupported_reason(variant: Variant, machine: Machine) -> str | None:
    support = BACKENDS.get(variant.backend).probe(machine, variant)
    package = missing_requirement(variant)
    return support.reason if not support.ok else f"making it needs '{package}'" if package is not None else None
