"""Run the steps that every build shares: timed stages, saved tokenizer, report, choice of variants, bundle."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hasten.backends import BACKENDS, Artifact
from hasten.builder.check_export import check_tokenizer
from hasten.builder.resolved_plan import CandidatePlan, ResolvedData, ResolvedModel, ResolvedPlan
from hasten.builder.search.search import SearchTrial
from hasten.builder.search.select import explain, pareto_front, rank
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.pytorch_model import Loaded, save_configurations
from hasten.builder.sources.tokenizer import save_tokenizer
from hasten.bundle import Bundle, BundleWriter, Manifest, VariantEntry
from hasten.bundle.manifest import SCHEMA, ModelOrigin
from hasten.core.errors import AccuracyError, HastenError, StageError
from hasten.core.plan import Keep, Plan, Shapes
from hasten.core.progress import Progress
from hasten.core.report import Bench, Candidate, Pass, Report, Stage, Status
from hasten.core.system.hardware import Machine, peak_memory_bytes, this_machine
from hasten.core.system.memory_limit import free_memory
from hasten.core.tensors import Batch, Shape
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import Variant, VariantChoice
from hasten.core.version import __version__
from hasten.report_page import render_page


@dataclass(frozen=True, slots=True)
class PhaseBench:
    """The timings by which variants are ranked, of whole batches or of decode steps, and those of prefill."""

    bench: Bench
    prefill: Bench | None = None


@dataclass(frozen=True, slots=True)
class BenchedVariants:
    """The variants that passed the accuracy gate with their timings, and the others with their reasons."""

    eligible: Mapping[Variant, SearchTrial]
    rejected: Sequence[Candidate]
    # Everything that was timed: the eligible variants and the baseline.
    contenders: Sequence[Artifact]
    bench: Bench
    # The shape at which the fastest variant is chosen.
    shape: Shape


@dataclass
class BuildPipeline(ABC):
    """The build of a model family, and the benchmark of its bundles."""

    resolved: ResolvedPlan
    work: Path
    progress: Progress
    force: bool
    # The user's module with quantizers in it, if it has some.
    qdq_module: Any = None
    # Whether to time the optimal shape alone, which is enough to choose a variant.
    is_brief: bool = False
    machine: Machine = field(default_factory=this_machine)
    stages: list[Stage] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    @staticmethod
    @abstractmethod
    def preflight(plan: Plan, model: ResolvedModel, data: ResolvedData, machine: Machine) -> CandidatePlan:
        """Check the plan and its data before the weights are read; return the variants to try."""

    @staticmethod
    @abstractmethod
    def variants_for(choice: VariantChoice, model: ModelDirectory, plan: Plan) -> tuple[str, ...]:
        """Return the variants to build for a choice of backend, precision and device; none stands for the search."""

    @staticmethod
    @abstractmethod
    def baseline(files: ModelDirectory, plan: Plan, work: Path, device: str) -> Artifact:
        """Load the unchanged model and save it in `work` for a benchmark."""

    @staticmethod
    @abstractmethod
    def bench_shapes(bundle: Bundle, shapes: Shapes) -> Shapes:
        """Return the shapes, limited to those that the model supports."""

    @staticmethod
    @abstractmethod
    def bench_rows(bundle: Bundle) -> Batch:
        """Return the rows of the reference as token ids."""

    @staticmethod
    @abstractmethod
    def bench(
        contenders: Sequence[Artifact],
        shapes: Sequence[Shape],
        rows: Batch,
        *,
        budget_s: float,
        threads: int | None,
        progress: Progress,
    ) -> PhaseBench:
        """Time contenders, the first of which is the baseline."""

    @abstractmethod
    def run(self) -> Bundle:
        """Build the bundle."""

    @property
    def plan(self) -> Plan:
        """Return the plan that is built."""
        return self.resolved.plan

    @property
    def candidates(self) -> CandidatePlan:
        """Return the variants to try."""
        return self.resolved.candidates

    @contextmanager
    def stage(self, name: str) -> Iterator[list[str]]:
        """Time a stage, show its progress, and put its name into unexpected errors."""
        notes: list[str] = []
        begin = time.perf_counter()
        self.progress.start(name)
        ok = False
        try:
            yield notes
            ok = True
        except (HastenError, OSError):
            raise
        except Exception as error:
            raise StageError(f"{name} failed: {type(error).__name__}: {error}") from error
        finally:
            self.progress.finish("; ".join(notes), ok=ok)
        free_memory()
        self.stages.append(Stage(name, time.perf_counter() - begin, tuple(notes), peak_memory_bytes()))

    def folder(self, name: str) -> Path:
        """Create a folder in the working directory."""
        folder = self.work / name
        folder.mkdir()
        return folder

    def save_tokenizer(self, loaded: Loaded) -> Tokenizer:
        """Save tokenizer and configurations for the bundle, and check the tokenizer against the model's own."""
        save_tokenizer(loaded.original_tokenizer, self._tokenizer_file)
        save_configurations(loaded.config, loaded.original_tokenizer, self.folder("configurations"))
        tokenizer = Tokenizer.open(self._tokenizer_file, loaded.tokenizer)
        check_tokenizer(tokenizer, loaded.original_tokenizer)
        return tokenizer

    def reject(self, trials: Mapping[Variant, SearchTrial], others: Sequence[Candidate], hint: str) -> list[Candidate]:
        """Return the rejected variants with their reasons; raise if no variant that a bundle can store is left."""
        inaccurate = [
            Candidate(variant.name, Status.INACCURATE, trial.verdict.reason, trial.verdict)
            for variant, trial in trials.items()
            if not trial.verdict.passed
        ]
        rejected = [*inaccurate, *others]
        if not any(trial.verdict.passed and BACKENDS.get(v.backend).is_stored for v, trial in trials.items()):
            raise AccuracyError(
                f"no variant of {self.resolved.model.id} can be used",
                hint=hint if inaccurate else None,
                candidates=tuple(rejected),
            )
        return rejected

    def write(
        self, benched: BenchedVariants, add_contents: Callable[[BundleWriter, Sequence[SearchTrial]], Manifest]
    ) -> Bundle:
        """Choose the variants to store and write the bundle; `add_contents` adds what depends on the model family."""
        ranking = rank(benched.bench, benched.shape, list(benched.eligible))
        stored = ranking if self.plan.keep is Keep.ALL else ranking[:2]
        for artifact in benched.contenders:
            if artifact.variant not in stored:
                shutil.rmtree(artifact.directory)
        self.passes = _passes_of(self.passes, [variant.name for variant in stored])
        report = self._report(benched, ranking)
        with self.stage("write"), BundleWriter(self.resolved.target, force=self.force) as writer:
            trials = [benched.eligible[variant] for variant in stored]
            for trial in trials:
                writer.add_variant(trial.artifact)
            writer.add_tokenizer(self._tokenizer_file)
            writer.add_configurations(self.work / "configurations")
            writer.add_report(report)
            manifest = add_contents(writer, trials)
            writer.add_page(render_page(manifest, report, writer.reference_rows))
            return writer.commit(manifest)

    def manifest(self, loaded: Loaded, variants: Sequence[VariantEntry]) -> Manifest:
        """Return the part of the manifest that all model families share."""
        files = self.resolved.model.files
        return Manifest(
            schema=SCHEMA,
            hasten=__version__,
            created=_now(),
            model=ModelOrigin(files.id, files.revision, loaded.architecture, files.graph),
            task=loaded.task,
            tokenizer=loaded.tokenizer,
            signature=loaded.signature,
            graphs={},
            variants=tuple(variants),
            gate=self.plan.gate,
            machine=self.machine,
            files={},
        )

    @property
    def _tokenizer_file(self) -> Path:
        return self.work / "tokenizer.json"

    def _report(self, benched: BenchedVariants, ranking: Sequence[Variant]) -> Report:
        bench, shape = benched.bench, benched.shape
        verdicts = {variant: trial.verdict for variant, trial in benched.eligible.items()}
        rejected = list(benched.rejected)
        if bench.baseline not in [variant.name for variant in verdicts]:
            rejected.insert(0, Candidate(bench.baseline, Status.BASELINE, "the baseline"))
        candidates = (*explain(ranking, bench, shape, verdicts), *rejected)
        return Report(
            plan=self.plan,
            created=_now(),
            machine=self.machine,
            stages=tuple(self.stages),
            candidates=candidates,
            bench=bench,
            chosen=ranking[0].name,
            passes=tuple(self.passes),
            pareto_front=pareto_front(candidates, bench, shape),
            notes=self.candidates.notes,
        )


def _passes_of(passes: Sequence[Pass], stored: Sequence[str]) -> list[Pass]:
    """Return the passes over graphs that the bundle stores; a search makes many others."""
    narrowed = [replace(step, variants=tuple(name for name in step.variants if name in stored)) for step in passes]
    return [now for now, before in zip(narrowed, passes, strict=True) if now.variants or not before.variants]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
