"""Generative models: decoders, and encoders with a decoder, that generate text token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.core.generation_types import AUTO_CLASSES, GENERATION_TASKS, TEXT2TEXT_GENERATION, TEXT_GENERATION
from hasten.generation.generator import Generator, generator_of
from hasten.measure.generation_reference import TextColumn

if TYPE_CHECKING:
    import pyarrow as pa

    from hasten.backends import Artifact, RunOptions
    from hasten.builder.pipeline import BuildPipeline
    from hasten.bundle import Bundle
    from hasten.core.progress import Progress
    from hasten.corpus.operator import Operator
    from hasten.corpus.settings import AnswerSettings
    from hasten.deploy.convert import ConversionRequest, ConversionResult
    from hasten.deploy.tritonserver import Options, Repository
    from hasten.deploy.tritonserver.check import Comparison
    from hasten.deploy.tritonserver.client import Client
    from hasten.families import Family
    from hasten.measure.verify_bundle import Judge
    from hasten.predictor import Predictor
    from hasten.server.models.generative_model import GenerativeModel
    from hasten.server.scheduling.core_scheduler import CoreScheduler
    from hasten.server.settings import Settings
    from hasten.server.telemetry.metrics import Metrics

_HEADS = {
    TEXT_GENERATION: ("ForCausalLM", "LMHeadModel"),
    TEXT2TEXT_GENERATION: ("ForConditionalGeneration", "MTModel"),
}


class GenerationFamily:
    """The family of text generation and text-to-text generation."""

    @property
    def tasks(self) -> Sequence[str]:
        return GENERATION_TASKS

    def heads(self, task: str) -> tuple[str, ...]:
        return _HEADS[task]

    @property
    def detected_heads(self) -> Mapping[str, tuple[str, ...]]:
        return _HEADS

    def auto_class(self, task: str) -> str:
        return AUTO_CLASSES[task]

    def columns(self, task: str) -> TextColumn:
        return TextColumn(task)

    def example(self, bundle: Bundle) -> str:
        return '"some text"'

    @property
    def pipeline(self) -> type[BuildPipeline]:
        from hasten.builder.generation.build import GenerationBuild

        return GenerationBuild

    @property
    def judge(self) -> type[Judge]:
        from hasten.measure.generation_judge import GenerationJudge

        return GenerationJudge

    def open(self, bundle: Bundle, artifact: Artifact, options: RunOptions, task: str = "") -> Generator:
        return generator_of(bundle, artifact, options, task)

    def operator(
        self, opened: Predictor | Generator, bundle: Bundle, schema: pa.Schema, settings: AnswerSettings
    ) -> Operator:
        from hasten.corpus.generation_operator import GenerationOperator

        assert isinstance(opened, Generator)
        return GenerationOperator(opened, bundle.manifest.task.name, schema, settings)

    def serve(
        self, name: str, bundle: Bundle, settings: Settings, scheduler: CoreScheduler, metrics: Metrics
    ) -> GenerativeModel:
        from hasten.server.models.generative_model import GenerativeModel

        return GenerativeModel(name, bundle, settings, scheduler, metrics.of_generator(name))

    def tritonserver_variant(self, bundle: Bundle, options: Options) -> str:
        from hasten.deploy.tritonserver.generation_repository import choose_generator

        return choose_generator(bundle, options).name

    def write_tritonserver(self, bundle: Bundle, directory: Path, options: Options) -> Repository:
        from hasten.deploy.tritonserver.generation_repository import write_generator

        return write_generator(bundle, directory, options)

    def compare_tritonserver(
        self, client: Client, bundle: Bundle, repository: Repository, progress: Progress
    ) -> Comparison:
        from hasten.deploy.tritonserver.check import compare_generator

        return compare_generator(client, bundle, repository, progress)

    def convert(self, request: ConversionRequest, target: Path, work: Path, progress: Progress) -> ConversionResult:
        from hasten.deploy.convert import convert_generator

        return convert_generator(request, target, work, progress)


FAMILY: Family = GenerationFamily()
