"""Search for the fastest accurate variants: screen candidates on a few rows, and judge the fastest on all of them.

make, time briefly, screen ─▶ skip what cannot be faster ─▶ keep sensitive matmuls in float ─▶ judge, fastest first
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import zip_longest
from typing import Protocol

from hasten.backends import BACKENDS, Artifact
from hasten.core.errors import HastenError
from hasten.core.progress import Progress, step
from hasten.core.report import Candidate, Status, Verdict
from hasten.core.system.hardware import Machine
from hasten.core.variant import Precision, Variant
from hasten.quantize.modifiers import Modifier, is_quantized, kept_matmuls, method_of, with_kept, without_kept
from hasten.quantize.recipe import Method

# Variants tried beyond those that a backend offers itself, cheapest to make first. Static int8 and block-wise
# quantization of encoders can be named but are not tried: none was the fastest in any study of
# docs/reference/precision.md.
SEARCH_ORDER = {
    "onnxruntime": (
        "onnxruntime-int8+attention",
        "onnxruntime-int8+attention+smooth+split",
        "onnxruntime-int8+attention+smooth+split+tanhgelu",
    ),
    "openvino": ("openvino-int8+dynamic", "openvino-int8"),
    "fused": ("fused-fp8@cuda", "fused-fp8+tanhgelu@cuda", "fused-fp8+tanhgelu+fastaccum@cuda", "fused-int8@cuda"),
}
# Backends whose variants are tried only if they are named: no engine of theirs was ever run on a GPU.
EXPERIMENTAL_BACKENDS = ("tensorrt", "tensorrt-rtx")
# Variants that are refined if they fail the gate: their most sensitive matmuls stay in float.
_REFINED = ("onnxruntime-int8+attention+smooth+split", "fused-fp8+tanhgelu@cuda", "fused-fp8@cuda", "fused-int8@cuda")
# Packages that a quantization method needs in addition to its backend's; each is an extra of the same name.
_REQUIRED_PACKAGES = {Method.NNCF: "nncf", Method.WEIGHTS: "nncf"}


def search_order(offered: Sequence[Variant], machine: Machine) -> tuple[list[Variant], list[Candidate]]:
    """Return the variants to try after those that backends offer, and those that lack a package or a GPU."""
    pairs = dict.fromkeys((variant.backend, variant.device) for variant in offered)
    backends = dict.fromkeys(backend for backend, _ in pairs)
    # The first of each backend before the second of any: a fast one makes many of the others unnecessary.
    rounds = zip_longest(*(SEARCH_ORDER.get(backend, ()) for backend in backends))
    names = [name for each in rounds for name in each if name is not None]
    variants: list[Variant] = []
    unavailable: list[Candidate] = []
    for variant in map(Variant.parse, names):
        if (variant.backend, variant.device) not in pairs:
            continue
        package = missing_requirement(variant)
        support = BACKENDS.get(variant.backend).probe(machine, variant)
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


# Times of a few runs in one process differ by this much without a reason.
_TIMING_MARGIN = 1.1
# What takes long to find, a set of matmuls to keep in float, must promise more: at most this time.
_MIN_GAIN = 0.95
# Modifiers that only add work to a variant of ONNX Runtime, and the time that a cheaper GELU leaves at best.
_ADDING_WORK = (Modifier.SMOOTH, Modifier.SPLIT)
_GELU_GAIN = 0.85
# Modifiers that gain speed by less accuracy.
_LOSING_ACCURACY = (Modifier.ATTENTION, Modifier.TANH_GELU)


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """A variant that was made, and the verdict on its accuracy."""

    artifact: Artifact
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ScreenedVariant:
    """A variant that was made, its time relative to the first one's, and the verdict if a few rows reject it."""

    artifact: Artifact
    relative_time: float
    rejection: Verdict | None = None
    # The time that judging it on all rows would take, by the time that a few took.
    judge_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FloatCounts:
    """Numbers of matmuls that stay in float: the largest possible, and the one at which the variant probably passes."""

    max: int
    predicted: int = 1


