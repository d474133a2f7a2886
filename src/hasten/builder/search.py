"""The search for precision: variants from cheap to dear, each made and judged, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from hasten.backends import BACKENDS, Artifact
from hasten.core.errors import HastenError
from hasten.core.hardware import Machine
from hasten.core.progress import Progress, step
from hasten.core.report import Candidate, Status, Verdict
from hasten.core.variant import CUDA, Support, Variant
from hasten.quantize.recipe import Method
from hasten.quantize.ways import ENGINE_OF_QUANTIZERS, is_quantized, method_of, with_kept

# What is tried beyond what a backend offers by itself: first what pays, the cheapest to make before the dearest …
LADDER = {
    "onnxruntime": (
        "onnxruntime-int8+attention",
        "onnxruntime-int8+attention+smooth+split",
        "onnxruntime-int8+attention+smooth+split+gelu",
    ),
    "openvino": ("openvino-int8",),
    "fused": ("fused-fp8@cuda", "fused-fp8+gelu@cuda", "fused-fp8+gelu+fast@cuda", "fused-int8@cuda"),
    "tensorrt": (ENGINE_OF_QUANTIZERS.name,),
}
# … then what seldom does.
_LAST = {
    "onnxruntime": (
        "onnxruntime-int8+blocks",
        "onnxruntime-int4+blocks",
        "onnxruntime-int8+minmax",
        "onnxruntime-int8+percentile",
        "onnxruntime-int8+entropy",
    )
}
# Those that are mended, product by product, where they fail.
_MENDED = tuple(
    map(
        Variant.parse,
        ("onnxruntime-int8+attention+smooth+split", "fused-fp8+gelu@cuda", "fused-fp8@cuda", "fused-int8@cuda"),
    )
)
# Packages that a method takes, beside those that running what it makes takes; each is an extra of its own name.
_NEEDS = {Method.NNCF: "nncf"}


def ladder(offered: Sequence[Variant], machine: Machine) -> tuple[list[Variant], list[Candidate]]:
    """What is tried after what backends offer by themselves, and what cannot be made for want of a package or a GPU."""
    places = dict.fromkeys((variant.backend, variant.device) for variant in offered)
    backends = dict.fromkeys(backend for backend, _ in places)
    names = [name for steps in (LADDER, _LAST) for backend in backends for name in steps.get(backend, ())]
    wanted: list[Variant] = []
    refused: list[Candidate] = []
    for variant in map(Variant.parse, names):
        if (variant.backend, variant.device) not in places:
            continue
        package = lacking(variant)
        support = BACKENDS.get(variant.backend).probe(machine, variant) if variant.device == CUDA else Support.yes()
        if package is not None:
            reason = f"making it needs the package '{package}': pip install 'hasten[{package}]'"
            refused.append(Candidate(variant.name, Status.UNAVAILABLE, reason))
        elif not support.ok:
            refused.append(Candidate(variant.name, Status.UNAVAILABLE, support.reason))
        else:
            wanted.append(variant)
    return wanted, refused


def lacking(variant: Variant) -> str | None:
    """The package that making a variant takes, where it is not installed."""
    package = _NEEDS.get(method_of(variant)) if is_quantized(variant) else None
    return package if package is not None and find_spec(package) is None else None


@dataclass(frozen=True, slots=True)
class Trial:
    """A variant that was made, and how it did."""

    artifact: Artifact
    verdict: Verdict


@dataclass
class Search:
    """One that fails is recorded if we picked it, an error if the user did."""

    attempt: Callable[[Variant], Trial]
    # The products of a variant, the one that costs most accuracy first, as many as are found by that time.
    most_sensitive: Callable[[Variant, float], Sequence[str]]
    # Removes the files of one that will not be chosen: a search makes many.
    discard: Callable[[Artifact], None]
    budget_s: float
    progress: Progress
    trials: dict[Variant, Trial] = field(default_factory=dict)
    # Those that were not tried, could not be made, or need not be timed.
    others: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.budget_s

    def try_asked(self, variants: Sequence[Variant]) -> None:
        with step(self.progress, "variants", total=len(variants)):
            for variant in variants:
                self._try(variant, is_asked=True)

    def try_offered(self, variants: Sequence[Variant], further: Sequence[Variant]) -> None:
        """Those that backends offer in any case, the others while there is time."""
        with step(self.progress, "search", total=len(variants) + len(further)):
            for variant in variants:
                self._try(variant)
            for variant in further:
                if not self._is_skipped(variant):
                    self._try(variant)
        for variant in _MENDED:
            if variant in self.trials and not self.trials[variant].verdict.passed:
                self._mend(variant)

    def _mend(self, variant: Variant) -> None:
        """Leave the most sensitive products in float: as few as will do, found by doubling, then by halving."""
        # With all of them it would be fp32.
        most = 0 if self._is_over() else len(self.most_sensitive(variant, self._until)) - 1
        if self._is_skipped(with_kept(variant, 1)):
            return
        failing, count = 0, 1
        while failing < most and not self._is_skipped(with_kept(variant, count)):
            if self._try(with_kept(variant, count)):
                break
            failing, count = count, min(2 * count, most)
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

    def _try(self, variant: Variant, *, is_asked: bool = False) -> bool:
        try:
            trial = self.attempt(variant)
        except HastenError as error:
            if is_asked:
                raise
            self.others.append(Candidate(variant.name, Status.FAILED, str(error)))
            self.progress.advance(note=f"{variant} failed")
            return False
        self.trials[variant] = trial
        self.progress.advance(note=f"{variant}: {trial.verdict.reason}")
        return trial.verdict.passed

    def _supersede(self, variant: Variant, other: Variant) -> None:
        """One that passed need not be timed where another does that computes less in float."""
        trial = self.trials.pop(variant)
        self.discard(trial.artifact)
        reason = f"not timed: {other} answers like the original too, with less in float"
        self.others.append(Candidate(variant.name, Status.ELIGIBLE, reason, trial.verdict))

    def _is_skipped(self, variant: Variant) -> bool:
        """Whether the time is over before a variant's turn: then it is said of that one."""
        if self._is_over():
            reason = f"not tried: the {self.budget_s:.0f} s of --budget were over"
            self.others.append(Candidate(variant.name, Status.SKIPPED, reason))
            return True
        return False

    def _is_over(self) -> bool:
        return time.monotonic() > self._until
