"""The inputs of a build, resolved once by `preflight` and only read by the stages after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hasten.builder.sources.directory import ModelDirectory
from hasten.core.plan import Plan
from hasten.core.report import Candidate
from hasten.core.variant import Precision, Variant
from hasten.families import Family, family_of
from hasten.measure.data import Data
from hasten.quantize.recipe import Recipe

# The backends that run a model unchanged: its PyTorch module or, for a model that comes as a graph, ONNX Runtime.
MODULE = "torch"
GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model of a plan: its files were found and its task is known, its weights were not read."""

    files: ModelDirectory
    task: str
    # The precision of its weights: fp32, to which fp16 is widened, unless it comes as a quantized graph.
    precision: Precision = Precision.FP32
    # The precision its quantizers round to, for a module that has some.
    qdq_precision: Precision | None = None

    @property
    def id(self) -> str:
        """Return the hub id, or the full path of a local model."""
        return self.files.id

    @property
    def baseline(self) -> str:
        """Return the backend that runs the model unchanged."""
        return MODULE if self.files.graph is None else GRAPH

    @property
    def family(self) -> Family:
        """Return the family of the model's task."""
        return family_of(self.task)


@dataclass(frozen=True, slots=True)
class ResolvedData:
    """The user's files, read once because a pipe cannot be read again."""

    evaluation: Data | None
    calibration: Data | None
    recipe: Recipe | None


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """The variants a build tries, in order, and those it cannot try."""

    device: str
    variants: tuple[Variant, ...]
    # Tried after the others while the search budget lasts.
    further: tuple[Variant, ...] = ()
    unavailable: tuple[Candidate, ...] = ()
    # Whether the plan or a recipe names the variants, so that one that fails is an error.
    is_explicit: bool = False
    # Whether a variant is quantized with calibration rows.
    needs_calibration: bool = False
    # Warnings for the user.
    notes: tuple[str, ...] = ()

    @property
    def all_variants(self) -> tuple[Variant, ...]:
        """Return every variant that may be tried."""
        return (*self.variants, *self.further)


@dataclass(frozen=True, slots=True)
class BuildPreview:
    """The outcome of `--dry-run`: what a build would do."""

    model: str
    task: str
    target: Path
    baseline: str
    device: str
    contenders: tuple[str, ...]
    further: tuple[str, ...]
    unavailable: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A plan with everything that can be known before the weights are read."""

    plan: Plan
    model: ResolvedModel
    data: ResolvedData
    candidates: CandidatePlan
    # The directory of the bundle.
    target: Path

    @property
    def preview(self) -> BuildPreview:
        """Return what a build would do, as plain values."""
        return BuildPreview(
            self.model.id,
            self.model.task,
            self.target,
            self.model.baseline,
            self.candidates.device,
            tuple(map(str, self.candidates.variants)),
            tuple(map(str, self.candidates.further)),
            self.candidates.unavailable,
            self.candidates.notes,
        )
