"""Encoders: models that answer with labels, scores or vectors, in one pass over a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.predictor import Predictor, open_session
from hasten.tasks import TASKS, AnyTask

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
    from hasten.generation.generator import Generator
    from hasten.measure.verify_bundle import Judge
    from hasten.server.models.encoder_model import EncoderModel
    from hasten.server.scheduling.core_scheduler import CoreScheduler
    from hasten.server.settings import Settings
    from hasten.server.telemetry.metrics import Metrics

_LIST_FIELDS = ("candidate_labels", "choices", "documents")


class EncoderFamily:
    """The family of the tasks in `hasten.tasks`."""

    @property
    def tasks(self) -> Sequence[str]:
        return TASKS.names()

    def heads(self, task: str) -> tuple[str, ...]:
        return TASKS.get(task).heads

    @property
    def detected_heads(self) -> Mapping[str, tuple[str, ...]]:
        return {task.name: task.heads for task in TASKS.all() if task.is_detected}

    def auto_class(self, task: str) -> str:
        return TASKS.get(task).auto_class

    def columns(self, task: str) -> AnyTask:
        return TASKS.get(task)

    def example(self, bundle: Bundle) -> str:
        spec = bundle.manifest.task
        fields = TASKS.get(spec.name).fields
        if len(fields) == 1:
            return f'"some {spec.mask_token or "text"}"'
        return " ".join(f"""--field {name}='{'["…", "…"]' if name in _LIST_FIELDS else "…"}'""" for name in fields)

    @property
    def pipeline(self) -> type[BuildPipeline]:
        from hasten.builder.encoder_build import EncoderBuild

        return EncoderBuild

    @property
    def judge(self) -> type[Judge]:
        from hasten.measure.encoder_judge import EncoderJudge

        return EncoderJudge

    def open(self, bundle: Bundle, artifact: Artifact, options: RunOptions, task: str = "") -> Predictor:
        return Predictor(bundle.manifest.task, bundle.tokenizer(), open_session(artifact, options))

    def operator(
        self, opened: Predictor | Generator, bundle: Bundle, schema: pa.Schema, settings: AnswerSettings
    ) -> Operator:
        from hasten.corpus.encoder_operator import EncoderOperator

        assert isinstance(opened, Predictor)
        vectors = bundle.reference().outputs.get(opened.task.outputs[0]) if settings.vectors == "int8" else None
        return EncoderOperator(opened, schema, settings, vectors)

    def serve(
        self, name: str, bundle: Bundle, settings: Settings, scheduler: CoreScheduler, metrics: Metrics
    ) -> EncoderModel:
        from hasten.server.models.encoder_model import EncoderModel

        return EncoderModel(name, bundle, settings, scheduler, metrics.of_encoder(name))

    def tritonserver_variant(self, bundle: Bundle, options: Options) -> str:
        from hasten.deploy.tritonserver.variant_choice import choose_variant

        return choose_variant(bundle, options).variant.name

    def write_tritonserver(self, bundle: Bundle, directory: Path, options: Options) -> Repository:
        from hasten.deploy.tritonserver.clients_and_readme import write_clients_and_readme
        from hasten.deploy.tritonserver.repository import write_models

        repository = write_models(bundle, directory, options)
        write_clients_and_readme(bundle.manifest.task, options, repository)
        return repository

    def compare_tritonserver(
        self, client: Client, bundle: Bundle, repository: Repository, progress: Progress
    ) -> Comparison:
        from hasten.deploy.tritonserver.check import compare_encoder

        return compare_encoder(client, bundle, repository, progress)

    def convert(self, request: ConversionRequest, target: Path, work: Path, progress: Progress) -> ConversionResult:
        from hasten.deploy.convert import convert_encoder

        return convert_encoder(request, target, work, progress)


FAMILY: Family = EncoderFamily()