class CandidateBuilder(Protocol):
    """Makes and judges the variants of one model."""

    def make(self, variant: Variant) -> Artifact:
        """Make the files of a variant."""

    def screen(self, variant: Variant) -> ScreenedVariant:
        """Make a variant, time it briefly, and reject it if a few rows show that it is inaccurate."""

    def judge(self, artifact: Artifact) -> Verdict:
        """Return the verdict of the accuracy gate on a variant that was made."""

    def discard(self, artifact: Artifact) -> None:
        """Remove the files of a variant that will not be chosen: a search makes many."""

    def float_counts(self, variant: Variant, deadline: float, measured: Mapping[int, float]) -> FloatCounts:
        """Return how many matmuls of a variant can stay in float; measure none after the deadline.

        `measured` is the agreement on all rows, by the number of matmuls in float, where it is known.
        """


@dataclass
class Search:
    """Tries variants. A failure is an error for a variant the user named, and recorded for any other."""

    builder: CandidateBuilder
    budget_s: float
    progress: Progress
    # How many variants a bundle stores; None stores all that pass.
    stored: int | None = 2
    trials: dict[Variant, SearchTrial] = field(default_factory=dict)
    # Variants that were not tried, were rejected on a few rows, could not be made, or need not be judged.
    others: list[Candidate] = field(default_factory=list)
    # Variants that were screened and are not judged yet.
    _screened: dict[Variant, ScreenedVariant] = field(default_factory=dict)
    _times: dict[Variant, float] = field(default_factory=dict)
    # Variants that could not be faster than those before them, with the reason.
    _postponed: dict[Variant, str] = field(default_factory=dict)
    _rejected: set[Variant] = field(default_factory=set)
    _refined: set[Variant] = field(default_factory=set)
    # The time that the slowest variant took to make and screen: the next may take as long.
    _longest_s: float = 0.0

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.budget_s

    def try_explicit(self, variants: Sequence[Variant]) -> None:
        """Judge the variants that the user named."""
        with step(self.progress, "variants", total=len(variants)):
            for variant in variants:
                self.progress.advance(0, note=f"trying {variant}")
                artifact = self.builder.make(variant)
                self.trials[variant] = SearchTrial(artifact, self.builder.judge(artifact))
                self.progress.advance(note=f"{variant}: {self.trials[variant].verdict.reason}")

    def try_automatic(self, variants: Sequence[Variant], further: Sequence[Variant]) -> None:
        """Try the first variants in any case and the further ones while the budget lasts; judge the fastest."""
        with step(self.progress, "search", total=len(variants) + len(further)):
            for variant in variants:
                self._screen(variant)
            for variant in further:
                self._consider(variant)
            self._refine_rejected()
            self._judge_fastest()
        for variant, reason in self._postponed.items():
            self.others.append(Candidate(variant.name, Status.SKIPPED, reason))

    def _consider(self, variant: Variant) -> bool:
        """Try a variant unless it cannot be the fastest or the budget is spent, and return whether it may pass."""
        if (reason := self._reason_to_postpone(variant)) is not None:
            self._postponed[variant] = reason
            return False
        self._postponed.pop(variant, None)
        if self._is_budget_spent():
            reason = f"not tried: it would not fit into what is left of the {self.budget_s:.0f} s of --search-budget"
            self.others.append(Candidate(variant.name, Status.SKIPPED, reason))
            return False
        return self._screen(variant)

    def _screen(self, variant: Variant) -> bool:
        """Make a variant, test it on a few rows, and return whether it may pass."""
        begin = time.monotonic()
        try:
            self.progress.advance(0, note=f"trying {variant}")
            screened = self.builder.screen(variant)
        except HastenError as error:
            self.others.append(Candidate(variant.name, Status.FAILED, str(error)))
            self.progress.advance(note=f"{variant} failed")
            return False
        self._longest_s = max(self._longest_s, time.monotonic() - begin)
        self._times[variant] = screened.relative_time
        if screened.rejection is not None:
            self._rejected.add(variant)
            self.others.append(
                Candidate(variant.name, Status.INACCURATE, screened.rejection.reason, screened.rejection)
            )
            self.progress.advance(note=f"{variant}: {screened.rejection.reason}")
            return False
        self._screened[variant] = screened
        self.progress.advance(note=f"{variant} may pass")
        return True

    def _reason_to_postpone(self, variant: Variant) -> str | None:
        """Return why a variant cannot become the fastest, or is less accurate than one that was rejected."""
        if self.stored is None:
            return None
        base = without_kept(variant)
        exact = _without(base, Modifier.TANH_GELU)
        if variant.backend == "onnxruntime" and base == variant:
            for milder in (_without(variant, word) for word in _LOSING_ACCURACY if word in variant.modifiers):
                if milder in self._rejected:
                    return f"not tried: {milder} is inaccurate already"
        lighter = [each for each in (_without(exact, *_ADDING_WORK), base) if each != variant and each in self._times]
        if not lighter or (fastest := self._fastest_besides(base)) is None:
            return None
        slowest = max(lighter, key=self._times.__getitem__)
        ratio = self._times[slowest] / self._times[fastest]
        limit = _TIMING_MARGIN if base == variant else _MIN_GAIN
        if ratio <= (limit / _GELU_GAIN if exact != base and slowest != base else limit):
            return None
        return f"not tried: {slowest} takes {ratio:.2f}× as long as {fastest}, and this variant computes more"

    def _fastest_besides(self, base: Variant) -> Variant | None:
        """Return the fastest variant that may pass, other than this one with some of its matmuls in float."""
        others = [variant for variant in (*self._screened, *self._passed) if without_kept(variant) != base]
        return min(others, key=self._times.__getitem__, default=None)

    # Matmuls in float

    def _refine_rejected(self) -> None:
        """Refine the variants that were rejected, if any of their matmuls may stay in float."""
        for variant in map(Variant.parse, _REFINED):
            if variant in self._rejected - self._refined:
                self._refine(variant)

    def _refine(self, variant: Variant, failing: int = 0) -> None:
        """Find a small number of sensitive matmuls to keep in float: by prediction, then doubling and bisection."""
        self._refined.add(variant)
        if self._reason_to_postpone(with_kept(variant, failing + 1)) is not None or self._is_budget_spent():
            self._consider(with_kept(variant, failing + 1))  # records why it is not tried
            return
        measured = {
            kept_matmuls(other): trial.verdict.agreement.value
            for other, trial in self.trials.items()
            if without_kept(other) == variant
        }
        counts = self.builder.float_counts(variant, self._deadline, measured)
        if (reason := self._reason_against(variant, counts)) is not None:
            self._postponed[with_kept(variant, counts.predicted)] = reason
            return
        # Fewer than predicted are assumed to fail.
        failing = max(failing, counts.predicted - 1)
        count = failing + 1
        if count > counts.max:
            return  # with all of them in float it would be fp32
        while not self._consider(with_kept(variant, count)):
            if with_kept(variant, count) not in self._times or count >= counts.max:
                return
            failing, count = count, min(2 * count, counts.max)
        while count - failing > 1:
            middle = (failing + count) // 2
            if self._consider(with_kept(variant, middle)):
                self._supersede(with_kept(variant, count), with_kept(variant, middle))
                count = middle
            elif with_kept(variant, middle) in self._times:
                failing = middle
            else:
                return

    def _reason_against(self, variant: Variant, counts: FloatCounts) -> str | None:
        """Return why a variant with the predicted number of matmuls in float would not be the fastest."""
        fp32 = Variant(variant.backend, Precision.FP32, variant.device)
        fastest = self._fastest_besides(variant)
        if self.stored is None or fastest is None or fp32 not in self._times:
            return None
        share = counts.predicted / (counts.max + 1)
        expected = (1 - share) * self._times[variant] + share * self._times[fp32]
        ratio = expected / self._times[fastest]
        if ratio <= _MIN_GAIN:
            return None
        return f"not tried: it is expected to take {ratio:.2f}× as long as {fastest}"

    def _supersede(self, variant: Variant, other: Variant) -> None:
        """Drop a variant because another one, which computes less in float, may pass too."""
        self.builder.discard(self._screened.pop(variant).artifact)
        reason = f"not judged: {other} passes the first rows too, with less in float"
        self.others.append(Candidate(variant.name, Status.SKIPPED, reason))

    # Judging on all rows

    def _judge_fastest(self) -> None:
        """Judge variants on all rows, fastest first, until enough have passed to store, and one in fp32."""
        while self._screened:
            variant = min(self._screened, key=self._times.__getitem__)
            if self._has_enough(variant):
                break
            if not self._judge(variant):
                self._replace_failed(variant)
        lossless = [variant for variant in self._screened if variant.precision is Precision.FP32]
        has_lossless = any(variant.precision is Precision.FP32 for variant in self._passed)
        if lossless and not has_lossless:
            self._judge(min(lossless, key=self._times.__getitem__))
        for variant, screened in self._screened.items():
            best = min(self._passed, key=self._times.__getitem__)
            reason = f"not judged: it takes {screened.relative_time / self._times[best]:.2f}× as long as {best}"
            self.others.append(Candidate(variant.name, Status.SKIPPED, reason))
            self.builder.discard(screened.artifact)
        self._screened.clear()

    def _has_enough(self, variant: Variant) -> bool:
        """Return whether enough variants have passed that are faster than this one."""
        if self.stored is None:
            return False
        times = sorted(self._times[each] for each in self._passed if BACKENDS.get(each.backend).is_stored)
        if times and time.monotonic() > self._deadline:
            return True
        return len(times) >= self.stored and self._times[variant] > _TIMING_MARGIN * times[self.stored - 1]

    def _judge(self, variant: Variant) -> bool:
        artifact = self._screened.pop(variant).artifact
        try:
            verdict = self.builder.judge(artifact)
        except HastenError as error:
            self.others.append(Candidate(variant.name, Status.FAILED, str(error)))
            return False
        self.trials[variant] = SearchTrial(artifact, verdict)
        if not verdict.passed:
            self._rejected.add(variant)
        self.progress.advance(0, note=f"{variant}: {verdict.reason}")
        return verdict.passed

    def _replace_failed(self, variant: Variant) -> None:
        """Try what may take the place of a variant that passed the first rows and failed on all."""
        for postponed in list(self._postponed):
            self._consider(postponed)
        base = without_kept(variant)
        if base.name in _REFINED:
            self._refine(base, kept_matmuls(variant))
        self._refine_rejected()

    @property
    def _passed(self) -> Mapping[Variant, SearchTrial]:
        return {variant: trial for variant, trial in self.trials.items() if trial.verdict.passed}

    def _is_budget_spent(self) -> bool:
        """Return whether another variant, and judging the fastest, would probably not fit into the budget."""
        return time.monotonic() + self._longest_s + self._left_to_judge_s() > self._deadline

    def _left_to_judge_s(self) -> float:
        """Return the time to judge the variants that will be stored, and one in fp32."""
        fastest = sorted(self._screened, key=self._times.__getitem__)[: self.stored]
        if not any(variant.precision is Precision.FP32 for variant in (*fastest, *self._passed)):
            fastest += [variant for variant in self._screened if variant.precision is Precision.FP32][:1]
        return sum(self._screened[variant].judge_s for variant in fastest)


def _without(variant: Variant, *words: str) -> Variant:
    return replace(variant, modifiers=tuple(word for word in variant.modifiers if word not in words))
