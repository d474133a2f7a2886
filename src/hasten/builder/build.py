"""The whole way: a model in, a verified and benchmarked bundle out."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, RunOptions, Session, Source
from hasten.builder.check import check_graph, check_tokenizer
from hasten.builder.choose import GRAPH, MODULE, contenders, explain, rank
from hasten.builder.detect import detect_task
from hasten.builder.export import EXTERNAL_DATA_BYTES, IR_VERSION, OPSET, export
from hasten.builder.given import LoadedGraph, load_graph
from hasten.builder.load import LoadedModel, load_model, save_tokenizer
from hasten.builder.passes import apply_passes, record
from hasten.builder.source import ModelDirectory, find_model
from hasten.bundle import Bundle, BundleWriter, Manifest, VariantEntry
from hasten.bundle.manifest import SCHEMA, ModelOrigin
from hasten.bundle.write import check_target
from hasten.core.cache import cache_directory
from hasten.core.errors import AccuracyError, HastenError, PlanError, StageError, translate_os_errors
from hasten.core.hardware import Machine, this_machine
from hasten.core.plan import Keep, Plan, Shapes
from hasten.core.progress import Progress, Silent
from hasten.core.report import Bench, Candidate, Pass, Report, Stage, Status, Verdict
from hasten.core.targets import Target, describe_target, find_target, needed, reduces_range, target_of
from hasten.core.tensors import Batch
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.core.version import __version__
from hasten.measure.bench import bench
from hasten.measure.data import Data, read_data, sample_rows
from hasten.measure.fault import find_fault, is_finite, with_fault
from hasten.measure.verify import Expectation, expect, verify
from hasten.predictor import Predictor
from hasten.quantize.calibration import Calibration
from hasten.quantize.dynamic import quantize_dynamic
from hasten.quantize.overflow import describe, overflows

# Enough to see half a percent of flips; more would only make the bundle heavier.
_STORED_REFERENCE_ROWS = 2000
_STORED_REFERENCE_BYTES = 2**25
# The two a bundle holds by default are the two whose other shapes matter.
_FINALISTS = 2

Original: TypeAlias = LoadedModel | LoadedGraph


@dataclass(frozen=True, slots=True)
class Outline:
    """What a build would do, before it does it."""

    model: str
    task: str
    target: Path
    # The backend that runs the original.
    baseline: str
    contenders: tuple[str, ...]
    unavailable: tuple[Candidate, ...]


def outline(plan: Plan, output: Path | None = None, *, force: bool = False) -> Outline:
    """All that can be refused or resolved without the weights: `--dry-run`, and the first step of every build."""
    return _look(plan, output, force=force, directory=None)[0]


def _look(plan: Plan, output: Path | None, *, force: bool, directory: Path | None) -> tuple[Outline, Data | None]:
    """The outline, and the data that was read for it: a pipe can be read only once."""
    if output is not None:
        check_target(output, force=force)
    data = read_data(plan.data, plan.columns) if plan.data is not None else None
    model = find_model(plan, with_weights=False, directory=directory)
    baseline = MODULE if model.graph is None else GRAPH
    wanted, unavailable = contenders(plan, this_machine(), baseline)
    task = detect_task(model, plan)
    if data is not None:
        task.parse(data.rows)
    target = output or cache_directory() / "bundles" / _cache_name(model, directory)
    names = tuple(variant.name for variant in wanted)
    return Outline(model.id, task.name, target, baseline, names, tuple(unavailable)), data


def _cache_name(model: ModelDirectory, directory: Path | None) -> str:
    """A hub id as it is, flattened; a local model by its folder, one that lies nowhere by its name."""
    if directory is not None:
        return re.sub(r"[^\w.-]+", "-", model.id).strip("-.")
    return model.id.replace("/", "--") if model.revision else Path(model.id).name or "model"


def build(
    plan: Plan,
    output: Path | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> Bundle:
    """Nothing appears at the target unless every stage succeeded.

    `directory` is where a model lies whose name in the plan is not an address.
    """
    about, data = _look(plan, output, force=force, directory=directory)
    temporary = Path(tempfile.gettempdir())
    doing = f"working in {temporary}"
    with (
        translate_os_errors(doing),
        tempfile.TemporaryDirectory(prefix="hasten-") as work,
        translate_os_errors(doing, temporary),
    ):
        return _Build(plan, about, data, Path(work), progress or Silent(), force or output is None, directory).run()


@dataclass(frozen=True, slots=True)
class _Trial:
    """A variant that was made, and how it did."""

    artifact: Artifact
    verdict: Verdict


@dataclass
class _Build:
    plan: Plan
    about: Outline
    data: Data | None
    work: Path
    progress: Progress
    force: bool
    directory: Path | None
    machine: Machine = field(default_factory=this_machine)
    stages: list[Stage] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)

    def run(self) -> Bundle:
        with self._stage("load") as notes:
            model = find_model(self.plan, directory=self.directory)
            loaded = self._load(model)
            tokenizer_file = self.work / "tokenizer.json"
            save_tokenizer(loaded, tokenizer_file)
            tokenizer = Tokenizer.open(tokenizer_file, loaded.tokenizer)
            check_tokenizer(tokenizer, loaded.original_tokenizer)
            notes.append(f"{loaded.architecture} for {loaded.task.name}, up to {loaded.signature.max_length} tokens")
            notes += _kind_notes(model, loaded)

        with self._stage("reference") as notes:
            rows = self.data.rows_for(loaded.task) if self.data else sample_rows(loaded.task)
            original = self._original(loaded)
            gate, predictor = self.plan.gate, Predictor(loaded.task, tokenizer, original)
            expected = expect(predictor, rows, self.progress, metric=gate.metric)
            if expected.metric is None and (gate.max_drop is not None or gate.metric is not None):
                raise PlanError(f"{self.plan.data} has no labels, so no metric can be measured on it")
            notes.append(f"{len(rows)} rows answered by {loaded.baseline}")
            if expected.metric is not None:
                notes.append(f"{expected.metric.name} {expected.metric.value:.4f}")

        with self._stage("export") as notes:
            exported = self._export(loaded, notes)
            self._refuse_non_finite(exported, loaded, expected)
            # A graph that tracing froze is large, and fusing it would take minutes.
            with self._open_graph(exported, loaded) as session:
                is_exact = loaded.precision is Precision.FP32
                fault = self._fault(exported, loaded)
                check_graph(session, original, expected.encoded.batch, is_exact=is_exact, is_brief=True, fault=fault)
            made = {dialect: self._made_from(dialect) for dialect in (Dialect.ONNX, Dialect.ORT)}
            self.passes.append(
                record("export", None, exported, variants=[*made[Dialect.ONNX], *made[Dialect.ORT]], notes=notes)
            )

        with self._stage("optimize") as notes:
            graphs = apply_passes(
                exported,
                self.work,
                loaded.config,
                external_data=_is_large(exported),
                pads_left=loaded.signature.pads_left,
                made=made,
            )
            self.passes += graphs.passes
            notes += dict.fromkeys(note for done in graphs.passes for note in done.notes)

        with self._stage("check") as notes, self._open_graph(graphs.plain, loaded) as session:
            fault = self._fault(graphs.plain, loaded)
            checked = check_graph(session, original, expected.encoded.batch, is_exact=is_exact, fault=fault)
            notes.append(f"the graph {f'equals {loaded.baseline}' if is_exact else 'answers'} at {', '.join(checked)}")

        with self._stage("make and verify") as notes:
            trials, failed = self._try_all(loaded, tokenizer, graphs.by_dialect(), expected)
            eligible = {variant: trial for variant, trial in trials.items() if trial.verdict.passed}
            notes.append(f"{len(eligible)} of {len(trials)} variants agree with the original")
            notes += [note for done in self.passes if done.name == "guard" for note in done.notes]
            if any(variant.precision is Precision.INT8 for variant in trials):
                notes += describe_target(self._target(), self.machine)
        refused = (*_inaccurate(trials), *failed, *self.about.unavailable)
        if not any(BACKENDS.get(variant.backend).is_stored for variant in eligible):
            raise AccuracyError(
                f"no variant of {model.id} may be used", hint="the gate is set by --min-agreement and --max-drop",
                candidates=refused,
            )  # fmt: skip

        with self._stage("benchmark") as notes:
            shapes = self._shapes(loaded, notes)
            racing = {variant: trial.artifact for variant, trial in eligible.items()}
            baseline = racing.pop(loaded.baseline, None) or self._make(loaded.baseline, loaded.source)
            measured = bench(
                [baseline, *racing.values()],
                shapes.corners(),
                expected.encoded.batch,
                budget_s=self.plan.bench_budget_s,
                threads=self.plan.threads,
                finalists=_FINALISTS,
                progress=self.progress,
            )
            ranking = rank(measured, shapes.optimal, list(eligible))

        verdicts = {variant: trial.verdict for variant, trial in eligible.items()}
        if loaded.baseline not in verdicts:
            refused = (Candidate(loaded.baseline.name, Status.BASELINE, "the original"), *refused)
        report = self._report(measured, ranking, shapes, verdicts, refused)
        with self._stage("write"), BundleWriter(self.about.target, force=self.force) as writer:
            kept = ranking if self.plan.keep is Keep.ALL else ranking[:2]
            stored_graphs = {MODEL: writer.add_graph(graphs.plain)}
            for variant in kept:
                writer.add_variant(eligible[variant].artifact)
            writer.add_tokenizer(tokenizer_file)
            stored = rows[: _stored_rows(expected)]
            writer.add_reference(stored, expected.first(len(stored), loaded.signature))
            writer.add_report(report)
            return writer.commit(self._manifest(model, loaded, stored_graphs, [eligible[variant] for variant in kept]))

    @contextmanager
    def _stage(self, name: str) -> Iterator[list[str]]:
        """Time a step, show it, and give whatever goes wrong in it its name."""
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
        self.stages.append(Stage(name, time.perf_counter() - begin, tuple(notes)))

    def _made_from(self, dialect: Dialect) -> list[str]:
        """The contenders that start from a graph of this dialect."""
        names = self.about.contenders
        return [name for name in names if BACKENDS.get(Variant.parse(name).backend).dialect is dialect]

    def _folder(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        return folder

    def _load(self, model: ModelDirectory) -> Original:
        if model.graph is not None:
            return load_graph(model, self.plan, self._folder("given") / "model.onnx")
        return load_model(model, self.plan)

    def _shapes(self, loaded: Original, notes: list[str]) -> Shapes:
        limit = loaded.signature.max_length
        asked = self.plan.shapes
        if asked.sequence.max > limit:
            notes.append(f"--seq-len {asked.sequence.max} shortened to the model's {limit}")
        return Shapes(asked.batch, asked.sequence.at_most(limit))

    def _original(self, loaded: Original) -> Session:
        """The module in memory, or the graph where it lies, as a session: no copy on disk for the reference."""
        if isinstance(loaded, LoadedGraph):
            return self._open_graph(loaded.graph, loaded)
        from hasten.backends.torch import ModuleSession

        artifact = Artifact(loaded.baseline, loaded.signature, self.work, {})
        return ModuleSession(loaded.module, artifact, RunOptions(self.plan.threads))

    def _export(self, loaded: Original, notes: list[str]) -> Path:
        if isinstance(loaded, LoadedGraph):
            notes.append("not needed: it came as a graph")
            return loaded.graph
        exported = self._folder("exported") / "model.onnx"
        export(loaded, exported)
        notes.append(f"opset {OPSET}, IR {IR_VERSION}")
        return exported

    def _graph(self, graph: Path, loaded: Original) -> Artifact:
        return Artifact(Variant(GRAPH, loaded.precision), loaded.signature, graph.parent, {MODEL: graph.name})

    def _fault(self, graph: Path, loaded: Original) -> Callable[[Batch], str | None]:
        return lambda rows: find_fault(self._graph(graph, loaded), rows, RunOptions(self.plan.threads))

    def _open_graph(self, graph: Path, loaded: Original) -> Session:
        return BACKENDS.get(GRAPH).open(self._graph(graph, loaded), RunOptions(self.plan.threads))

    def _make(self, variant: Variant, source: Source) -> Artifact:
        return BACKENDS.get(variant.backend).make(source, variant, self._folder(variant.name))

    def _prepare(self, variant: Variant, loaded: Original, graphs: Mapping[Dialect, Path]) -> Source:
        """The model in the form this variant is made from: its dialect and, where graphs carry it, its precision."""
        dialect = BACKENDS.get(variant.backend).dialect
        if dialect is Dialect.MODULE or variant == loaded.baseline:
            return loaded.source
        graph = graphs[dialect]
        if dialect is Dialect.ORT and variant.precision is Precision.INT8 and loaded.precision is Precision.FP32:
            quantized = self._folder(f"{variant.name}-graph") / graph.name
            is_reduced = reduces_range(self._target())
            quantize_dynamic(graph, quantized, external_data=_is_large(graph), reduce_range=is_reduced)
            self.passes.append(record("quantize", graph, quantized, variants=[variant.name]))
            graph = quantized
        return Source(loaded.signature, {MODEL: graph})

    def _target(self) -> Target:
        return find_target(self.plan.target) if self.plan.target is not None else target_of(self.machine)

    def _instructions(self, variant: Variant, loaded: Original) -> tuple[str, ...]:
        """What a variant needs of the processor beside what its backend asks for: int8 that we made for a target."""
        is_ours = BACKENDS.get(variant.backend).dialect is Dialect.ORT and loaded.precision is Precision.FP32
        return needed(self._target()) if is_ours and variant.precision is Precision.INT8 else ()

    def _guard(self, variant: Variant, source: Source, rows: Batch) -> Source:
        """What leaves the range of fp16 on these rows is to stay in fp32."""
        if variant.precision is not Precision.FP16 or MODEL not in source.graphs:
            return source
        graph = source.graphs[MODEL]
        found = overflows(graph, Calibration(rows, source.signature))
        if found:
            self.passes.append(record("guard", graph, graph, variants=[variant.name], notes=[describe(found)]))
        return replace(source, beyond_fp16=frozenset(one.tensor for one in found))

    def _refuse_non_finite(self, graph: Path, loaded: Original, expected: Expectation) -> None:
        """Of a model that answers with no numbers itself, nothing can be proven."""
        if is_finite(expected.outputs):
            return
        operator = self._fault(graph, loaded)(expected.encoded.batch)
        where = f": first at {operator}" if operator is not None else ""
        raise AccuracyError(f"{loaded.baseline} itself answers with numbers that are not finite{where}")

    def _try_all(
        self, loaded: Original, tokenizer: Tokenizer, graphs: Mapping[Dialect, Path], expected: Expectation
    ) -> tuple[dict[Variant, _Trial], list[Candidate]]:
        """Make and verify each contender. One that fails is recorded if we picked it, an error if the user did."""
        trials: dict[Variant, _Trial] = {}
        failed: list[Candidate] = []
        wanted = [Variant.parse(name) for name in self.about.contenders]
        if isinstance(loaded, LoadedGraph) and not self.plan.variants:
            wanted.insert(0, loaded.baseline)  # what was given may already be the fastest
        for variant in wanted:
            try:
                source = self._guard(variant, self._prepare(variant, loaded, graphs), expected.encoded.batch)
                artifact = self._make(variant, source)
                with BACKENDS.get(variant.backend).open(artifact, RunOptions(self.plan.threads)) as session:
                    if session.spec.precision != variant.precision:
                        raise StageError(f"{variant} really computes in {session.spec.precision} here")
                    predictor = Predictor(loaded.task, tokenizer, session)
                    verdict = verify(predictor, variant.name, expected, self.plan.gate, self.progress)
                options = RunOptions(self.plan.threads)
                trials[variant] = _Trial(artifact, with_fault(verdict, artifact, expected.encoded.batch, options))
            except StageError as error:
                if self.plan.variants:
                    raise
                failed.append(Candidate(variant.name, Status.FAILED, error.message))
        return trials, failed

    def _report(
        self,
        measured: Bench,
        ranking: Sequence[Variant],
        shapes: Shapes,
        verdicts: Mapping[Variant, Verdict],
        others: Sequence[Candidate],
    ) -> Report:
        return Report(
            plan=self.plan,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=self.machine,
            stages=tuple(self.stages),
            candidates=(*explain(ranking, measured, shapes.optimal, verdicts), *others),
            bench=measured,
            chosen=ranking[0].name,
            passes=tuple(self.passes),
        )

    def _manifest(
        self, model: ModelDirectory, loaded: Original, graphs: dict[str, str], kept: Sequence[_Trial]
    ) -> Manifest:
        return Manifest(
            schema=SCHEMA,
            hasten=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            model=ModelOrigin(model.id, model.revision, loaded.architecture, model.graph),
            task=loaded.task,
            tokenizer=loaded.tokenizer,
            signature=loaded.signature,
            graphs=graphs,
            variants=tuple(_entry(trial, self._instructions(trial.artifact.variant, loaded)) for trial in kept),
            gate=self.plan.gate,
            machine=self.machine,
            files={},
            graph_precision=loaded.precision,
        )


def _kind_notes(model: ModelDirectory, loaded: Original) -> Sequence[str]:
    """What a person should know about how the model came."""
    if isinstance(loaded, LoadedGraph):
        return loaded.notes
    if model.base is not None:
        return [f"merged into {model.base.id}"]
    unused = model.unused_graphs
    return [f"its weights were taken, not {unused[0]} (--file-name takes a graph)"] if unused else []


def _stored_rows(expected: Expectation) -> int:
    """How many answers a bundle keeps: vectors of all tokens, or scores of a whole vocabulary, are large."""
    size = sum(output.nbytes for output in expected.outputs.values())
    return min(_STORED_REFERENCE_ROWS, max(16, expected.encoded.items * _STORED_REFERENCE_BYTES // max(1, size)))


def _entry(trial: _Trial, instructions: tuple[str, ...]) -> VariantEntry:
    variant = trial.artifact.variant
    return VariantEntry(
        name=variant.name,
        backend=variant.backend,
        precision=variant.precision,
        device=variant.device,
        requires=BACKENDS.get(variant.backend).requires,
        graphs=dict(trial.artifact.graphs),
        agreement=trial.verdict.agreement,
        metric=trial.verdict.metric,
        instructions=instructions,
    )


def _inaccurate(trials: Mapping[Variant, _Trial]) -> list[Candidate]:
    return [
        Candidate(variant.name, Status.INACCURATE, trial.verdict.reason, trial.verdict)
        for variant, trial in trials.items()
        if not trial.verdict.passed
    ]


def _is_large(graph: Path) -> bool:
    size = sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))
    return size > EXTERNAL_DATA_BYTES
