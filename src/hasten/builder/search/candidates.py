"""Choose the variants of an encoder that a build tries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hasten.backends import BACKENDS, Backend, Dialect
from hasten.builder.resolved_plan import GRAPH, MODULE, CandidatePlan, ResolvedData, ResolvedModel
from hasten.builder.search.search import EXPERIMENTAL_BACKENDS, missing_requirement, search_order
from hasten.builder.sources.detect import predict_task
from hasten.core.errors import PlanError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.report import Candidate, Status
from hasten.core.system.hardware import Machine
from hasten.core.variant import CPU, CUDA, Precision, Variant
from hasten.measure.data import check_columns
from hasten.measure.evaluation_rows import check_calibration, check_rows, naming_source, split_calibration
from hasten.quantize.modifiers import (
    FUSED_QDQ,
    ORT_QDQ,
    TENSORRT_QDQ,
    check_modifiers,
    check_recipe,
    is_qdq,
    is_quantized_graph,
    needs_calibration,
    needs_qdq_module,
)
from hasten.quantize.recipe import Method, Recipe
from hasten.tasks import TASKS


def encoder_candidates(plan: Plan, model: ResolvedModel, data: ResolvedData, machine: Machine) -> CandidatePlan:
    """Return the variants to try; reject variants the plan names that cannot be made from this model and data."""
    notes = list(_check_data(plan, model, data))
    device = device_of(plan, machine, model.baseline)
    variants, unavailable = candidate_variants(plan, machine, model.baseline, device, data.recipe)
    for variant in variants:
        _check_quantizers(variant, plan, model)
        if model.baseline == MODULE and (package := missing_requirement(variant)) is not None:
            raise missing_package(package, f"making {variant}", package)
        check_not_quantized_twice(variant, model.precision, data.recipe)
    if lacking := _lacking_rows(variants, model, data):
        raise PlanError(f"{lacking[0]} needs calibration: {_too_few_rows(data)}", hint="--calibration with other rows")
    further: list[Variant] = []
    is_explicit = bool(plan.variants) or data.recipe is not None
    if not is_explicit:
        if model.qdq_precision is not None:
            variants += _qdq_variants(model, model.qdq_precision, device, machine)
        further, skipped = _further(variants, model, data, machine)
        unavailable += skipped
        if plan.precision is not None:
            variants, further = ([v for v in group if v.precision == plan.precision] for group in (variants, further))
        if not variants and not further:
            raise UnsupportedError(
                f"no variant for the {device} of this machine computes in {plan.precision}",
                hint="--dry-run without --precision lists the variants",
            )
    calibrated = _calibrated((*variants, *further), model, data)
    if model.qdq_precision is not None and not any(map(is_qdq, (*variants, *further))):
        is_cpu_int8 = (device, model.qdq_precision) == (CPU, Precision.INT8)
        unused = ORT_QDQ if is_cpu_int8 else FUSED_QDQ[model.qdq_precision]
        notes.append(f"the quantizers of {model.id} are not used: {unused} is not among the variants to try")
    if data.calibration is not None and not calibrated:
        notes.append("--calibration is not used: no variant to try is calibrated")
    return CandidatePlan(
        device, tuple(variants), tuple(further), tuple(unavailable), is_explicit, bool(calibrated), tuple(notes)
    )


def _check_data(plan: Plan, model: ResolvedModel, data: ResolvedData) -> tuple[str, ...]:
    task = TASKS.get(model.task)
    check_columns(plan.columns, task)
    notes: tuple[str, ...] = ()
    if data.evaluation is not None:
        spec = predict_task(model.files, task, plan)
        rows = data.evaluation.rows_for(spec, is_quiet=True) if spec is not None else data.evaluation.rows
        with naming_source(data.evaluation.name, task, rows):
            notes += check_rows(task, spec, rows, plan.gate, plan.gate.needing_labels)
    if data.calibration is not None:
        notes += check_calibration(task, data.evaluation, data.calibration)
    return notes


def device_of(plan: Plan, machine: Machine, baseline: str) -> str:
    """Return the plan's device or, without one, the GPU if a variant that a bundle can store runs on it."""
    if plan.recipe is not None or plan.variants:
        devices = [Variant.parse(name).device for name in plan.variants] or [CPU]
        if plan.device not in (None, *devices):
            raise PlanError(f"--device {plan.device} contradicts --variants {' '.join(plan.variants)}")
        return CUDA if CUDA in devices else CPU
    if plan.device == CPU or (plan.device is None and not machine.gpus):
        return CPU
    stored = [b for b in _compatible_backends(baseline) if b.is_stored and b.name not in EXPERIMENTAL_BACKENDS]
    if any(variant.device == CUDA for backend in stored for variant in _offered(backend, machine)):
        return CUDA
    if plan.device is None:
        return CPU
    if not machine.gpus:
        reason = f"the CUDA driver fails: {machine.gpu_failure}" if machine.gpu_failure else "this machine has none"
        raise UnsupportedError(f"--device cuda needs an NVIDIA GPU, and {reason}", hint="--device cpu")
    probes = {backend.name: backend.probe(machine, Variant(backend.name, Precision.FP16, CUDA)) for backend in stored}
    reasons = "; ".join(f"{name}: {support.reason}" for name, support in probes.items() if not support.ok)
    hint = next((support.hint for support in probes.values() if support.hint), "--device cpu")
    raise UnsupportedError(f"no backend that a bundle can store runs on the GPU here ({reasons})", hint=hint)


