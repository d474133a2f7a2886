"""Choose the variants of a generative model that a build tries."""

from __future__ import annotations

from hasten.backends import BACKENDS
from hasten.builder.resolved_plan import CandidatePlan, ResolvedData, ResolvedModel
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.plan import Plan
from hasten.core.system.hardware import Machine
from hasten.core.variant import BEST, CPU, CUDA, Precision, Variant, VariantChoice
from hasten.measure.generation_gate import check_gate

BACKEND = "onnxruntime"
_BLOCKWISE = (Precision.INT8, Precision.INT4)
# On a GPU, ONNX Runtime's GroupQueryAttention computes in fp16 only.
_PRECISIONS = {CPU: (Precision.FP32, *_BLOCKWISE), CUDA: (Precision.FP16, *_BLOCKWISE)}
_CUDA_FP16 = Variant(BACKEND, Precision.FP16, CUDA)
_NO_CUDA_FP32 = "ONNX Runtime's GroupQueryAttention, which runs the attention of decoders, has no fp32 kernel for GPUs"


def generation_candidates(plan: Plan, model: ResolvedModel, data: ResolvedData, machine: Machine) -> CandidatePlan:
    """Return the variants to try; reject options that do not apply to text generation."""
    for flag, value in (("--recipe", data.recipe), ("--calibration", data.calibration)):
        if value is not None:
            raise PlanError(f"{flag} does not apply to {model.task}", hint="leave it out")
    if model.qdq_precision is not None:
        raise UnsupportedError(
            f"{model.id} has quantizers, which are not supported for {model.task}",
            hint="qdq.disable(model) builds it as a float model",
        )
    check_gate(plan.gate, model.task)
    if model.files.graph is not None:
        raise UnsupportedError(
            f"{model.id} comes as an ONNX graph, and generative models are built from their weights",
            hint="give the model the graph was made from",
        )
    device = _device(plan, machine)
    variants = _explicit(plan, machine) if plan.variants else _automatic(plan, device)
    # A single automatic candidate that fails leaves nothing to build, so its own error is raised.
    return CandidatePlan(device, variants, is_explicit=bool(plan.variants) or len(variants) == 1)


def generation_candidates_for_choice(choice: VariantChoice) -> tuple[str, ...]:
    """Return the variant of a generative model for a choice; none stands for the search."""
    if choice.precision == BEST:
        return ()
    device = choice.device or CPU
    precision = choice.precision or _PRECISIONS[device][0]
    return (f"{choice.backend or BACKEND}-{precision}{'' if device == CPU else f'@{device}'}",)


def _explicit(plan: Plan, machine: Machine) -> tuple[Variant, ...]:
    supported = [Variant(BACKEND, precision, device) for device in _PRECISIONS for precision in _PRECISIONS[device]]
    variants = list(dict.fromkeys(map(Variant.parse, plan.variants)))
    for variant in variants:
        if variant == Variant(BACKEND, Precision.FP32, CUDA):
            reason = f"{variant} does not support text generation: {_NO_CUDA_FP32}"
            raise UnsupportedError(reason, hint=f"--variants {_CUDA_FP16}")
        if variant not in supported:
            hint = f"--variants with any of: {', '.join(map(str, supported))}"
            raise UnsupportedError(f"{variant} does not support text generation", hint=hint)
        support = BACKENDS.get(BACKEND).probe(machine, variant)
        if not support.ok:
            raise UnsupportedError(f"{variant} does not run here: {support.reason}", hint=support.hint or None)
    return tuple(variants)


def _automatic(plan: Plan, device: str) -> tuple[Variant, ...]:
    if plan.precision == Precision.FP32 and device == CUDA:
        raise UnsupportedError(_NO_CUDA_FP32, hint="--precision fp16, or --device cpu")
    precisions = [precision for precision in _PRECISIONS[device] if plan.precision in (None, precision)]
    if not precisions:
        raise UnsupportedError(
            f"text generation in {plan.precision} is not supported on the {device}",
            hint=f"--precision with one of: {', '.join(_PRECISIONS[device])}",
        )
    return tuple(Variant(BACKEND, precision, device) for precision in precisions)


def _device(plan: Plan, machine: Machine) -> str:
    """Return the plan's device or, as for encoders, a usable GPU, unless only CPUs compute in the plan's precision."""
    if plan.variants:
        return CUDA if CUDA in [Variant.parse(name).device for name in plan.variants] else CPU
    support = BACKENDS.get(BACKEND).probe(machine, _CUDA_FP16)
    if plan.device == CUDA and not support.ok:
        raise UnsupportedError(
            f"--device cuda needs a GPU that ONNX Runtime can use: {support.reason}",
            hint=support.hint or "--device cpu",
        )
    is_for_gpus = plan.precision in (None, *_PRECISIONS[CUDA])
    return CUDA if plan.device == CUDA or (plan.device is None and is_for_gpus and support.ok) else CPU
