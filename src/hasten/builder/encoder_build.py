"""Build the bundle of an encoder.

model ─load─▶ module ─export─▶ graph ─optimize─▶ graphs ─search─▶ variants ─benchmark─▶ bundle
                └─ reference outputs ───────────────────▲
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import BACKENDS, MODEL, Artifact, ChecksModule, Dialect, RunOptions, Session, dialect_of
from hasten.builder.check_export import GraphChecks, answer_awkward_batches, check_graph
from hasten.builder.export.encoder import IR_VERSION, OPSET, export
from hasten.builder.passes.pipeline import apply_passes, record_pass
from hasten.builder.pipeline import BenchedVariants, BuildPipeline, PhaseBench
from hasten.builder.resolved_plan import GRAPH
from hasten.builder.search.candidates import baseline_for, encoder_candidates
from hasten.builder.search.presets import candidates_for_choice
from hasten.builder.search.search import Search, SearchTrial
from hasten.builder.search.variant_builder import LoadedSource, VariantBuilder
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.locate import fetch_weights
from hasten.builder.sources.onnx_model import LoadedGraph, load_graph
from hasten.builder.sources.pytorch_model import load_model
from hasten.bundle import Bundle, BundleWriter, Manifest
from hasten.bundle.read import EXPANSION_MARGIN_BYTES
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.plan import Keep, Plan, Shapes
from hasten.core.system.cpu_targets import describe_target, find_target, target_of
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch, Shape
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.measure.bench import bench
from hasten.measure.encoder_gate import Expectation, expect
from hasten.measure.evaluation_rows import SAMPLE, EvaluationRows, check_rows, choose_rows, naming_source
from hasten.measure.non_finite import find_non_finite, is_finite
from hasten.predictor import Predictor
from hasten.quantize.modifiers import is_qdq
from hasten.tasks import TASKS

# Enough to see half a percent of flipped labels; more would only enlarge the bundle.
_MAX_REFERENCE_ROWS = 2000
_MAX_REFERENCE_BYTES = 2**25
# A bundle stores two variants by default, and only for those do the other shapes matter.
_FINALISTS = 2


class EncoderBuild(BuildPipeline):
    """The build of a model that answers with labels, scores or vectors."""

    preflight = staticmethod(encoder_candidates)
    variants_for = staticmethod(candidates_for_choice)

    @staticmethod
    def baseline(files: ModelDirectory, plan: Plan, work: Path, device: str) -> Artifact:
        loaded, folder = load_encoder(files, plan, work), work / "baseline"
        folder.mkdir()
        variant = baseline_for(loaded.baseline, device, this_machine())
        return BACKENDS.get(variant.backend).make(loaded.source, variant, folder)

    @staticmethod
    def bench_shapes(bundle: Bundle, shapes: Shapes) -> Shapes:
        return Shapes(shapes.batch, shapes.sequence.at_most(bundle.manifest.signature.max_length))

    @staticmethod
    def bench_rows(bundle: Bundle) -> Batch:
        spec = bundle.manifest.task
        task = TASKS.get(spec.name)
        items = task.parse(list(bundle.reference().rows))
        return task.encode(items, bundle.tokenizer(), task.options(spec, {})).batch

    @staticmethod
    def bench(contenders: Sequence[Artifact], shapes: Sequence[Shape], rows: Batch, **options: Any) -> PhaseBench:
        return PhaseBench(bench(contenders, shapes, rows, scales_with_rows=True, **options))

    def run(self) -> Bundle:
        """Build the bundle."""
        with self.stage("load") as notes:
            loaded, tokenizer = self._load(notes)
        with self.stage("reference") as notes:
            reference = self._open_reference(loaded)
            rows, expected = self._answer(loaded, Predictor(loaded.task, tokenizer, reference), notes)
            graph_checks = answer_awkward_batches(
                reference,
                expected.encoded.batch,
                attention_heads=int(getattr(loaded.config, "num_attention_heads", None) or 1),
            )
        with self.stage("export") as notes:
            exported = self._export(loaded, notes)
            self._check_finite(exported, loaded, expected)
            # A graph that tracing specialized to one shape is large, and fusing it would take minutes: check it first.
            self._check_graph(exported, loaded, graph_checks, is_brief=True)
            baseline = self._save_baseline(loaded)
            names = [name for group in self._names.values() for name in group]
            self.passes.append(record_pass("export", None, exported, variants=names, notes=notes))
        with self.stage("optimize") as notes:
            pads_left = loaded.signature.pads_left
            graphs = apply_passes(exported, self.work, loaded.config, pads_left=pads_left, variants=self._names)
            self.passes += graphs.passes
            notes += dict.fromkeys(note for step in graphs.passes for note in step.notes)
        with self.stage("check") as notes:
            checked = self._check_graph(graphs.plain, loaded, graph_checks)
            outcome = f"equals {loaded.baseline}" if loaded.precision is Precision.FP32 else "runs"
            notes.append(f"the graph {outcome} at {', '.join(checked)}")
            notes += [graph_checks.unchecked] if graph_checks.unchecked else []
        with self.stage("search") as notes:
            # The CPU that int8 graphs are made for.
            recipe = self.resolved.data.recipe
            name = recipe.target if recipe is not None else self.plan.target
            target = find_target(name) if name is not None else target_of(self.machine)
            builder = VariantBuilder(
                plan=self.plan,
                loaded=loaded,
                tokenizer=tokenizer,
                graphs=graphs.by_dialect(),
                expected=expected,
                evaluation_rows=rows.evaluation,
                calibration_rows=rows.calibration,
                target=target,
                work=self.work,
                progress=self.progress,
                recipe=recipe,
                qdq_module=self.qdq_module,
            )
            search = self._search(builder)
            builder.close()
            eligible = {variant: trial for variant, trial in search.trials.items() if trial.verdict.passed}
            notes.append(f"{len(eligible)} of {len(search.trials)} variants pass the accuracy gate")
            notes += builder.notes
            if builder.recipes:
                notes += describe_target(target, self.machine)
            self.passes += builder.passes
        rejected = self.reject(
            search.trials,
            [*search.others, *self.candidates.unavailable],
            hint="--min-agreement and --max-drop set the gate",
        )
        with self.stage("benchmark") as notes:
            limit, shapes = loaded.signature.max_length, self.plan.shapes
            if shapes.sequence.max > limit:
                notes.append(f"--seq-len {shapes.sequence.max} shortened to the model's {limit}")
            shapes = Shapes(shapes.batch, shapes.sequence.at_most(limit))
            variant = self._baseline_variant(loaded)
            if variant in eligible:
                baseline = eligible[variant].artifact
            contenders = [
                baseline or builder.make(variant),
                *(trial.artifact for key, trial in eligible.items() if key != variant),
            ]
            measured = bench(
                contenders,
                [shapes.optimal] if self.is_brief else shapes.corners(),
                expected.encoded.batch,
                budget_s=self.plan.bench_budget_s,
                threads=self.plan.threads,
                finalists=_FINALISTS,
                progress=self.progress,
                scales_with_rows=True,
            )
            benched = BenchedVariants(eligible, rejected, contenders, measured, shapes.optimal)

        def add_contents(writer: BundleWriter, stored: Sequence[SearchTrial]) -> Manifest:
            reference_rows = rows.evaluation[: _reference_rows(expected)]
            writer.add_reference(reference_rows, expected.first(len(reference_rows), loaded.signature))
            return replace(
                self.manifest(loaded, [builder.entry(trial) for trial in stored]),
                graphs={MODEL: writer.add_graph(graphs.plain)},
                graph_precision=loaded.precision,
            )

        return self.write(benched, add_contents)

    def _load(self, notes: list[str]) -> tuple[LoadedSource, Tokenizer]:
        files = fetch_weights(self.resolved.model.files, self.plan)
        loaded = load_encoder(files, self.plan, self.folder("source"))
        tokenizer = self.save_tokenizer(loaded)
        notes.append(f"{loaded.architecture} for {loaded.task.name}, up to {loaded.signature.max_length} tokens")
        notes += _source_notes(files, loaded)
        self._check_module(loaded)
        if self.qdq_module is not None:
            names = ", ".join(variant.name for variant in self.candidates.all_variants if is_qdq(variant))
            notes.append(f"in float; its quantizers are used for {names or 'no variant'}")
        return loaded, tokenizer

    def _check_module(self, loaded: LoadedSource) -> None:
        """Reject a variant of the plan that its backend cannot make from this module; a search skips it instead."""
        backends = dict.fromkeys(Variant.parse(name).backend for name in self.plan.variants)
        for backend in map(BACKENDS.get, backends):
            if isinstance(backend, ChecksModule) and not isinstance(loaded, LoadedGraph):
                backend.check_module(loaded.module)
        kind = type(self.qdq_module).__name__
        if self.qdq_module is not None and kind != loaded.architecture:
            raise UnsupportedError(
                f"the quantizers are in a {kind}, and {loaded.task.name} needs a {loaded.architecture}",
                hint="leave task out, or quantize that class",
            )

    def _answer(
        self, loaded: LoadedSource, predictor: Predictor, notes: list[str]
    ) -> tuple[EvaluationRows, Expectation]:
        data, gate = self.resolved.data, self.plan.gate
        needs_calibration = loaded.precision is Precision.FP32 and self.candidates.needs_calibration
        rows = choose_rows(loaded.task, data.evaluation, data.calibration, is_needed=needs_calibration)
        # Checked again now that all labels are known: an adapter may bring its own.
        with naming_source(self.plan.data or SAMPLE, predictor.task, rows.evaluation):
            check_rows(predictor.task, loaded.task, rows.evaluation, gate, gate.needing_labels)
        expected = expect(predictor, rows.evaluation, self.progress, metric=gate.metric)
        notes += [f"{len(rows.evaluation)} rows answered by {loaded.baseline}", *rows.notes]
        if expected.metric is not None:
            notes.append(f"{expected.metric.name} {expected.metric.value:.4f}")
        return rows, expected

    def _open_reference(self, loaded: LoadedSource) -> Session:
        """Open the model without another copy of its weights: the module in memory, or the graph on disk."""
        if isinstance(loaded, LoadedGraph):
            return self._open_graph(loaded.graph, loaded)
        from hasten.backends.torch import ModuleSession

        artifact = Artifact(loaded.baseline, loaded.signature, self.work, {})
        return ModuleSession(loaded.module, artifact, RunOptions(self.plan.threads))

    def _export(self, loaded: LoadedSource, notes: list[str]) -> Path:
        if isinstance(loaded, LoadedGraph):
            notes.append("not needed: the model comes as a graph")
            return loaded.graph
        exported = self.folder("exported") / "model.onnx"
        # Passes over the graph leave its weights in a second file.
        export(loaded, exported, external_data_bytes=0)
        notes.append(f"opset {OPSET}, IR {IR_VERSION}")
        return exported

    @property
    def _module_variants(self) -> list[Variant]:
        """Return the variants that are made from the PyTorch module."""
        return [v for v in self.candidates.all_variants if dialect_of(v) is Dialect.MODULE or is_qdq(v)]

    def _baseline_variant(self, loaded: LoadedSource) -> Variant:
        return baseline_for(loaded.baseline, self.candidates.device, self.machine)

    def _save_baseline(self, loaded: LoadedSource) -> Artifact | None:
        """Save the module for the benchmark and free its weights; None if variants are made from it."""
        if isinstance(loaded, LoadedGraph) or self._module_variants:
            return None
        variant = self._baseline_variant(loaded)
        artifact = BACKENDS.get(variant.backend).make(loaded.source, variant, self.folder(variant.name))
        loaded.module.to("meta")
        return artifact

    def _check_finite(self, graph: Path, loaded: LoadedSource, expected: Expectation) -> None:
        """Reject a model whose own outputs are not finite: no variant could be compared with it."""
        if is_finite(expected.outputs):
            return
        operator = self._find_non_finite(graph, loaded, expected.encoded.batch)
        where = f": first at {operator}" if operator is not None else ""
        raise AccuracyError(f"{loaded.baseline} itself has outputs that are not finite{where}")

    def _check_graph(
        self, graph: Path, loaded: LoadedSource, checks: GraphChecks, *, is_brief: bool = False
    ) -> list[str]:
        with self._open_graph(graph, loaded) as session:
            return check_graph(
                session,
                checks,
                is_exact=loaded.precision is Precision.FP32,
                is_brief=is_brief,
                find_non_finite=partial(self._find_non_finite, graph, loaded),
            )

    def _search(self, builder: VariantBuilder) -> Search:
        stored = _FINALISTS if self.plan.keep is Keep.BEST else None
        search = Search(builder, self.plan.search_budget_s, self.progress, stored)
        variants = list(self.candidates.variants)
        if self.candidates.is_explicit:
            search.try_explicit(variants)
            return search
        if isinstance(builder.loaded, LoadedGraph):
            variants.insert(0, builder.loaded.baseline)  # the graph as it came may already be the fastest
        # A model that comes quantized is not quantized again.
        is_float = builder.loaded.precision is Precision.FP32
        search.try_automatic(variants, self.candidates.further if is_float else [])
        return search

    @property
    def _names(self) -> dict[Dialect, list[str]]:
        """Return the names of the variants that are made from the model's graph in each dialect."""
        variants = [variant for variant in self.candidates.all_variants if not is_qdq(variant)]
        graph_dialects = [dialect for dialect in Dialect if dialect is not Dialect.MODULE]
        return {dialect: [v.name for v in variants if dialect_of(v) is dialect] for dialect in graph_dialects}

    def _find_non_finite(self, graph: Path, loaded: LoadedSource, rows: Batch) -> str | None:
        return find_non_finite(_graph_artifact(graph, loaded), rows, RunOptions(self.plan.threads))

    def _open_graph(self, graph: Path, loaded: LoadedSource) -> Session:
        return BACKENDS.get(GRAPH).open(_graph_artifact(graph, loaded), RunOptions(self.plan.threads))


