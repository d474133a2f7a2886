"""The whole way of a model that writes: in with its weights, out as a bundle that writes the same.

model ─load─▶ module ─export─▶ graph with a cache ─┬─────────────▶ fp32 ─┐ ─────────▶ for processors ─┐
                │                                  └─ blocks ─▶ int8, int4 ─┴─ in halves ─▶ for GPUs ──┤
                └─ its own answers, its likelihoods ───────────────────────────────────────────────────┤
                                                             bundle ◀─ bench ◀─ verify ◀────────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from hasten.backends import BACKENDS, DECODER, Artifact, Decodes, RunOptions
from hasten.builder.check import check_tokenizer
from hasten.builder.choose import compared_with, explain, front, rank
from hasten.builder.load import save_configurations
from hasten.builder.original import ORIGINAL, sample_of, save_original
from hasten.builder.paces import time_writing
from hasten.builder.passes import record
from hasten.builder.source import ModelDirectory, find_model
from hasten.builder.stages import Staged
from hasten.builder.tokenizer import save_tokenizer
from hasten.builder.written import Writer, load_writer, unknown_options
from hasten.builder.written_variants import Kit, which
from hasten.bundle import Bundle, BundleWriter, Manifest, VariantEntry
from hasten.bundle.manifest import SCHEMA, ModelOrigin
from hasten.core.errors import AccuracyError, HastenError, StageError
from hasten.core.plan import Keep
from hasten.core.report import Candidate, Report, Status, Verdict
from hasten.core.tensors import IntArray, Shape, Signature
from hasten.core.tokenizer import Tokenizer
from hasten.core.variant import CUDA, Precision, Variant
from hasten.core.version import __version__
from hasten.measure.data import sample_texts
from hasten.measure.rows import SAMPLE, naming
from hasten.measure.writing import Sample, judge_decoder, perplexity
from hasten.measure.writing_reference import TextColumn, as_batch, encoded, texts_of, to_reference
from hasten.quantize.written_range import Text
from hasten.tasks import TaskSpec

_WRITER = "onnxruntime"
# What is judged: answers of so many tokens to so many prompts, and texts for the perplexity.
_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS = 8, 24, 32
_TEXTS, _TEXT_TOKENS = 16, 64
_SLOTS = 8


class GenerationBuild(Staged):
    def run(self) -> Bundle:
        with self.stage("load") as notes:
            model = find_model(self.plan, directory=self.directory)
            writer = load_writer(model, self.about.task, self.plan)
            tokenizer_file = self.work / "tokenizer.json"
            save_tokenizer(writer, tokenizer_file)
            configurations = self.work / "configurations"
            configurations.mkdir()
            save_configurations(writer.module.config, writer.original_tokenizer, configurations)
            writer.module.generation_config.to_json_file(configurations / "generation_config.json")
            tokenizer = Tokenizer.open(tokenizer_file, writer.tokenizer)
            check_tokenizer(tokenizer, writer.original_tokenizer)
            notes.append(f"{writer.architecture} for {writer.task}, a context of {writer.spec.context} tokens")
            notes += [
                f"its configuration asks for {option}, which is not done" for option in unknown_options(writer.module)
            ]

        with self.stage("reference") as notes:
            prompts, texts = self._rows(writer, tokenizer)
            sample = sample_of(writer.module, prompts, texts, _ANSWER_TOKENS, writer.spec.start_ids)
            notes.append(f"{len(sample.answers)} answers by transformers' generate")
            if sample.metric is not None:
                notes.append(perplexity(sample.metric))

        with self.stage("export") as notes:
            graphs, exported = self._export(writer, sample, notes)
        signature = writer.signature

        with self.stage("verify") as notes:
            artifacts: dict[Variant, Artifact] = {}
            verdicts: dict[Variant, Verdict] = {}
            refused: list[Candidate] = []
            kit = Kit(graphs, signature, self._texts(writer, sample), self.work, self.passes)
            for variant in map(Variant.parse, self.about.contenders):
                try:
                    artifacts[variant] = kit.make(variant)
                    is_exported = variant.precision is Precision.FP32
                    verdicts[variant] = exported if is_exported else self._judge(artifacts[variant], sample)
                except HastenError as error:
                    # One that fails is recorded if we picked it, an error if the user did.
                    if self.plan.variants or len(self.about.contenders) == 1:
                        raise
                    refused.append(Candidate(variant.name, Status.FAILED, error.message))
            passed = {variant: verdict for variant, verdict in verdicts.items() if verdict.passed}
            notes.append(f"{len(passed)} of {len(self.about.contenders)} variants write like the original")
        refused += [
            Candidate(variant.name, Status.INACCURATE, verdict.reason, verdict)
            for variant, verdict in verdicts.items()
            if not verdict.passed
        ]
        if not passed:
            if not verdicts:
                told = f"nothing of {model.id} runs on '{self.about.device}': {refused[0].reason}"
                raise StageError(told, hint="--device cpu" if self.about.device == CUDA else None)
            raise AccuracyError(
                f"no variant of {model.id} may be used",
                hint="the gate is set by --min-agreement",
                candidates=tuple(refused),
            )

        with self.stage("benchmark") as notes:
            shapes = self._shapes(writer)
            original = save_original(
                writer, self.work / "original", compared_with(ORIGINAL, self.about.device, self.machine)
            )
            contenders = [original, *(artifacts[variant] for variant in passed)]
            batch = as_batch(prompts)
            paces = time_writing(
                contenders,
                shapes,
                batch,
                budget_s=self.plan.bench_budget_s,
                threads=self.plan.threads,
                progress=self.progress,
            )
            wrote, tokens = paces.writing, shapes[0].sequence
            notes += [
                f"{timing.variant} reads {timing.sentences_per_s * tokens:.0f} tokens/s"
                for timing in paces.reading.timings
            ]
            ranking = rank(wrote, shapes[0], list(passed))

        refused.insert(0, Candidate(original.variant.name, Status.BASELINE, "the original"))
        candidates = (*explain(ranking, wrote, shapes[0], passed), *refused)
        report = Report(
            plan=self.plan,
            created=_now(),
            machine=self.machine,
            stages=tuple(self.stages),
            candidates=candidates,
            bench=wrote,
            chosen=ranking[0].name,
            passes=tuple(self.passes),
            front=front(candidates, wrote, shapes[0]),
            notes=self.about.notes,
        )
        kept = ranking if self.plan.keep is Keep.ALL else ranking[:2]
        with self.stage("write"), BundleWriter(self.about.target, force=self.force) as bundle:
            for variant in kept:
                bundle.add_variant(artifacts[variant])
            bundle.add_tokenizer(tokenizer_file)
            bundle.add_configurations(configurations)
            bundle.add_reference(*to_reference(sample))
            bundle.add_report(report)
            entries = [_entry(artifacts[variant], passed[variant]) for variant in kept]
            return bundle.commit(self._manifest(model, writer, signature, entries))

    def _rows(self, writer: Writer, tokenizer: Tokenizer) -> tuple[list[IntArray], list[IntArray]]:
        """Beginnings to go on from, or whole texts for an encoder to read, and texts to find likely."""
        data, most = self.given.data, min(writer.spec.context - 1, _TEXT_TOKENS)
        given = data.rows if data is not None else ()
        with naming(self.plan.data or SAMPLE, TextColumn(writer.task), given):
            whole, _ = encoded(texts_of(given) if data is not None else sample_texts(), tokenizer)
        # The longest first would be of one kind: every so many, of the order they come in.
        chosen = whole[:: max(1, len(whole) // _TEXTS)][:_TEXTS]
        prompts = chosen[:_PROMPTS]
        if not writer.has_encoder:
            room = max(1, min(_PROMPT_TOKENS, writer.spec.context - _ANSWER_TOKENS))
            prompts = [row[:room] for row in prompts]
        return prompts, [row[:most] for row in chosen]

    def _export(self, writer: Writer, sample: Sample, notes: list[str]) -> tuple[dict[str, Path], Verdict]:
        """Rotating is left to the attention operator first; where the graph then writes otherwise, it is not."""
        from hasten.builder.decoder import export_decoder, rotation_tables

        verdict: Verdict | None = None
        tables = None if writer.has_encoder else rotation_tables(writer.module, writer.spec.context)
        for used in dict.fromkeys((tables, None)):
            folder = self.work / f"exported-{'rotating' if used is not None else 'plain'}"
            folder.mkdir()
            graphs = {DECODER: folder / f"{DECODER}.onnx"}
            if writer.has_encoder:
                from hasten.builder.encoder_decoder import export_encoder_decoder

                limits = (writer.tokenizer.max_length, writer.spec.context)
                graphs = export_encoder_decoder(writer.module, folder, writer.spec.start_ids, limits)
            else:
                export_decoder(writer.module, graphs[DECODER], used)
            verdict = self._judge(_lying(graphs, writer.signature), sample)
            if verdict.passed:
                names = self.about.contenders
                self.passes += [
                    record("export", None, file, variants=names, notes=which(name, graphs))
                    for name, file in graphs.items()
                ]
                notes.append("attention with a cache" + (", positions rotated in it" if used is not None else ""))
                return graphs, verdict
        assert verdict is not None
        raise AccuracyError(f"the graph of {writer.architecture} does not write like it: {verdict.reason}")

    def _texts(self, writer: Writer, sample: Sample) -> list[Text]:
        """What a decoder reads along the original's answers."""
        starts = np.array(writer.spec.start_ids, np.int32)
        return [
            Text(np.concatenate([starts, one.tokens]), one.prompt)
            if writer.has_encoder
            else Text(np.concatenate([one.prompt, one.tokens])[: writer.spec.context])
            for one in sample.answers
        ]

    def _judge(self, artifact: Artifact, sample: Sample) -> Verdict:
        backend, variant = BACKENDS.get(artifact.variant.backend), artifact.variant
        assert isinstance(backend, Decodes)
        decoder = backend.open_decoder(artifact, RunOptions(self.plan.threads), _SLOTS)
        try:
            return judge_decoder(decoder, variant.name, variant.precision, sample, self.plan.gate, self.progress)
        finally:
            decoder.close()

    def _shapes(self, writer: Writer) -> list[Shape]:
        """One row alone, and as many as come most often."""
        asked = self.plan.shapes
        length = max(1, min(asked.sequence.opt, writer.spec.context // 2))
        return list(dict.fromkeys((Shape(1, length), Shape(asked.batch.opt, length))))

    def _manifest(
        self, model: ModelDirectory, writer: Writer, signature: Signature, kept: Sequence[VariantEntry]
    ) -> Manifest:
        return Manifest(
            schema=SCHEMA,
            hasten=__version__,
            created=_now(),
            model=ModelOrigin(model.id, model.revision, writer.architecture),
            task=TaskSpec(writer.task),
            tokenizer=writer.tokenizer,
            signature=signature,
            # With operators of ONNX Runtime's own it would run nowhere else: no portable graph beside the variants.
            graphs={},
            variants=tuple(kept),
            gate=self.plan.gate,
            machine=self.machine,
            files={},
            generation=writer.spec,
        )


def _lying(graphs: dict[str, Path], signature: Signature) -> Artifact:
    """Graphs in fp32 where they lie."""
    names = {name: file.name for name, file in graphs.items()}
    return Artifact(Variant(_WRITER, Precision.FP32), signature, graphs[DECODER].parent, names)


def _entry(artifact: Artifact, verdict: Verdict) -> VariantEntry:
    variant = artifact.variant
    return VariantEntry(
        name=variant.name,
        backend=variant.backend,
        precision=variant.precision,
        device=variant.device,
        requires=BACKENDS.get(variant.backend).requires,
        graphs=dict(artifact.graphs),
        agreement=verdict.agreement,
        metric=verdict.metric,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
