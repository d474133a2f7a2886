"""Which variants compete, and which one wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hasten.backends import BACKENDS, Backend, Dialect
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.hardware import Machine
from hasten.core.plan import Plan
from hasten.core.report import Bench, Candidate, Status, Verdict
from hasten.core.tensors import Shape
from hasten.core.variant import CPU, CUDA, Precision, Variant
from hasten.quantize.recipe import Recipe
from hasten.quantize.ways import check_recipe, check_ways

# What runs the original: the PyTorch module or, where the model came as one, the graph as it is.
MODULE = "torch"
GRAPH = "graph"


def device_of(plan: Plan, machine: Machine, baseline: str) -> str:
    """Whose variants contend: the plan's, or a GPU where a bundle may hold something that runs on it."""
    if plan.recipe is not None or plan.variants:
        devices = [Variant.parse(name).device for name in plan.variants] or [CPU]
        if plan.device not in (None, *devices):
            raise PlanError(f"--device {plan.device} contradicts --variants {' '.join(plan.variants)}")
        return CUDA if CUDA in devices else CPU
    if plan.device == CPU or (plan.device is None and not machine.gpus):
        return CPU
    stored = [backend for backend in _fitting(baseline) if backend.is_stored]
    if any(variant.device == CUDA for backend in stored for variant in _offered(backend, machine)):
        return CUDA
    if plan.device is None:
        return CPU
    if not machine.gpus:
        raise UnsupportedError("--device cuda needs an NVIDIA GPU, and there is none here", hint="--device cpu")
    reasons = {one.name: one.probe(machine, Variant(one.name, Precision.FP16, CUDA)) for one in stored}
    told = "; ".join(f"{name}: {support.reason}" for name, support in reasons.items() if not support.ok)
    hint = next((support.hint for support in reasons.values() if support.hint), "--device cpu")
    raise UnsupportedError(f"nothing that a bundle may hold runs on the GPU here ({told})", hint=hint)


def compared_with(original: Variant, device: str, machine: Machine) -> Variant:
    """The original on the device that variants are for, where it runs there."""
    moved = replace(original, device=device)
    return moved if BACKENDS.get(original.backend).probe(machine, moved).ok else original


def contenders(
    plan: Plan, machine: Machine, baseline: str, device: str, recipe: Recipe | None = None
) -> tuple[list[Variant], list[Candidate]]:
    """The variants to try, PyTorch as the baseline left out, and those that cannot run here with the reason.

    An explicit choice that cannot run is an error; an automatic one is recorded and passed over.
    """
    if recipe is not None:
        check_recipe(recipe)
        if plan.target not in (None, recipe.target):
            raise PlanError(f"--target {plan.target} contradicts the recipe, which is for {recipe.target}")
    asked = [Variant.parse(name) for name in ((recipe.variant,) if recipe is not None else plan.variants)]
    if asked:
        for variant in asked:
            check_ways(variant)
            support = BACKENDS.get(variant.backend).probe(machine, variant)
            if not support.ok:
                hint = support.hint or "'hasten doctor' lists what does"
                raise UnsupportedError(f"{variant} does not run here: {support.reason}", hint=hint)
            if not _is_made_from(variant.backend, baseline):
                raise UnsupportedError(f"{variant} runs a PyTorch module, and {plan.model} comes as an ONNX graph")
        if not any(BACKENDS.get(variant.backend).is_stored for variant in asked):
            raise PlanError(
                f"{' and '.join(map(str, asked))} would be for comparison only: a bundle holds no PyTorch",
                hint="add one it may hold, such as onnxruntime-fp32",
            )
        return [variant for variant in dict.fromkeys(asked) if not _is_original(variant)], []
    wanted: list[Variant] = []
    unavailable: list[Candidate] = []
    for backend in _fitting(baseline):
        support = backend.probe(machine)
        offered = _offered(backend, machine)
        here = [variant for variant in offered if variant.device == device]
        wanted += [variant for variant in here if not _is_original(variant)]
        if not support.ok:
            reason = support.reason + (f": {support.hint}" if support.hint else "")
            unavailable.append(Candidate(backend.name, Status.UNAVAILABLE, reason))
        elif offered and not here:
            others = " and ".join(dict.fromkeys(variant.device for variant in offered))
            reason = f"it runs on {others}, not on {device}: --device {others}"
            unavailable.append(Candidate(backend.name, Status.UNAVAILABLE, reason))
    return wanted, unavailable


