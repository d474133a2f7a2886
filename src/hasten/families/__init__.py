"""Model families: what differs between encoders and generative models, behind one contract.

A family is one file in this package, whose name is its registry key, or an entry point (`hasten.families`) of another
package. The packages that build, verify, serve and deploy models call a family through `family_of` and import no
implementation; a family imports from them inside its methods, so that serving a bundle loads nothing for building one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hasten.core.registry import Registry

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
    from hasten.generation.generator import Generator
    from hasten.measure.data import HasColumns
    from hasten.measure.verify_bundle import Judge
    from hasten.predictor import Predictor
    from hasten.server.models.registry import Model
    from hasten.server.scheduling.core_scheduler import CoreScheduler
    from hasten.server.settings import Settings
    from hasten.server.telemetry.metrics import Metrics


class Family(Protocol):
    """The contract of a model family. Stateless."""

    @property
    def tasks(self) -> Sequence[str]:
        """Return the names of the family's tasks."""

    def heads(self, task: str) -> tuple[str, ...]:
        """Return the suffixes of the classes that have a head for the task; empty if it needs none."""

    @property
    def detected_heads(self) -> Mapping[str, tuple[str, ...]]:
        """Return the suffixes by task, for the tasks that the class of a model implies."""

    def auto_class(self, task: str) -> str:
        """Return the Auto class of transformers that loads models for the task."""

    def columns(self, task: str) -> HasColumns:
        """Return the columns that the task reads from a data file."""

    def example(self, bundle: Bundle) -> str:
        """Return example arguments for `hasten run`."""

    @property
    def pipeline(self) -> type[BuildPipeline]:
        """Return the class that builds and benchmarks models: preflight, load, reference, export, verify, bench."""

    @property
    def judge(self) -> type[Judge]:
        """Return the class that compares variants of a bundle with its reference."""

    def open(self, bundle: Bundle, artifact: Artifact, options: RunOptions, task: str = "") -> Predictor | Generator:
        """Open a variant that is known to run here; `task` may be a preset such as summarization."""

    def operator(
        self, opened: Predictor | Generator, bundle: Bundle, schema: pa.Schema, settings: AnswerSettings
    ) -> Operator:
        """Return the operator that answers rows of this schema with an opened variant; closing it frees the variant."""

    def serve(self, name: str, bundle: Bundle, settings: Settings, scheduler: CoreScheduler, metrics: Metrics) -> Model:
        """Open a bundle for the server, warm it up and check it against its reference answers."""

    def tritonserver_variant(self, bundle: Bundle, options: Options) -> str:
        """Return the name of the variant that tritonserver runs."""

    def write_tritonserver(self, bundle: Bundle, directory: Path, options: Options) -> Repository:
        """Write the models, an image, example clients and a README into an existing directory."""

    def compare_tritonserver(
        self, client: Client, bundle: Bundle, repository: Repository, progress: Progress
    ) -> Comparison:
        """Compare the answers of a running tritonserver with the reference."""

    def convert(self, request: ConversionRequest, target: Path, work: Path, progress: Progress) -> ConversionResult:
        """Convert a model like transformer-deploy's command; `work` is a temporary directory."""


FAMILIES: Registry[Family] = Registry("model family", "hasten.families", "FAMILY")
_ENCODER = "encoder"


def family_of(task: str) -> Family:
    """Return the family of a task: encoders, whose registry rejects unknown tasks, unless another one has it."""
    others = (FAMILIES.get(name) for name in FAMILIES.names() if name != _ENCODER)
    return next((family for family in others if task in family.tasks), FAMILIES.get(_ENCODER))


def family_of_bundle(bundle: Bundle) -> Family:
    """Return the family of a bundle's model."""
    return family_of(bundle.manifest.task.name)


def all_tasks() -> list[str]:
    """Return the tasks of all families."""
    return [task for family in FAMILIES.all() for task in family.tasks]
