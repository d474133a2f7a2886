"""The whole way: a model in, a verified and benchmarked bundle out."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, KnowsModules, RunOptions, Session, dialect_of
from hasten.builder.attempt import Attempts, Original
from hasten.builder.check import check_graph, check_tokenizer
from hasten.builder.choose import GRAPH, compared_with, explain, front, rank
from hasten.builder.export import IR_VERSION, OPSET, export
from hasten.builder.generation import GenerationBuild
from hasten.builder.given import LoadedGraph, load_graph
from hasten.builder.load import load_model, save_configurations
from hasten.builder.outline import look
from hasten.builder.passes import apply_passes, record
from hasten.builder.search import Search, Trial
from hasten.builder.source import ModelDirectory, find_model
from hasten.builder.stages import Staged
from hasten.builder.tokenizer import save_tokenizer
from hasten.bundle import Bundle, BundleWriter, Manifest, VariantEntry
from hasten.bundle.manifest import SCHEMA, ModelOrigin
from hasten.core.errors import AccuracyError, UnsupportedError, translate_os_errors
from hasten.core.generation import WRITING
from hasten.core.plan import Keep, Plan, Shapes
from hasten.core.progress import Progress, Silent
from hasten.core.report import Bench, Candidate, Pass, Report, Status, Verdict
from hasten.core.targets import describe_target, find_target, target_of
from hasten.core.tensors import Batch
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.core.version import __version__
from hasten.graph import is_large
from hasten.measure.bench import bench
from hasten.measure.fault import find_fault, is_finite
from hasten.measure.rows import SAMPLE, Rows, check_rows, choose_rows, naming
from hasten.measure.verify import Expectation, expect
from hasten.predictor import Predictor
from hasten.quantize.ways import is_of_quantizers

logger = logging.getLogger("hasten")

# Enough to see half a percent of flips; more would only make the bundle heavier.
_STORED_REFERENCE_ROWS = 2000
_STORED_REFERENCE_BYTES = 2**25
# The two a bundle holds by default are the two whose other shapes matter.
_FINALISTS = 2


def build(
    plan: Plan,
    output: Path | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    directory: Path | None = None,
    quantized: Any = None,
    is_brief: bool = False,
) -> Bundle:
    """Nothing appears at the target unless every stage succeeded.

    `directory` is where a model lies whose name in the plan is not an address, `quantized` the same model as a module
    with quantizers in it. `is_brief` times the optimal shape alone: enough to choose by.
    """
    rounded = None
    if quantized is not None:
        from hasten.builder.quantized import rounds_to

        rounded = rounds_to(quantized)
    about, given = look(plan, output, force=force, directory=directory, rounded=rounded)
    for note in about.notes:
        logger.warning("%s", note)
    temporary = Path(tempfile.gettempdir())
    doing = f"working in {temporary}"
    with (
        translate_os_errors(doing),
        tempfile.TemporaryDirectory(prefix="hasten-") as work,
        translate_os_errors(doing, temporary),
    ):
        kind = GenerationBuild if about.task in WRITING else _Build
        shown, may_replace = progress or Silent(), force or output is None
        return kind(plan, about, given, Path(work), shown, may_replace, directory, quantized, is_brief).run()


class _Build(Staged):
    def run(self) -> Bundle:
        with self.stage("load") as notes:
            model = find_model(self.plan, directory=self.directory)
            loaded = self._load(model)
            tokenizer_file = self.work / "tokenizer.json"
            save_tokenizer(loaded, tokenizer_file)
            configurations = self._folder("configurations")
            save_configurations(loaded.config, loaded.original_tokenizer, configurations)
            tokenizer = Tokenizer.open(tokenizer_file, loaded.tokenizer)
            check_tokenizer(tokenizer, loaded.original_tokenizer)
            notes.append(f"{loaded.architecture} for {loaded.task.name}, up to {loaded.signature.max_length} tokens")
            notes += _kind_notes(model, loaded)
            self._check_asked(loaded)
            if self.quantized is not None:
                self._check_quantized(loaded)
                own = ", ".join(one.name for one in self._tried if is_of_quantizers(one))
                notes.append(f"in float: its quantizers make {own or 'nothing'}")

        with self.stage("reference") as notes:
            chosen = self._choose_rows(loaded)
            rows = chosen.evaluation
            original = self._original(loaded)
            gate, predictor = self.plan.gate, Predictor(loaded.task, tokenizer, original)
            # Once more, now that all labels are known for sure: an adapter may bring its own.
            with naming(self.plan.data or SAMPLE, predictor.task, rows):
                check_rows(predictor.task, loaded.task, rows, gate, gate.needing_labels)
            expected = expect(predictor, rows, self.progress, metric=gate.metric)
            notes += [f"{len(rows)} rows answered by {loaded.baseline}", *chosen.notes]
            if expected.metric is not None:
                notes.append(f"{expected.metric.name} {expected.metric.value:.4f}")

        with self.stage("export") as notes:
            exported = self._export(loaded, notes)
            self._refuse_non_finite(exported, loaded, expected)
            # A graph that tracing froze is large, and fusing it would take minutes.
            with self._open_graph(exported, loaded) as session:
                is_exact = loaded.precision is Precision.FP32
                fault = self._fault(exported, loaded)
                check_graph(session, original, expected.encoded.batch, is_exact=is_exact, is_brief=True, fault=fault)
            made = {dialect: self._made_from(dialect) for dialect in Dialect}
            of_graphs = [name for dialect, names in made.items() if dialect is not Dialect.MODULE for name in names]
            self.passes.append(record("export", None, exported, variants=of_graphs, notes=notes))

        with self.stage("optimize") as notes:
            graphs = apply_passes(
                exported,
                self.work,
                loaded.config,
                external_data=is_large(exported),
                pads_left=loaded.signature.pads_left,
                made=made,
            )
            self.passes += graphs.passes
            notes += dict.fromkeys(note for done in graphs.passes for note in done.notes)

        with self.stage("check") as notes, self._open_graph(graphs.plain, loaded) as session:
            fault = self._fault(graphs.plain, loaded)
            checked = check_graph(session, original, expected.encoded.batch, is_exact=is_exact, fault=fault)
            notes.append(f"the graph {f'equals {loaded.baseline}' if is_exact else 'answers'} at {', '.join(checked)}")

        with self.stage("search") as notes:
            recipe = self.given.recipe
            asked = recipe.target if recipe is not None else self.plan.target
            target = find_target(asked) if asked is not None else target_of(self.machine)
            attempts = Attempts(
                plan=self.plan,
                loaded=loaded,
                tokenizer=tokenizer,
                graphs=graphs.by_dialect(),
                expected=expected,
                calibration_rows=chosen.calibration,
                target=target,
                work=self.work,
                progress=self.progress,
                given=recipe,
                quantized=self.quantized,
            )
            search = self._search(attempts)
            eligible = {variant: trial for variant, trial in search.trials.items() if trial.verdict.passed}
            notes.append(f"{len(eligible)} of {len(search.trials)} variants answer like the original")
            notes += attempts.notes
            if attempts.recipes:
                notes += describe_target(target, self.machine)
            self.passes += attempts.passes
        refused = (*_inaccurate(search.trials), *search.others, *self.about.unavailable)
        if not any(BACKENDS.get(variant.backend).is_stored for variant in eligible):
            is_judged = any(one.status is Status.INACCURATE for one in refused)
            raise AccuracyError(
                f"no variant of {model.id} may be used",
                hint="the gate is set by --min-agreement and --max-drop" if is_judged else None,
                candidates=refused,
            )

        with self.stage("benchmark") as notes:
            shapes = self._shapes(loaded, notes)
            racing = {variant: trial.artifact for variant, trial in eligible.items()}
            against = compared_with(loaded.baseline, self.about.device, self.machine)
            baseline = racing.pop(against) if against in racing else attempts.make(against)
            racing = {against: baseline, **racing}
            measured = bench(
                list(racing.values()),
                [shapes.optimal] if self.is_brief else shapes.corners(),
                expected.encoded.batch,
                budget_s=self.plan.bench_budget_s,
                threads=self.plan.threads,
                finalists=_FINALISTS,
                progress=self.progress,
            )
            ranking = rank(measured, shapes.optimal, list(eligible))

        verdicts = {variant: trial.verdict for variant, trial in eligible.items()}
        if against not in verdicts:
            refused = (Candidate(against.name, Status.BASELINE, "the original"), *refused)
        kept = ranking if self.plan.keep is Keep.ALL else ranking[:2]
        for variant, artifact in racing.items():
            if variant not in kept:
                attempts.discard(artifact)
        self.passes = _of_stored(self.passes, [variant.name for variant in kept])
        report = self._report(measured, ranking, shapes, verdicts, refused)
        with self.stage("write"), BundleWriter(self.about.target, force=self.force) as writer:
            stored_graphs = {MODEL: writer.add_graph(graphs.plain)}
            for variant in kept:
                writer.add_variant(eligible[variant].artifact)
            writer.add_tokenizer(tokenizer_file)
            writer.add_configurations(configurations)
            stored = rows[: _stored_rows(expected)]
            writer.add_reference(stored, expected.first(len(stored), loaded.signature))
            writer.add_report(report)
            return writer.commit(
                self._manifest(model, loaded, stored_graphs, [attempts.entry(eligible[variant]) for variant in kept])
            )

    def _made_from(self, dialect: Dialect) -> list[str]:
        """The contenders that start from the original's graph in this dialect."""
        return [one.name for one in self._tried if not is_of_quantizers(one) and dialect_of(one) is dialect]

    @property
    def _tried(self) -> list[Variant]:
        return [Variant.parse(name) for name in (*self.about.contenders, *self.about.further)]

    def _folder(self, name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        return folder

    def _choose_rows(self, loaded: Original) -> Rows:
        """Rows are set aside for calibration only where something is calibrated."""
        is_whole = loaded.precision is Precision.FP32
        is_needed = is_whole and any(map(self.given.calibrates, self._tried))
        return choose_rows(loaded.task, self.given.data, self.given.calibration, is_needed=is_needed)

    def _load(self, model: ModelDirectory) -> Original:
        if model.graph is not None:
            return load_graph(model, self.plan, self._folder("given") / "model.onnx")
        return load_model(model, self.plan)

    def _check_asked(self, loaded: Original) -> None:
        """What nothing can be made from is refused now: an automatic search passes over it."""
        for backend in map(BACKENDS.get, dict.fromkeys(Variant.parse(name).backend for name in self.plan.variants)):
            if isinstance(backend, KnowsModules) and not isinstance(loaded, LoadedGraph):
                backend.check_module(loaded.module)

    def _check_quantized(self, loaded: Original) -> None:
        """A task may ask for another head than the one that quantizers stand in front of."""
        kind = type(self.quantized).__name__
        if kind != loaded.architecture:
            raise UnsupportedError(
                f"the quantizers stand in a {kind}, and {loaded.task.name} takes a {loaded.architecture}",
                hint="leave task out, or quantize that one",
            )

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

    def _refuse_non_finite(self, graph: Path, loaded: Original, expected: Expectation) -> None:
        """Of a model that answers with no numbers itself, nothing can be proven."""
        if is_finite(expected.outputs):
            return
        operator = self._fault(graph, loaded)(expected.encoded.batch)
        where = f": first at {operator}" if operator is not None else ""
        raise AccuracyError(f"{loaded.baseline} itself answers with numbers that are not finite{where}")

    def _search(self, attempts: Attempts) -> Search:
        search = Search(attempts, attempts.most_sensitive, attempts.discard, self.plan.budget_s, self.progress)
        wanted = [Variant.parse(name) for name in self.about.contenders]
        if self.plan.variants or self.given.recipe is not None:
            search.try_asked(wanted)
            return search
        if isinstance(attempts.loaded, LoadedGraph):
            wanted.insert(0, attempts.loaded.baseline)  # what was given may already be the fastest
        # A model that comes quantized is not quantized again.
        is_whole = attempts.loaded.precision is Precision.FP32
        search.try_offered(wanted, [Variant.parse(name) for name in self.about.further] if is_whole else [])
        return search

    def _report(
        self,
        measured: Bench,
        ranking: Sequence[Variant],
        shapes: Shapes,
        verdicts: Mapping[Variant, Verdict],
        others: Sequence[Candidate],
    ) -> Report:
        candidates = (*explain(ranking, measured, shapes.optimal, verdicts), *others)
        return Report(
            plan=self.plan,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=self.machine,
            stages=tuple(self.stages),
            candidates=candidates,
            bench=measured,
            chosen=ranking[0].name,
            passes=tuple(self.passes),
            front=front(candidates, measured, shapes.optimal),
            notes=self.about.notes,
        )

    def _manifest(
        self, model: ModelDirectory, loaded: Original, graphs: dict[str, str], kept: Sequence[VariantEntry]
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
            variants=tuple(kept),
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


def _of_stored(passes: Sequence[Pass], stored: Sequence[str]) -> list[Pass]:
    """What was done to the graphs a bundle holds; a search makes many others."""
    own = [replace(done, variants=tuple(name for name in done.variants if name in stored)) for done in passes]
    return [now for now, before in zip(own, passes, strict=True) if now.variants or not before.variants]


def _inaccurate(trials: Mapping[Variant, Trial]) -> list[Candidate]:
    return [
        Candidate(variant.name, Status.INACCURATE, trial.verdict.reason, trial.verdict)
        for variant, trial in trials.items()
        if not trial.verdict.passed
    ]