def baseline_for(baseline: Variant, device: str, machine: Machine) -> Variant:
    """Return the baseline on the device of the candidates if it runs there, unchanged otherwise."""
    moved = replace(baseline, device=device)
    return moved if BACKENDS.get(baseline.backend).probe(machine, moved).ok else baseline


def candidate_variants(
    plan: Plan, machine: Machine, baseline: str, device: str, recipe: Recipe | None = None
) -> tuple[list[Variant], list[Candidate]]:
    """Return the variants to try, without the PyTorch baseline, and those that cannot run here with the reason.

    An explicit choice that cannot run is an error; an automatic one is recorded and skipped.
    """
    if recipe is not None:
        check_recipe(recipe)
        if plan.target not in (None, recipe.target):
            raise PlanError(f"--target {plan.target} contradicts the recipe, which is for {recipe.target}")
    explicit = [Variant.parse(name) for name in ((recipe.variant,) if recipe is not None else plan.variants)]
    if explicit:
        for variant in explicit:
            check_modifiers(variant)
            support = BACKENDS.get(variant.backend).probe(machine, variant)
            if not support.ok:
                hint = support.hint or "'hasten doctor' lists the variants that run here"
                raise UnsupportedError(f"{variant} does not run here: {support.reason}", hint=hint)
            if not _is_compatible(variant.backend, baseline):
                raise UnsupportedError(f"{variant} runs a PyTorch module, and {plan.model} comes as an ONNX graph")
        if not any(BACKENDS.get(variant.backend).is_stored for variant in explicit):
            raise PlanError(
                f"{' and '.join(map(str, explicit))} would be for comparison only: a bundle cannot store PyTorch",
                hint="add a variant that a bundle can store, such as onnxruntime-fp32",
            )
        return [variant for variant in dict.fromkeys(explicit) if not _is_baseline(variant)], []
    variants: list[Variant] = []
    unavailable: list[Candidate] = []
    for backend in _compatible_backends(baseline):
        support = backend.probe(machine)
        offered = _offered(backend, machine)
        if offered and backend.name in EXPERIMENTAL_BACKENDS:
            reason = f"experimental: tried only if it is named: --variants {' '.join(map(str, offered))}"
            unavailable.append(Candidate(backend.name, Status.SKIPPED, reason))
            continue
        on_device = [variant for variant in offered if variant.device == device]
        variants += [variant for variant in on_device if not _is_baseline(variant)]
        if not support.ok:
            reason = support.reason + (f": {support.hint}" if support.hint else "")
            unavailable.append(Candidate(backend.name, Status.UNAVAILABLE, reason))
        elif offered and not on_device:
            devices = " and ".join(dict.fromkeys(variant.device for variant in offered))
            reason = f"it runs on {devices}, not on {device}: --device {devices}"
            unavailable.append(Candidate(backend.name, Status.UNAVAILABLE, reason))
    return variants, unavailable


def check_not_quantized_twice(variant: Variant, stored_precision: Precision, recipe: Recipe | None) -> None:
    """Reject a variant that would quantize a graph which comes quantized: such a graph only runs unchanged."""
    if stored_precision is not Precision.FP32 and (variant.modifiers or recipe is not None):
        raise PlanError(f"{variant} cannot be made: the model's graph is already in {stored_precision}")