def _graph_artifact(graph: Path, loaded: LoadedSource) -> Artifact:
    return Artifact(Variant(GRAPH, loaded.precision), loaded.signature, graph.parent, {MODEL: graph.name})


def load_encoder(files: ModelDirectory, plan: Plan, folder: Path) -> LoadedSource:
    """Load a model from its weights or from its graph, which is written to `folder` completed for its task."""
    if files.graph is not None:
        return load_graph(files, plan, folder / "model.onnx")
    return load_model(files, plan)


def _source_notes(files: ModelDirectory, loaded: LoadedSource) -> Sequence[str]:
    if isinstance(loaded, LoadedGraph):
        return loaded.notes
    if files.base is not None:
        return [f"merged into {files.base.id}"]
    unused = files.unused_graphs
    return [f"built from its weights, not from {unused[0]} (--file-name selects a graph)"] if unused else []


def _reference_rows(expected: Expectation) -> int:
    """Return how many reference rows a bundle stores; token vectors and scores of a vocabulary are large."""
    outputs = expected.outputs.values()
    size = sum(output.nbytes for output in outputs)
    # Zeros compress by more than a bundle may expand.
    is_sparse = 2 * sum(np.count_nonzero(output) for output in outputs) < sum(output.size for output in outputs)
    max_bytes = EXPANSION_MARGIN_BYTES if is_sparse else _MAX_REFERENCE_BYTES
    return min(_MAX_REFERENCE_ROWS, max(16, expected.encoded.items * max_bytes // max(1, size)))