def _is_original(variant: Variant) -> bool:
    """On whichever device, PyTorch in fp32 is what others are compared with."""
    return variant.backend == MODULE and variant.precision is Precision.FP32


def _fitting(baseline: str) -> Iterator[Backend]:
    """The backends that can be made from a model of this kind."""
    return (backend for backend in BACKENDS.all() if _is_made_from(backend.name, baseline))


def _offered(backend: Backend, machine: Machine) -> Sequence[Variant]:
    return backend.variants(machine) if backend.probe(machine).ok else ()


def check_not_again(variant: Variant, came_in: Precision, recipe: Recipe | None) -> None:
    """A graph that came quantized runs as it is, or not at all."""
    if came_in is not Precision.FP32 and (variant.ways or recipe is not None):
        raise PlanError(f"{variant} cannot be made: the graph that was given is in {came_in} already")


def _is_made_from(backend: str, baseline: str) -> bool:
    """Whether a backend can be made from a model of this kind: without a module, none that runs one."""
    return baseline == MODULE or BACKENDS.get(backend).dialect is not Dialect.MODULE


def rank(bench: Bench, shape: Shape, eligible: Sequence[Variant]) -> list[Variant]:
    """Eligible variants that a bundle may hold, fastest first at this shape."""
    times = _times(bench, shape)
    stored = (variant for variant in eligible if BACKENDS.get(variant.backend).is_stored)
    return sorted(stored, key=lambda variant: times[variant.name])


def _times(bench: Bench, shape: Shape) -> dict[str, tuple[float, bool]]:
    """Of each, and whether it was timed apart from the finalists.

    Whoever lost in another heat, at another time, is not taken for faster than a finalist.
    """
    timings = bench.at(shape)
    finalists = {timing.variant for timing in bench.timings if timing.shape != shape} - {bench.baseline}
    slowest = max((timings[name].p50_ms for name in finalists), default=0.0)
    return {
        name: (timing.p50_ms, False) if name in (*finalists, bench.baseline) else (max(timing.p50_ms, slowest), True)
        for name, timing in timings.items()
    }


def explain(
    ranking: Sequence[Variant], bench: Bench, shape: Shape, verdicts: Mapping[Variant, Verdict]
) -> list[Candidate]:
    """One line for each variant that passed the gate: why it was chosen, or why not."""
    timings = bench.at(shape)
    winner = ranking[0]
    lines = []
    for variant, verdict in verdicts.items():
        timing = timings[variant.name]
        if variant == winner:
            reason = (
                f"fastest eligible at {shape}: {timing.p50_ms:.2f} ms, {timing.speedup.value:.2f}× {bench.baseline}"
            )
            lines.append(Candidate(variant.name, Status.CHOSEN, reason, verdict))
        elif variant not in ranking:
            lines.append(Candidate(variant.name, Status.ELIGIBLE, "for comparison only: needs PyTorch", verdict))
        else:
            slower = timing.p50_ms / timings[winner.name].p50_ms
            reason = f"{slower:.2f}× as long as {winner} at {shape}"
            lines.append(Candidate(variant.name, Status.ELIGIBLE, reason, verdict))
    return lines


def front(candidates: Sequence[Candidate], bench: Bench, shape: Shape) -> tuple[str, ...]:
    """The variants than which none is both faster and nearer to the original, the fastest first."""
    times = _times(bench, shape)
    judged = [(times[c.variant], c.verdict.loss, c.variant) for c in candidates if c.verdict and c.variant in times]
    best: list[str] = []
    least = float("inf")
    for _, loss, variant in sorted(judged):
        if loss < least:
            best.append(variant)
            least = loss
    return tuple(best)
