"""Build the bundle of a generative model.

model ─load─▶ module ─export─▶ graph with KV cache ─┬────────────────────▶ fp32 ─┐ ──────────▶ for CPUs ─┐
                │                                   └─ block-wise ─▶ int8, int4 ─┴── in fp16 ─▶ for GPUs ─┤
                └─ greedy answers, log-likelihoods ────────────────────────────────────────────────────────┤
                                                              bundle ◀─ benchmark ◀─ verify ◀──────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hasten.backends import BACKENDS, DECODER, Artifact, RunOptions, SupportsDecoding
from hasten.builder.generation.baseline import BASELINE, generation_reference, save_baseline
from hasten.builder.generation.bench import bench_generation
from hasten.builder.generation.candidates import BACKEND, generation_candidates, generation_candidates_for_choice
from hasten.builder.generation.load import LoadedGenerator, load_generator, unsupported_options
from hasten.builder.generation.variants import VariantFactory, graph_notes
from hasten.builder.passes.pipeline import record_pass
from hasten.builder.pipeline import BenchedVariants, BuildPipeline
from hasten.builder.search.candidates import baseline_for
from hasten.builder.search.search import SearchTrial
from hasten.builder.search.select import variant_entry
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.locate import fetch_weights
from hasten.bundle import Bundle, BundleWriter, Manifest
from hasten.core.errors import AccuracyError, HastenError, PlanError, StageError
from hasten.core.plan import Plan, Shapes
from hasten.core.report import Candidate, Status, Verdict
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Batch, IntArray, Shape
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import CUDA, Precision, Variant, VariantChoice
from hasten.measure.bench_worker import MAX_ROWS
from hasten.measure.data import sample_texts
from hasten.measure.evaluation_rows import SAMPLE, naming_source
from hasten.measure.generation_gate import GenerationReference, judge_decoder, perplexity
from hasten.measure.generation_reference import (
    TextColumn,
    as_batch,
    encode_texts,
    stored_reference,
    texts_of,
    to_reference,
)
from hasten.quantize.analysis.overflow import DecoderText

# The gate compares greedy answers to prompts, and the perplexity of texts.
_PROMPTS, _MAX_PROMPT_TOKENS, _ANSWER_TOKENS = 8, 24, 32
_TEXTS, _MAX_TEXT_TOKENS = 16, 64
_SLOTS = 8


class GenerationBuild(BuildPipeline):
    """The build of a decoder, or of an encoder with a decoder."""

    preflight = staticmethod(generation_candidates)
    bench = staticmethod(bench_generation)

    @staticmethod
    def variants_for(choice: VariantChoice, model: ModelDirectory, plan: Plan) -> tuple[str, ...]:
        return generation_candidates_for_choice(choice)

    @staticmethod
    def baseline(files: ModelDirectory, plan: Plan, work: Path, device: str) -> Artifact:
        assert plan.task is not None
        variant = baseline_for(BASELINE, device, this_machine())
        return save_baseline(load_generator(files, plan.task, plan), work / "baseline", variant)

    @staticmethod
    def bench_shapes(bundle: Bundle, shapes: Shapes) -> Shapes:
        if shapes.batch.max > MAX_ROWS:
            raise PlanError(f"--batch-size {shapes.batch.max}: at most {MAX_ROWS} prompts are timed together")
        # The other half of the context is for the generated tokens.
        return Shapes(shapes.batch, shapes.sequence.at_most(max(1, bundle.manifest.signature.max_length // 2)))

    @staticmethod
    def bench_rows(bundle: Bundle) -> Batch:
        return as_batch([answer.prompt for answer in stored_reference(bundle).answers])

    def run(self) -> Bundle:
        """Build the bundle."""
        with self.stage("load") as notes:
            files = fetch_weights(self.resolved.model.files, self.plan)
            loaded = load_generator(files, self.resolved.model.task, self.plan)
            tokenizer = self.save_tokenizer(loaded)
            loaded.module.generation_config.to_json_file(self.work / "configurations" / "generation_config.json")
            notes.append(f"{loaded.architecture} for {loaded.task.name}, a context of {loaded.spec.max_context} tokens")
            notes += [
                f"its generation_config sets {option}, which is not supported and ignored"
                for option in unsupported_options(loaded.module)
            ]
        with self.stage("reference") as notes:
            prompts, texts = self._rows(loaded, tokenizer)
            reference = generation_reference(
                loaded.module, prompts, texts, _ANSWER_TOKENS, loaded.spec.decoder_start_token_ids
            )
            notes.append(f"{len(reference.answers)} answers by transformers' generate")
            if reference.metric is not None:
                notes.append(perplexity(reference.metric))
        with self.stage("export") as notes:
            graphs, exported_verdict = self._export(loaded, reference, notes)
        with self.stage("verify") as notes:
            trials, failed = self._verify(loaded, graphs, reference, exported_verdict)
            eligible = {variant: trial for variant, trial in trials.items() if trial.verdict.passed}
            notes.append(f"{len(eligible)} of {len(self.candidates.variants)} variants pass the accuracy gate")
        if not trials:
            device = self.candidates.device
            raise StageError(
                f"no variant of {self.resolved.model.id} runs on '{device}': {failed[0].reason}",
                hint="--device cpu" if device == CUDA else None,
            )
        rejected = self.reject(trials, failed, hint="--min-agreement sets the gate")
        with self.stage("benchmark") as notes:
            length = max(1, min(self.plan.shapes.sequence.opt, loaded.spec.max_context // 2))
            # A single prompt, and the optimal batch.
            shapes = list(dict.fromkeys((Shape(1, length), Shape(self.plan.shapes.batch.opt, length))))
            variant = baseline_for(BASELINE, self.candidates.device, self.machine)
            baseline = save_baseline(loaded, self.work / "baseline", variant)
            contenders = [baseline, *(trial.artifact for trial in eligible.values())]
            measured = self.bench(
                contenders,
                shapes,
                as_batch(prompts),
                budget_s=self.plan.bench_budget_s,
                threads=self.plan.threads,
                progress=self.progress,
            )
            tokens = shapes[0].sequence
            timings = measured.prefill.timings if measured.prefill is not None else ()
            notes += [f"{timing.variant} prefills {timing.rows_per_s * tokens:.0f} tokens/s" for timing in timings]
            benched = BenchedVariants(eligible, rejected, contenders, measured.bench, shapes[0])

        def add_contents(writer: BundleWriter, stored: Sequence[SearchTrial]) -> Manifest:
            writer.add_reference(*to_reference(reference))
            # No portable graph: the exported one needs ONNX Runtime's own operators.
            return replace(self.manifest(loaded, list(map(variant_entry, stored))), generation=loaded.spec)

        return self.write(benched, add_contents)

    def _rows(self, loaded: LoadedGenerator, tokenizer: Tokenizer) -> tuple[list[IntArray], list[IntArray]]:
        """Return prompts to answer, which are whole texts for an encoder, and texts for the perplexity."""
        data = self.resolved.data.evaluation
        rows = data.rows if data is not None else ()
        with naming_source(self.plan.data or SAMPLE, TextColumn(loaded.task.name), rows):
            encoded, _ = encode_texts(texts_of(rows) if data is not None else sample_texts(), tokenizer)
        # Evenly spaced, because neighbouring rows of a file are often alike.
        texts = encoded[:: max(1, len(encoded) // _TEXTS)][:_TEXTS]
        prompts = texts[:_PROMPTS]
        max_context = loaded.spec.max_context
        if not loaded.has_encoder:
            prompt_tokens = max(1, min(_MAX_PROMPT_TOKENS, max_context - _ANSWER_TOKENS))
            prompts = [text[:prompt_tokens] for text in prompts]
        return prompts, [text[: min(max_context - 1, _MAX_TEXT_TOKENS)] for text in texts]

    def _export(
        self, loaded: LoadedGenerator, reference: GenerationReference, notes: list[str]
    ) -> tuple[dict[str, Path], Verdict]:
        """Export with rotary embeddings inside the attention operator, or outside it if that changes the answers."""
        from hasten.builder.export.decoder import export_decoder, rotary_tables

        tables = None if loaded.has_encoder else rotary_tables(loaded.module, loaded.spec.max_context)
        for fused_tables in dict.fromkeys((tables, None)):
            folder = self.folder(f"exported-{'rotary' if fused_tables is not None else 'plain'}")
            graphs = {DECODER: folder / f"{DECODER}.onnx"}
            if loaded.has_encoder:
                from hasten.builder.export.encoder_decoder import export_encoder_decoder

                limits = (loaded.tokenizer.max_length, loaded.spec.max_context)
                graphs = export_encoder_decoder(loaded.module, folder, loaded.spec.decoder_start_token_ids, limits)
            else:
                export_decoder(loaded.module, graphs[DECODER], fused_tables)
            names = {name: file.name for name, file in graphs.items()}
            artifact = Artifact(Variant(BACKEND, Precision.FP32), loaded.signature, folder, names)
            verdict = self._judge(artifact, reference)
            if verdict.passed:
                variants = [variant.name for variant in self.candidates.variants]
                self.passes += [
                    record_pass("export", None, file, variants=variants, notes=graph_notes(name, graphs))
                    for name, file in graphs.items()
                ]
                rotary = ", rotary embeddings inside it" if fused_tables is not None else ""
                notes.append(f"attention with a KV cache{rotary}")
                return graphs, verdict
        raise AccuracyError(
            f"the exported graph of {loaded.architecture} does not generate the same tokens: {verdict.reason}"
        )

    def _verify(
        self,
        loaded: LoadedGenerator,
        graphs: dict[str, Path],
        reference: GenerationReference,
        exported_verdict: Verdict,
    ) -> tuple[dict[Variant, SearchTrial], list[Candidate]]:
        """Make each variant and compare it with the reference; return also those that cannot be made."""
        trials: dict[Variant, SearchTrial] = {}
        failed: list[Candidate] = []
        texts = _decoder_texts(loaded, reference)
        factory = VariantFactory(graphs, loaded.signature, texts, self.work, self.passes)
        for variant in self.candidates.variants:
            try:
                artifact = factory.make(variant)
                is_exported = variant.precision is Precision.FP32
                verdict = exported_verdict if is_exported else self._judge(artifact, reference)
            except HastenError as error:
                if self.candidates.is_explicit:
                    raise
                failed.append(Candidate(variant.name, Status.FAILED, error.message))
            else:
                trials[variant] = SearchTrial(artifact, verdict)
        return trials, failed

    def _judge(self, artifact: Artifact, reference: GenerationReference) -> Verdict:
        backend, variant = BACKENDS.get(artifact.variant.backend), artifact.variant
        assert isinstance(backend, SupportsDecoding)
        decoder = backend.open_decoder(artifact, RunOptions(self.plan.threads), _SLOTS)
        try:
            return judge_decoder(decoder, variant.name, variant.precision, reference, self.plan.gate, self.progress)
        finally:
            decoder.close()


def _decoder_texts(loaded: LoadedGenerator, reference: GenerationReference) -> list[DecoderText]:
    """Return the token sequences that the decoder sees along the reference answers."""
    starts = np.array(loaded.spec.decoder_start_token_ids, np.int32)
    return [
        DecoderText(np.concatenate([starts, answer.tokens]), answer.prompt)
        if loaded.has_encoder
        else DecoderText(np.concatenate([answer.prompt, answer.tokens])[: loaded.spec.max_context])
        for answer in reference.answers
    ]
