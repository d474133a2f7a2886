"""Make one variant at a time from the graph it needs, and judge it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from hasten.backends import (
    BACKENDS,
    MODEL,
    Artifact,
    Dialect,
    RunOptions,
    Source,
    SupportsQuantization,
    dialect_of,
)
from hasten.builder.passes.pipeline import apply_passes, apply_plain, record_pass
from hasten.builder.search.candidates import check_not_quantized_twice
from hasten.builder.search.screener import Screener
from hasten.builder.search.search import FloatCounts, ScreenedVariant, SearchTrial
from hasten.builder.search.select import variant_entry
from hasten.builder.sources.onnx_model import LoadedGraph
from hasten.builder.sources.pytorch_model import LoadedModel
from hasten.bundle import VariantEntry
from hasten.core.errors import PlanError, StageError, translate_os_errors
from hasten.core.plan import Plan
from hasten.core.progress import Progress, SilentProgress
from hasten.core.report import Pass, Verdict
from hasten.core.system.cpu_targets import CpuTarget, required_features, target_of
from hasten.core.system.hardware import this_machine
from hasten.core.system.memory_limit import free_memory
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import Precision, Variant
from hasten.measure.encoder_gate import Expectation, expect, verify
from hasten.measure.non_finite import with_non_finite_hint
from hasten.onnx_graph import graph_bytes, is_large
from hasten.predictor import Predictor
from hasten.quantize.analysis.calibration import Calibration
from hasten.quantize.analysis.overflow import describe_overflows, find_overflows
from hasten.quantize.apply import make_graph
from hasten.quantize.methods.fp16 import convert_to_fp16
from hasten.quantize.modifiers import (
    ORT_QDQ,
    Modifier,
    backend_quantizes_module,
    is_qdq,
    is_quantized,
    is_quantized_engine,
    kept_matmuls,
    without_kept,
)
from hasten.quantize.recipe import FILE, Method, Recipe
from hasten.quantize.recipe_builder import RecipeBuilder
from hasten.quantize.rewrites.gelu import approximate_gelu
from hasten.quantize.sensitivity import SensitivityReference
from hasten.tasks import TASKS, Row

LoadedSource: TypeAlias = LoadedModel | LoadedGraph

# Enough to tell which matmul costs most accuracy, and few enough to run the model once per matmul: fewer for graphs
# larger than this.
_MAX_SENSITIVITY_ROWS, _MIN_SENSITIVITY_ROWS, _SENSITIVITY_BYTES = 32, 8, 2**27


@dataclass
class VariantBuilder:
    """Makes variants of a loaded model, screens and judges them."""

    plan: Plan
    loaded: LoadedSource
    tokenizer: Tokenizer
    graphs: Mapping[Dialect, Path]
    expected: Expectation
    evaluation_rows: Sequence[Row]
    calibration_rows: Sequence[Row]
    target: CpuTarget
    work: Path
    progress: Progress
    # A recipe to repeat instead of searching for one.
    recipe: Recipe | None = None
    # The user's module with quantizers in it.
    qdq_module: Any = None
    passes: list[Pass] = field(default_factory=list)
    recipes: dict[Variant, Recipe] = field(default_factory=dict)
    _sensitive: dict[Variant, Sequence[str]] = field(default_factory=dict)

    def screen(self, variant: Variant) -> ScreenedVariant:
        """Make a variant, time it briefly at the optimal shape, and reject it if a few rows show that it is wrong."""
        with self._cleaning_up(variant):
            artifact = self.make(variant)
            with self._open_checked(artifact) as predictor:
                relative_time = self._screener.relative_time(predictor.session, artifact)
                rejection, seconds_per_row = self._screener.reject(predictor, variant.name)
            if rejection is not None:
                rejection = self._with_hint(rejection, artifact)
                self.discard(artifact)
        return ScreenedVariant(artifact, relative_time, rejection, seconds_per_row * len(self.evaluation_rows))

    def judge(self, artifact: Artifact) -> Verdict:
        """Return the verdict of the accuracy gate on a variant that was made; a rejected one is discarded."""
        variant = artifact.variant
        with self._cleaning_up(variant):
            with self._open_checked(artifact) as predictor:
                verdict = verify(
                    predictor,
                    variant.name,
                    self.expected,
                    self.plan.gate,
                    self.progress,
                    batch_sizes=self.judged_batches(variant),
                    stops_early=True,
                    sample=self._screener.sample(predictor),
                )
            verdict = self._with_hint(verdict, artifact)
            if not verdict.passed:
                self.discard(artifact)
        return verdict

    def judged_batches(self, variant: Variant) -> tuple[int, ...]:
        """Return the batch sizes that a variant is judged at; none if its answers do not depend on the batch."""
        recipe = self.recipes.get(variant)
        # The scales of dynamic int8 depend on the other rows of the batch.
        return self.plan.shapes.batches if recipe is not None and recipe.method is Method.DYNAMIC else ()

    @contextmanager
    def _cleaning_up(self, variant: Variant) -> Iterator[None]:
        """Remove the files of a variant if the body fails."""
        try:
            # A disk that is full for this variant may have room for a smaller one.
            with translate_os_errors(f"making {variant} in {self.work}", self.work):
                yield
        except BaseException:
            for folder in (self.work / variant.name, self._graph_folder(variant)):
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _open_checked(self, artifact: Artifact) -> Predictor:
        predictor = self._open(artifact)
        precision = predictor.session.spec.precision
        if precision != artifact.variant.precision:
            predictor.close()
            raise StageError(f"{artifact.variant} computes in {precision} on this machine")
        return predictor

    def _with_hint(self, verdict: Verdict, artifact: Artifact) -> Verdict:
        batch = self.expected.encoded.batch
        return with_non_finite_hint(verdict, artifact, batch, RunOptions(self.plan.threads))

    @cached_property
    def _screener(self) -> Screener:
        return Screener(self.plan, self.loaded.signature, self.evaluation_rows, self.expected)

    def close(self) -> None:
        """Free the memory that is needed only while variants are screened."""
        self._screener.close()
        vars(self).pop("_recipes", None)

    def discard(self, artifact: Artifact) -> None:
        """Remove the files of a variant that was made here."""
        self._screener.hold(artifact)
        shutil.rmtree(artifact.directory)

    def make(self, variant: Variant) -> Artifact:
        """Make the files of a variant."""
        folder = self.work / variant.name
        folder.mkdir()
        artifact = BACKENDS.get(variant.backend).make(self._source(variant), variant, folder)
        if variant in self.recipes:
            self.recipes[variant].write(folder / FILE)
        # The backend has copied it, and a search makes many.
        shutil.rmtree(self._graph_folder(variant), ignore_errors=True)
        return artifact

    def entry(self, trial: SearchTrial) -> VariantEntry:
        """Return the manifest's entry for a variant."""
        return replace(variant_entry(trial), instructions=self._instructions(trial.artifact.variant))

    @property
    def notes(self) -> list[str]:
        """Return what the user should know about the variants that were made."""
        return [note for step in self.passes if step.name == "guard" for note in step.notes]

    def _instructions(self, variant: Variant) -> tuple[str, ...]:
        """Return the CPU features that a variant needs in addition to its backend's: int8 is made for a target."""
        if variant == ORT_QDQ:
            # Full 8-bit weights for any target. If it was verified on a CPU whose int8 sums saturate, it runs on every
            # CPU; otherwise it must not run on a CPU where they do.
            return required_features(target_of(this_machine()))
        recipe = self.recipes.get(variant)
        # Block-wise quantized matmuls need none: ONNX Runtime's kernels add pairs in 16 bits only where they fit (4-bit
        # values, or every other byte of 8-bit ones), and on a CPU without such kernels it widens the weights to fp32.
        is_int8_gemm = recipe is not None and recipe.method is not Method.BLOCKS
        return required_features(self.target) if is_int8_gemm else ()

    def float_counts(self, variant: Variant, deadline: float, measured: Mapping[int, float]) -> FloatCounts:
        """Return how many matmuls of a variant can stay in float, and how many probably have to for it to pass.

        `measured` is the agreement on all rows, by the number of matmuls in float, where it is known.
        """
        if backend_quantizes_module(variant):
            return FloatCounts(len(self._most_sensitive_in_module(variant)) - 1)
        sensitivity, gate = self._recipes.sensitivity(variant, deadline), self.plan.gate
        count = FloatCounts(len(sensitivity.errors) - 1)
        # The drop of a metric cannot be predicted from a few rows without labels.
        if gate.max_drop is not None or count.max < 1:
            return count
        min_agreement = gate.min_agreement
        if min_agreement is None:
            min_agreement = TASKS.get(self.loaded.task.name).min_agreement
        # All rows agree less than the few that the prediction is made from.
        gaps = [sensitivity.agreement_with_float(kept) - agreement for kept, agreement in measured.items()]
        return replace(count, predicted=sensitivity.smallest_float_count(min_agreement + max(gaps, default=0.0)))

    def _most_sensitive_in_module(self, variant: Variant) -> Sequence[str]:
        """Return the matmuls of a module, the one that costs most accuracy first."""
        if variant not in self._sensitive:
            backend = BACKENDS.get(variant.backend)
            assert isinstance(backend, SupportsQuantization)
            self._sensitive[variant] = backend.most_sensitive(self._module_source(variant), variant)
        return self._sensitive[variant]

    def _module_source(self, variant: Variant) -> Source:
        """Return the module, with calibration rows for a backend that quantizes modules itself."""
        source = self.loaded.source
        if is_qdq(variant):
            from hasten.builder.search.qdq_module import in_float

            assert isinstance(self.loaded, LoadedModel)
            return replace(source, module=in_float(self.loaded, self.qdq_module))
        if not backend_quantizes_module(variant):
            return source
        source = replace(source, calibration=self._calibration.rows)
        if not (count := kept_matmuls(variant)):
            return source
        matmuls = self._most_sensitive_in_module(without_kept(variant))
        if count >= len(matmuls):
            raise PlanError(f"{variant} would leave nothing to quantize: there are {len(matmuls)} matmuls")
        return replace(source, keep=tuple(matmuls[:count]))

    def _source(self, variant: Variant) -> Source:
        """Return the model in the variant's dialect and, if graphs carry the precision, in its precision."""
        dialect = dialect_of(variant)
        if dialect is Dialect.MODULE:
            return self._module_source(variant)
        if variant == self.loaded.baseline:
            return self.loaded.source
        workspace = self.plan.workspace_mib
        source = Source(
            self.loaded.signature,
            {MODEL: self._qdq_graph(variant) if is_qdq(variant) else self._graph(variant)},
            shapes=self.plan.shapes,
            workspace_bytes=workspace * 2**20 if workspace is not None else None,
        )
        if variant.precision is not Precision.FP16 and not is_quantized_engine(variant):
            return source
        guarded = self._guarded(variant, source)
        # OpenVINO and TensorRT convert to fp16 themselves.
        is_converted = dialect is Dialect.ORT_CUDA and self.loaded.precision is Precision.FP32
        return self._converted_to_fp16(variant, guarded) if is_converted else guarded

    def _graph(self, variant: Variant) -> Path:
        """Return the model's graph in the variant's dialect, quantized or with approximated GELUs if needed."""
        dialect = dialect_of(variant)
        graph = self.graphs[dialect]
        check_not_quantized_twice(variant, self.loaded.precision, self.recipe)
        if is_quantized(variant) and self.loaded.precision is Precision.FP32:
            recipe = self.recipes[variant] = self._recipes.recipe(variant)
            is_openvino = recipe.method in (Method.NNCF, Method.WEIGHTS)
            quantized = self._new_graph_folder(variant) / ("model.xml" if is_openvino else graph.name)
            rows = self._calibration if recipe.method is Method.NNCF else None
            make_graph(graph, quantized, recipe, rows, external_data=is_large(graph))
            free_memory()  # quantizers leave several copies of the weights to the garbage collector
            if not is_openvino:
                self._record("quantize", variant, graph, quantized)
            graph = quantized
        elif dialect is Dialect.ORT and Modifier.TANH_GELU in variant.modifiers:
            graph = self._with_approximate_gelu(variant, graph)
        return graph

    def _qdq_graph(self, variant: Variant) -> Path:
        """Export the module with quantizers and apply the same passes as to the float graph."""
        from hasten.builder.search.qdq_module import FP16_SCALES, calibrate_module, export_quantized, in_float

        assert isinstance(self.loaded, LoadedModel)
        folder, names = self._new_graph_folder(variant), [variant.name]
        exported = folder / "model.onnx"
        if self.qdq_module is not None:
            module, note = in_float(self.loaded, self.qdq_module), "with the module's quantizers"
        else:
            rows = self._calibration
            module, note = calibrate_module(self.loaded, rows), f"with quantizers, calibrated on {len(rows.rows)} rows"
        if dialect_of(variant) is Dialect.ONNX:
            export_quantized(self.loaded, module, exported, FP16_SCALES)
            _, graph, passes = apply_plain(exported, folder, variants=names)
        else:
            export_quantized(self.loaded, module, exported)
            pads_left, variants = self.loaded.signature.pads_left, {Dialect.ORT: names}
            graphs = apply_passes(exported, folder, self.loaded.config, pads_left=pads_left, variants=variants)
            graph, passes = graphs.fused, [step for step in graphs.passes if step.variants]
        self.passes += [record_pass("export", None, exported, variants=names, notes=[note]), *passes]
        return graph

    def _with_approximate_gelu(self, variant: Variant, graph: Path) -> Path:
        """Return the fp32 graph with GELU by its cheaper formula; the tolerance of fp32 applies to it."""
        import onnx

        model, file = onnx.load(graph), self._new_graph_folder(variant) / graph.name
        count = approximate_gelu(model)
        onnx.save_model(model, file, save_as_external_data=is_large(graph), location=f"{file.name}.data")
        self._record("gelu", variant, graph, file, f"{count} GELUs approximated")
        return file

    def _guarded(self, variant: Variant, source: Source) -> Source:
        """Keep in fp32 the tensors whose values leave the range of fp16 on the rows."""
        graph = source.graphs[MODEL]
        overflows = find_overflows(graph, Calibration(self.expected.encoded.batch, source.signature).feeds())
        if overflows:
            self._record("guard", variant, graph, graph, describe_overflows(overflows))
        return replace(source, fp16_overflow_tensors=frozenset(overflow.tensor for overflow in overflows))

    def _converted_to_fp16(self, variant: Variant, source: Source) -> Source:
        folder = self._new_graph_folder(variant)
        converted = convert_to_fp16(source.graphs, folder, {MODEL: source.fp16_overflow_tensors})
        self._record("fp16", variant, source.graphs[MODEL], converted[MODEL])
        return replace(source, graphs=converted)

    def _record(self, name: str, variant: Variant, before: Path, after: Path, *notes: str) -> None:
        self.passes.append(record_pass(name, before, after, variants=[variant.name], notes=notes))

    def _graph_folder(self, variant: Variant) -> Path:
        """Return the folder of a graph that is made for this variant alone."""
        return self.work / f"{variant.name}-graph"

    def _new_graph_folder(self, variant: Variant) -> Path:
        self._graph_folder(variant).mkdir()
        return self._graph_folder(variant)

    @cached_property
    def _recipes(self) -> RecipeBuilder:
        return RecipeBuilder(
            self.graphs,
            lambda: self._calibration,
            self.target,
            lambda: self._sensitivity_reference,
            self.progress,
            self.recipe,
        )

    @cached_property
    def _calibration(self) -> Calibration:
        task, spec = TASKS.get(self.loaded.task.name), self.loaded.task
        if not self.calibration_rows:
            raise StageError("there are no rows to calibrate on")
        items = task.parse(list(self.calibration_rows))
        return Calibration(task.encode(items, self.tokenizer, task.options(spec, {})).batch, self.loaded.signature)

    @cached_property
    def _sensitivity_reference(self) -> SensitivityReference:
        """Return the outputs of the fp32 graph for some of the calibration rows."""
        graph = self.graphs[Dialect.ORT]
        count = _MAX_SENSITIVITY_ROWS * _SENSITIVITY_BYTES // graph_bytes(graph)
        rows = self.calibration_rows[: min(max(count, _MIN_SENSITIVITY_ROWS), _MAX_SENSITIVITY_ROWS)]
        with self._open(self._as_artifact(graph, Precision.FP32)) as predictor:
            expected = expect(predictor, rows, SilentProgress())
        encoded, task = expected.encoded, predictor.task
        return SensitivityReference(
            encoded.batch,
            self.loaded.signature,
            lambda outputs: task.agree(outputs, expected.outputs, encoded, predictor.spec),
        )

    def _as_artifact(self, graph: Path, precision: Precision) -> Artifact:
        return Artifact(Variant("onnxruntime", precision), self.loaded.signature, graph.parent, {MODEL: graph.name})

    def _open(self, artifact: Artifact) -> Predictor:
        session = BACKENDS.get(artifact.variant.backend).open(artifact, RunOptions(self.plan.threads))
        return Predictor(self.loaded.task, self.tokenizer, session)