def _check_quantizers(variant: Variant, plan: Plan, model: ResolvedModel) -> None:
    if needs_qdq_module(variant) and model.qdq_precision is None:
        raise PlanError(
            f"{variant} is made by quantizers in the module, and {model.id} has none that is enabled",
            hint="hasten.build(model, tokenizer=…) with a model that was made inside qdq.patched(); "
            "qdq.enable(model) where all are disabled",
        )
    if needs_qdq_module(variant) and variant.precision is not model.qdq_precision:
        raise PlanError(f"{variant} cannot be made: the quantizers of {model.id} round to {model.qdq_precision}")
    if model.baseline == GRAPH and variant in TENSORRT_QDQ.values():
        raise UnsupportedError(
            f"{variant} is made by quantizers in a PyTorch module, and {model.id} comes as an ONNX graph",
            hint=("leave --file-name out, or " if plan.file_name else "") + "give the model the graph was made from",
        )
    if model.baseline == MODULE and is_quantized_graph(variant):
        raise UnsupportedError(
            f"{variant} is made from an ONNX graph that comes quantized, and {model.id} comes as weights",
            hint=f"--variants {TENSORRT_QDQ[variant.backend]} quantizes the weights",
        )


def _is_baseline(variant: Variant) -> bool:
    """Return whether this is PyTorch in fp32, with which others are compared on every device."""
    return variant.backend == MODULE and variant.precision is Precision.FP32


def _compatible_backends(baseline: str) -> Iterator[Backend]:
    return (backend for backend in BACKENDS.all() if _is_compatible(backend.name, baseline))


def _is_compatible(backend: str, baseline: str) -> bool:
    """Return whether a backend can run a model of this kind: those that run a module cannot run a graph."""
    return baseline == MODULE or BACKENDS.get(backend).dialect is not Dialect.MODULE


def _offered(backend: Backend, machine: Machine) -> Sequence[Variant]:
    return backend.variants(machine) if backend.probe(machine).ok else ()


def _qdq_variants(model: ResolvedModel, precision: Precision, device: str, machine: Machine) -> list[Variant]:
    """Return the variants made by the quantizers that the module brings."""
    if device == CUDA:
        fused = FUSED_QDQ[precision]
        return [fused] if BACKENDS.get(fused.backend).probe(machine, fused).ok else []
    if precision is not ORT_QDQ.precision:
        raise UnsupportedError(
            f"the quantizers of {model.id} round to {precision}, in which no backend computes on the {device}",
            hint="qdq.patched('int8'); or a GPU of Ada, Hopper or newer; or qdq.export for the graph alone",
        )
    return [ORT_QDQ]


def _further(
    variants: Sequence[Variant], model: ResolvedModel, data: ResolvedData, machine: Machine
) -> tuple[list[Variant], list[Candidate]]:
    """Return the variants tried beyond those that backends offer, and those that are skipped with the reason."""
    further, unavailable = search_order(variants, machine)
    skipped, reason = _lacking_rows(further, model, data), _too_few_rows(data)
    if model.precision is not Precision.FP32:
        skipped, reason = further, f"the model's graph is already in {model.precision}"
    unavailable += [Candidate(variant.name, Status.SKIPPED, f"not tried: {reason}") for variant in skipped]
    return [variant for variant in further if variant not in skipped], unavailable


def _calibrated(variants: Sequence[Variant], model: ResolvedModel, data: ResolvedData) -> list[Variant]:
    """Return the variants that are calibrated on rows.

    Recipes contain the result of calibration, except those of NNCF, and so do the quantizers of a module.
    """
    if model.precision is not Precision.FP32 or (data.recipe is not None and data.recipe.method is not Method.NNCF):
        return []
    has_quantizers = model.qdq_precision is not None
    return [v for v in variants if needs_calibration(v) and not (has_quantizers and is_qdq(v))]


def _lacking_rows(variants: Sequence[Variant], model: ResolvedModel, data: ResolvedData) -> list[Variant]:
    """Return the variants that need calibration rows where the data are too few to set some aside."""
    if data.evaluation is None or data.calibration is not None or split_calibration(len(data.evaluation.rows)):
        return []
    return _calibrated(variants, model, data)


def _too_few_rows(data: ResolvedData) -> str:
    count = len(data.evaluation.rows) if data.evaluation is not None else 0
    return f"{count} {'row is' if count == 1 else 'rows are'} too few to set some aside for calibration"
