"""Search for lower precision: make and judge variants from cheap to expensive until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from hasten.backends import BACKENDS, Artifact
from hasten.core.errors import HastenError
from hasten.core.progress import Progress, step
from hasten.core.report import Candidate, Status, Verdict
from hasten.core.system.hardware import Machine
from hasten.core.variant import CUDA, Support, Variant
from hasten.quantize.modifiers import is_quantized, method_of, with_kept
from hasten.quantize.recipe import Method

# Variants tried beyond those that a backend offers itself: first those that usually pay, cheapest to make first …
SEARCH_ORDER = {
    "onnxruntime": (
        "onnxruntime-int8+attention",
        "onnxruntime-int8+attention+smooth+split",
        "onnxruntime-int8+attention+smooth+split+tanhgelu",
    ),
    "openvino": ("openvino-int8",),
    "fused": ("fused-fp8@cuda", "fused-fp8+tanhgelu@cuda", "fused-fp8+tanhgelu+fastaccum@cuda", "fused-int8@cuda"),
}
# … then those that rarely do. int8+entropy and int4+blocks of encoders can be named but are not tried: all four studies
# of docs/reference/precision.md rejected them.
_LOW_YIELD = {"onnxruntime": ("onnxruntime-int8+blocks", "onnxruntime-int8+minmax", "onnxruntime-int8+percentile")}
# Backends whose variants are tried only if they are named: no engine of theirs was ever run on a GPU.
EXPERIMENTAL_BACKENDS = ("tensorrt", "tensorrt-rtx")
# Variants that are refined if they fail the gate: their most sensitive matmuls stay in float.
_REFINED = ("onnxruntime-int8+attention+smooth+split", "fused-fp8+tanhgelu@cuda", "fused-fp8@cuda", "fused-int8@cuda")
# Packages that a quantization method needs in addition to its backend's; each is an extra of the same name.
_REQUIRED_PACKAGES = {Method.NNCF: "nncf"}


def search_order(offered: Sequence[Variant], machine: Machine) -> tuple[list[Variant], list[Candidate]]:
    """Return the variants to try after those that backends offer, and those that lack a package or a GPU."""
    pairs = dict.fromkeys((variant.backend, variant.device) for variant in offered)
    backends = dict.fromkeys(backend for backend, _ in pairs)
    names = [name for order in (SEARCH_ORDER, _LOW_YIELD) for backend in backends for name in order.get(backend, ())]
    variants: list[Variant] = []
    unavailable: list[Candidate] = []
    for variant in map(Variant.parse, names):
        if (variant.backend, variant.device) not in pairs:
            continue
        package = missing_requirement(variant)
        support = BACKENDS.get(variant.backend).probe(machine, variant) if variant.device == CUDA else Support.yes()
        if package is None and support.ok:
            variants.append(variant)
            continue
        needed = f"making it needs the package '{package}': pip install 'hasten[{package}]'"
        reason = support.reason if package is None else needed
        unavailable.append(Candidate(variant.name, Status.UNAVAILABLE, reason))
    return variants, unavailable


def missing_requirement(variant: Variant) -> str | None:
    """Return the package that is needed to make a variant if it is not installed."""
    package = _REQUIRED_PACKAGES.get(method_of(variant)) if is_quantized(variant) else None
    return package if package is not None and find_spec(package) is None else None


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """A variant that was made, and the verdict on its accuracy."""

    artifact: Artifact
    verdict: Verdict


@dataclass
class Search:
    """Tries variants. A failure is an error for a variant the user named, and recorded for any other."""

    attempt: Callable[[Variant], SearchTrial]
    # Returns the matmuls of a variant that were ranked by a deadline, the one that costs most accuracy first.
    most_sensitive: Callable[[Variant, float], Sequence[str]]
    # Removes the files of a variant that will not be chosen: a search makes many.
    discard: Callable[[Artifact], None]
    budget_s: float
    progress: Progress
    trials: dict[Variant, SearchTrial] = field(default_factory=dict)
    # Variants that were not tried, could not be made, or need not be timed.
    others: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.budget_s

    def try_explicit(self, variants: Sequence[Variant]) -> None:
        """Try the variants that the user named."""
        with step(self.progress, "variants", total=len(variants)):
            for variant in variants:
                self._try(variant, is_explicit=True)

    def try_automatic(self, variants: Sequence[Variant], further: Sequence[Variant]) -> None:
        """Try the first variants in any case, and the further ones while the budget lasts."""
        with step(self.progress, "search", total=len(variants) + len(further)):
            for variant in variants:
                self._try(variant)
            for variant in further:
                if not self._is_skipped(variant):
                    self._try(variant)
        for variant in map(Variant.parse, _REFINED):
            if variant in self.trials and not self.trials[variant].verdict.passed:
                self._refine(variant)

    def _refine(self, variant: Variant) -> None:
        """Find the smallest number of sensitive matmuls to keep in float: by doubling, then by bisection."""
        # With all of them in float it would be fp32.
        max_count = 0 if self._is_budget_spent() else len(self.most_sensitive(variant, self._deadline)) - 1
        if self._is_skipped(with_kept(variant, 1)):
            return
        failing, count = 0, 1
        while failing < max_count and not self._is_skipped(with_kept(variant, count)):
            if self._try(with_kept(variant, count)):
                break
            failing, count = count, min(2 * count, max_count)
        else:
            return
        while count - failing > 1:
            middle = (failing + count) // 2
            if self._is_skipped(with_kept(variant, middle)):
                return
            if self._try(with_kept(variant, middle)):
                self._supersede(with_kept(variant, count), with_kept(variant, middle))
                count = middle
            else:
                failing = middle

    def _try(self, variant: Variant, *, is_explicit: bool = False) -> bool:
        try:
            self.progress.advance(0, note=f"trying {variant}")
            trial = self.attempt(variant)
        except HastenError as error:
            if is_explicit:
                raise
            self.others.append(Candidate(variant.name, Status.FAILED, str(error)))
            self.progress.advance(note=f"{variant} failed")
            return False
        self.trials[variant] = trial
        self.progress.advance(note=f"{variant}: {trial.verdict.reason}")
        return trial.verdict.passed

    def _supersede(self, variant: Variant, other: Variant) -> None:
        """Drop a variant that passed because another one passed that computes less in float."""
        trial = self.trials.pop(variant)
        self.discard(trial.artifact)
        reason = f"not timed: {other} passes the accuracy gate too, with less in float"
        self.others.append(Candidate(variant.name, Status.ELIGIBLE, reason, trial.verdict))

    def _is_skipped(self, variant: Variant) -> bool:
        """Return whether the budget is spent, and record the variant as skipped if so."""
        is_spent = self._is_budget_spent()
        if is_spent:
            reason = f"not tried: the {self.budget_s:.0f} s of --search-budget were spent"
            self.others.append(Candidate(variant.name, Status.SKIPPED, reason))
        return is_spent

    def _is_budget_spent(self) -> bool:
        return time.monotonic() > self._deadline
