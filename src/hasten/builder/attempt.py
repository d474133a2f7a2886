"""One variant at a time: made from the graph it needs, opened, and held against the original."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from hasten.backends import BACKENDS, MODEL, Artifact, Dialect, Quantizes, RunOptions, Session, Source, dialect_of
from hasten.builder.choose import check_not_again
from hasten.builder.given import LoadedGraph
from hasten.builder.load import LoadedModel
from hasten.builder.passes import apply_passes, apply_plain, record
from hasten.builder.search import Trial
from hasten.bundle import VariantEntry
from hasten.core.errors import PlanError, StageError, translate_os_errors
from hasten.core.hardware import this_machine
from hasten.core.plan import Plan
from hasten.core.progress import Progress, Silent
from hasten.core.report import Pass
from hasten.core.targets import Target, needed, target_of
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.graph import is_large
from hasten.measure.fault import with_fault
from hasten.measure.verify import Expectation, expect, verify
from hasten.predictor import Predictor
from hasten.quantize.calibration import Calibration
from hasten.quantize.gelu import approximate_gelu
from hasten.quantize.half import halve
from hasten.quantize.make import make_graph
from hasten.quantize.overflow import describe, overflows
from hasten.quantize.recipe import FILE, Method, Recipe
from hasten.quantize.recipes import Recipes
from hasten.quantize.ways import (
    OF_QUANTIZERS,
    Way,
    is_by_itself,
    is_of_quantizers,
    is_quantized,
    kept_products,
    without_kept,
)
from hasten.tasks import TASKS, Row

Original: TypeAlias = LoadedModel | LoadedGraph

# Enough to tell which product costs most, few enough to be asked once for each.
_SENSITIVITY_ROWS = 32


@dataclass
class Attempts:
    plan: Plan
    loaded: Original
    tokenizer: Tokenizer
    graphs: Mapping[Dialect, Path]
    expected: Expectation
    calibration_rows: Sequence[Row]
    target: Target
    work: Path
    progress: Progress
    given: Recipe | None = None
    # The original as a module with quantizers in it.
    quantized: Any = None
    passes: list[Pass] = field(default_factory=list)
    recipes: dict[Variant, Recipe] = field(default_factory=dict)
    _sensitive: dict[Variant, Sequence[str]] = field(default_factory=dict)

    def __call__(self, variant: Variant) -> Trial:
        try:
            # A disk that is full for one may have room for a smaller one.
            with translate_os_errors(f"making {variant} in {self.work}", self.work):
                return self._try(variant)
        except BaseException:
            for folder in self._folders(variant):
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _try(self, variant: Variant) -> Trial:
        artifact = self.make(variant)
        with self._open(artifact) as session:
            if session.spec.precision != variant.precision:
                raise StageError(f"{variant} really computes in {session.spec.precision} here")
            predictor = Predictor(self.loaded.task, self.tokenizer, session)
            sizes = self.plan.shapes.batches if self.depends_on_batch(variant) else ()
            verdict = verify(predictor, variant.name, self.expected, self.plan.gate, self.progress, batch_sizes=sizes)
        verdict = with_fault(verdict, artifact, self.expected.encoded.batch, self._options)
        if not verdict.passed:
            self.discard(artifact)
        return Trial(artifact, verdict)

    def discard(self, artifact: Artifact) -> None:
        """Only what was made here: its directory is one of ours."""
        shutil.rmtree(artifact.directory)

    def make(self, variant: Variant) -> Artifact:
        folder, of_graph = self._folders(variant)
        folder.mkdir()
        artifact = BACKENDS.get(variant.backend).make(self._source(variant), variant, folder)
        if variant in self.recipes:
            self.recipes[variant].write(folder / FILE)
        # Copied by now, and a search makes many.
        shutil.rmtree(of_graph, ignore_errors=True)
        return artifact

    def depends_on_batch(self, variant: Variant) -> bool:
        """Scales taken from all rows of a batch make the answer to one depend on the others."""
        return variant in self.recipes and self.recipes[variant].method is Method.DYNAMIC

    def entry(self, trial: Trial) -> VariantEntry:
        """What a bundle says about a variant."""
        variant, verdict = trial.artifact.variant, trial.verdict
        return VariantEntry(
            name=variant.name,
            backend=variant.backend,
            precision=variant.precision,
            device=variant.device,
            requires=BACKENDS.get(variant.backend).requires,
            graphs=dict(trial.artifact.graphs),
            agreement=verdict.agreement,
            metric=verdict.metric,
            depends_on_batch=bool(verdict.by_batch),
            instructions=self._instructions(variant),
        )

    @property
    def notes(self) -> list[str]:
        """What a person should know about what was made."""
        return [note for done in self.passes if done.name == "guard" for note in done.notes]

    def _instructions(self, variant: Variant) -> tuple[str, ...]:
        """What a variant needs of the processor beside what its backend asks for: int8 that we made for a target."""
        if variant == OF_QUANTIZERS:
            # In eight bits whatever the target is: judged where sums saturate, it runs anywhere, and else not there.
            return needed(target_of(this_machine()))
        recipe = self.recipes.get(variant)
        # Products in blocks need none: ONNX Runtime's kernels add pairs in 16 bits only where they fit (four bits, or
        # every other byte of eight), and where a processor has none of them it widens the weights to fp32.
        is_bytes = recipe is not None and recipe.method is not Method.BLOCKS
        return needed(self.target) if is_bytes else ()

    def most_sensitive(self, variant: Variant, until: float) -> Sequence[str]:
        if not is_by_itself(variant):
            return self._recipes.most_sensitive(variant, until)
        if variant not in self._sensitive:
            backend = BACKENDS.get(variant.backend)
            assert isinstance(backend, Quantizes)
            self._sensitive[variant] = backend.most_sensitive(self._of_module(variant), variant)
        return self._sensitive[variant]

    def _of_module(self, variant: Variant) -> Source:
        """The module, with what a backend needs that quantizes it by itself."""
        source = self.loaded.source
        if is_of_quantizers(variant):
            from hasten.builder.quantized import as_given

            assert isinstance(self.loaded, LoadedModel)
            return replace(source, module=as_given(self.loaded, self.quantized))
        if not is_by_itself(variant):
            return source
        source = replace(source, calibration=self._calibration.rows)
        if not (count := kept_products(variant)):
            return source
        found = self.most_sensitive(without_kept(variant), math.inf)
        if count >= len(found):
            raise PlanError(f"{variant} would leave nothing to quantize: there are {len(found)} products")
        return replace(source, keep=tuple(found[:count]))

    def _source(self, variant: Variant) -> Source:
        """The model in the form this variant is made from: its dialect and, where graphs carry it, its precision."""
        dialect = dialect_of(variant)
        if dialect is Dialect.MODULE:
            return self._of_module(variant)
        if variant == self.loaded.baseline:
            return self.loaded.source
        workspace = self.plan.workspace_mib
        source = Source(
            self.loaded.signature,
            {MODEL: self._of_quantizers(variant) if is_of_quantizers(variant) else self._of_graph(variant)},
            shapes=self.plan.shapes,
            workspace_bytes=workspace * 2**20 if workspace is not None else None,
        )
        # Beside its products in eight bits, TensorRT computes in fp16.
        has_halves = variant.backend == "tensorrt" and variant.precision in (Precision.INT8, Precision.FP8)
        if variant.precision is not Precision.FP16 and not has_halves:
            return source
        guarded = self._guarded(variant, source)
        # OpenVINO and TensorRT make their own.
        is_ours = dialect is Dialect.ORT_CUDA and self.loaded.precision is Precision.FP32
        return self._halved(variant, guarded) if is_ours else guarded

    def _of_graph(self, variant: Variant) -> Path:
        """The original's graph, as it is or rewritten."""
        dialect = dialect_of(variant)
        graph = self.graphs[dialect]
        check_not_again(variant, self.loaded.precision, self.given)
        if is_quantized(variant) and self.loaded.precision is Precision.FP32:
            recipe = self.recipes[variant] = self._recipes.recipe(variant)
            is_openvino = recipe.method is Method.NNCF
            _, folder = self._folders(variant)
            folder.mkdir()
            quantized = folder / ("model.xml" if is_openvino else graph.name)
            rows = self._calibration if is_openvino else None
            make_graph(graph, quantized, recipe, rows, external_data=is_large(graph))
            if not is_openvino:
                self.passes.append(record("quantize", graph, quantized, variants=[variant.name]))
            graph = quantized
        elif dialect is Dialect.ORT and Way.GELU in variant.ways:
            graph = self._approximated(variant, graph)
        return graph

    def _of_quantizers(self, variant: Variant) -> Path:
        """The module with quantizers, exported and taken through the passes that the original went through."""
        from hasten.builder.quantized import HALF_SCALES, as_given, calibrated, export_quantized

        assert isinstance(self.loaded, LoadedModel)
        _, folder = self._folders(variant)
        folder.mkdir()
        exported, made = folder / "model.onnx", [variant.name]
        if self.quantized is not None:
            module, note = as_given(self.loaded, self.quantized), "with the module's quantizers"
        else:
            rows = self._calibration
            module, note = calibrated(self.loaded, rows), f"with quantizers, calibrated on {len(rows.rows)} rows"
        if dialect_of(variant) is Dialect.ONNX:
            export_quantized(self.loaded, module, exported, HALF_SCALES)
            _, graph, passes = apply_plain(exported, folder, external_data=is_large(exported), made=made)
        else:
            export_quantized(self.loaded, module, exported)
            graphs = apply_passes(
                exported,
                folder,
                self.loaded.config,
                external_data=is_large(exported),
                pads_left=self.loaded.signature.pads_left,
                made={Dialect.ORT: made},
            )
            graph, passes = graphs.fused, [done for done in graphs.passes if done.variants]
        self.passes += [record("export", None, exported, variants=made, notes=[note]), *passes]
        return graph

    def _approximated(self, variant: Variant, graph: Path) -> Path:
        """In fp32, with GELU by its cheaper formula: held to the same bound as any fp32."""
        import onnx

        _, folder = self._folders(variant)
        folder.mkdir()
        model, file = onnx.load(graph), folder / graph.name
        count = approximate_gelu(model)
        onnx.save_model(model, file, save_as_external_data=is_large(graph), location=f"{file.name}.data")
        self.passes.append(record("gelu", graph, file, variants=[variant.name], notes=[f"{count} GELUs approximated"]))
        return file

    def _guarded(self, variant: Variant, source: Source) -> Source:
        """What leaves the range of fp16 on the rows is to stay in fp32."""
        graph = source.graphs[MODEL]
        found = overflows(graph, Calibration(self.expected.encoded.batch, source.signature))
        if found:
            self.passes.append(record("guard", graph, graph, variants=[variant.name], notes=[describe(found)]))
        return replace(source, beyond_fp16=frozenset(one.tensor for one in found))

    def _halved(self, variant: Variant, source: Source) -> Source:
        graph = source.graphs[MODEL]
        _, folder = self._folders(variant)
        folder.mkdir()
        halved = folder / graph.name
        halve(graph, halved, source.beyond_fp16, external_data=is_large(graph))
        self.passes.append(record("halve", graph, halved, variants=[variant.name]))
        return replace(source, graphs={MODEL: halved})

    def _folders(self, variant: Variant) -> tuple[Path, Path]:
        """Where a variant lies, and the graph it is made from where that is made for it alone."""
        return self.work / variant.name, self.work / f"{variant.name}-graph"

    @cached_property
    def _recipes(self) -> Recipes:
        return Recipes(self.graphs, lambda: self._calibration, self.target, self._error_of, self.progress, self.given)

    @cached_property
    def _calibration(self) -> Calibration:
        task, spec = TASKS.get(self.loaded.task.name), self.loaded.task
        if not self.calibration_rows:
            raise StageError("there are no rows to calibrate on")
        items = task.parse(list(self.calibration_rows))
        return Calibration(task.encode(items, self.tokenizer, task.options(spec, {})).batch, self.loaded.signature)

    @cached_property
    def _few_answers(self) -> Expectation:
        """What the graph in fp32 answers to a few of the calibration rows."""
        with self._open(self._as_artifact(self.graphs[Dialect.ORT], Precision.FP32)) as session:
            predictor = Predictor(self.loaded.task, self.tokenizer, session)
            return expect(predictor, self.calibration_rows[:_SENSITIVITY_ROWS], Silent())

    def _error_of(self, graph: Path) -> float:
        """How far a quantized graph's answers to them are away, relative to their size."""
        expected = self._few_answers
        with self._open(self._as_artifact(graph, Precision.INT8)) as session:
            predictor = Predictor(self.loaded.task, self.tokenizer, session)
            outputs = predictor.outputs(expected.encoded)
            return predictor.task.agree(outputs, expected.outputs, expected.encoded, predictor.spec).relative_error

    def _as_artifact(self, graph: Path, precision: Precision) -> Artifact:
        return Artifact(Variant("onnxruntime", precision), self.loaded.signature, graph.parent, {MODEL: graph.name})

    def _open(self, artifact: Artifact) -> Session:
        return BACKENDS.get(artifact.variant.backend).open(artifact, self._options)

    @property
    def _options(self) -> RunOptions:
        return RunOptions(self.plan.threads)
