"""Convert a model to a repository for tritonserver and benchmark it, like transformer-deploy's command."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hasten.backends import Artifact, RunOptions, Session
from hasten.builder.bench_bundle import make_baseline
from hasten.builder.build import build
from hasten.builder.sources.directory import ModelDirectory, list_files
from hasten.builder.sources.locate import find_model
from hasten.bundle import Bundle, VariantEntry
from hasten.core.errors import AccuracyError, PlanError, translate_os_errors
from hasten.core.plan import Plan
from hasten.core.progress import Progress, step
from hasten.core.report import Report
from hasten.core.tensors import Batch, Outputs, tile_rows
from hasten.core.variant import CPU, Precision, Variant
from hasten.deploy import atomic_output
from hasten.deploy.tritonserver import Options, write_models
from hasten.deploy.tritonserver.clients_and_readme import write_clients_and_readme
from hasten.deploy.tritonserver.configs import is_batched
from hasten.deploy.tritonserver.variant_choice import TENSORRT
from hasten.families import family_of, family_of_bundle
from hasten.onnx_graph import read_graph, write_graph
from hasten.predictor import open_session

# The file names of transformer-deploy.
ORIGINAL_GRAPH = "model-original.onnx"
GRAPH = "model.onnx"
PLAN = "model.plan"
# The source of the reference answers and the name of its engine, by backend: the model, or the graph that it came as.
_BASELINES = {"torch": ("Pytorch", "Pytorch (FP32)"), "graph": ("the input graph's", "ONNX Runtime (input graph)")}
_EMBEDDING = "sentence-similarity"
# The prefixes of the files of a model's tokenizer.
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "spiece", "sentencepiece")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of the benchmark, and the tolerance of outputs compared with PyTorch's."""

    warmup: int = 10
    count: int = 1000
    seed: int = 123
    atol: float = 0.3
    # Whether to skip timing PyTorch; its outputs are still compared.
    is_fast: bool = False

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise PlanError(f"--warmup {self.warmup} is negative")
        if self.count < 1:
            raise PlanError(f"--nb-measures {self.count} is less than 1")
        if self.seed < 0:
            raise PlanError(f"--seed {self.seed} is negative")
        if not self.atol >= 0:
            raise PlanError(f"--atol {self.atol} is not zero or more")


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """A model to convert, and the options of its benchmark and its repository."""

    plan: Plan
    measures: BenchOptions
    repository: Options
    # The model whose tokenizer replaces the model's own.
    tokenizer: str | None = None
    # The backends to deploy, each with its own models.
    backends: tuple[str, ...] = ("onnxruntime",)


@dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of an engine at the optimal shape; as a string, the line that transformer-deploy prints."""

    engine: str
    ms: tuple[float, ...]
    # The largest absolute difference between an output and PyTorch's.
    max_error: float

    def __str__(self) -> str:
        latencies = np.asarray(self.ms)
        median, p95, p99 = np.percentile(latencies, (50, 95, 99))
        statistics = {"mean": latencies.mean(), "sd": latencies.std(), "min": latencies.min(), "max": latencies.max()}
        statistics |= {"median": median, "95p": p95, "99p": p99}
        return f"[{self.engine}] " + ", ".join(f"{name}={value:.2f}ms" for name, value in statistics.items())


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """The written repository and its benchmark."""

    path: Path
    variant: str
    # The source of the reference answers.
    original: str
    # The names of the models in the repository.
    models: tuple[str, ...]
    latencies: tuple[Latencies, ...]
    report: Report
    # Differences from transformer-deploy.
    notes: tuple[str, ...]


def convert(request: ConversionRequest, output: Path, progress: Progress, *, force: bool = False) -> ConversionResult:
    """Convert a model; nothing is written unless every engine agrees with PyTorch."""
    with (
        atomic_output(output, force=force) as staging,
        translate_os_errors(f"working in {tempfile.gettempdir()}"),
        tempfile.TemporaryDirectory(prefix="hasten-") as temporary,
    ):
        assert request.plan.task is not None
        result = family_of(request.plan.task).convert(request, staging.path, Path(temporary), progress)
        staging.put_in_place()
        return replace(result, path=staging.target)


def convert_encoder(request: ConversionRequest, target: Path, work: Path, progress: Progress) -> ConversionResult:
    """Convert an encoder and time its engines like transformer-deploy."""
    plan, notes = _with_pooling(request.plan)
    directory = _with_tokenizer(plan, request.tokenizer, work / "model") if request.tokenizer else None
    bundle = build(plan, work / "bundle", progress=progress, directory=directory)
    entries = {backend: _choose_entry(bundle, request.measures.atol, backend) for backend in request.backends}
    first = entries[request.backends[0]]
    baseline = make_baseline(plan, work, directory, device=first.device)
    source, engine = _BASELINES[baseline.variant.backend]
    latencies = _measure({engine: baseline, **dict(_engines(bundle, entries))}, bundle, request.measures, progress)
    with step(progress, "write"), translate_os_errors(f"writing {target}"):
        write_graph_model(bundle.graph().path(), target / ORIGINAL_GRAPH)
        models = write_engines(bundle, list(entries.values()), request.repository, target)
    notes += _notes(bundle, list(entries.values()), request.repository)
    return ConversionResult(target, first.name, source, models, tuple(latencies), bundle.report, tuple(notes))


def convert_generator(request: ConversionRequest, target: Path, work: Path, progress: Progress) -> ConversionResult:
    """Convert a generative model; the build verifies it and measures prefill and decode."""
    directory = _with_tokenizer(request.plan, request.tokenizer, work / "model") if request.tokenizer else None
    bundle = build(request.plan, work / "bundle", progress=progress, directory=directory)
    entries = {entry.precision: entry for entry in reversed(bundle.manifest.variants)}
    is_int8 = any(Variant.parse(name).precision is Precision.INT8 for name in request.plan.variants)
    if is_int8 and Precision.INT8 not in entries:
        raise AccuracyError(
            "the int8 variant was rejected: its texts differ from the reference",
            hint="leave -q out to deploy fp32",
            candidates=bundle.report.candidates,
        )
    entry = entries[Precision.INT8] if is_int8 else bundle.manifest.chosen
    with step(progress, "write"), translate_os_errors(f"writing {target}"):
        options = replace(request.repository, variant=entry.name)
        repository = family_of_bundle(bundle).write_tritonserver(bundle, target, options)
    notes = (
        "one model runs the whole decoding loop, with a KV cache and continuous batching",
        "the input sampling_parameters (JSON) sets the length and the sampling",
    )
    return ConversionResult(target, entry.name, "Pytorch", repository.names, (), bundle.report, notes)


def write_engines(bundle: Bundle, entries: Sequence[VariantEntry], options: Options, target: Path) -> tuple[str, ...]:
    """Write the engines' files, named as in transformer-deploy, and the repository; return the names of its models."""
    repositories = []
    for entry in entries:
        artifact = bundle.artifact(entry)
        if entry.backend == TENSORRT:
            shutil.copyfile(artifact.path(), target / PLAN)
        else:
            write_graph_model(artifact.path(), target / GRAPH)
        repositories.append(write_models(bundle, target, replace(options, variant=entry.name)))
    write_clients_and_readme(bundle.manifest.task, options, *repositories)
    return tuple(name for repository in repositories for name in repository.names)


def _engines(bundle: Bundle, entries: Mapping[str, VariantEntry]) -> Iterator[tuple[str, Artifact]]:
    """Yield the engines to compare with the baseline, named as in transformer-deploy."""
    for backend, entry in entries.items():
        if backend == TENSORRT:
            yield f"TensorRT ({entry.precision.upper()})", bundle.artifact(entry)
        else:
            yield "ONNX Runtime (FP32)", _unfused(bundle, entry.device)
            yield "ONNX Runtime (optimized)", bundle.artifact(entry)


def _choose_entry(bundle: Bundle, atol: float, backend: str) -> VariantEntry:
    """Return the fastest variant of a backend within the tolerance; of int8 precision if that was requested."""
    entries = [entry for entry in bundle.manifest.variants if entry.backend == backend]
    if not entries:
        raise AccuracyError(f"every {backend} variant was rejected", candidates=bundle.report.candidates)
    if Precision.INT8 in [Variant.parse(name).precision for name in bundle.report.plan.variants]:
        entries = [entry for entry in entries if entry.precision is Precision.INT8]
    if not entries:
        fp32 = "leave -q out to deploy fp32; hasten build tries more quantization methods"
        raise AccuracyError(
            f"every int8 variant of {backend} was rejected: its answers differ from the reference",
            hint="leave -q out to deploy fp16, or lower --min-agreement" if backend == TENSORRT else fp32,
            candidates=bundle.report.candidates,
        )
    nearest = min(entries, key=lambda entry: entry.agreement.max_error)
    if nearest.agreement.max_error > atol:
        raise _too_far(nearest.name, nearest.agreement.max_error, atol)
    return next(entry for entry in entries if entry.agreement.max_error <= atol)


def _unfused(bundle: Bundle, device: str) -> Artifact:
    """Return stock ONNX Runtime in fp32: the graph on CPUs, the fp32 variant on a GPU."""
    entries = [entry for entry in bundle.manifest.variants if entry.device == device != CPU]
    fp32 = next((entry for entry in entries if entry.precision is Precision.FP32), None)
    return bundle.graph() if fp32 is None else bundle.artifact(fp32)


def _too_far(engine: str, error: float, atol: float) -> AccuracyError:
    return AccuracyError(
        f"outputs of {engine} differ from the reference by {error:.2g}, more than --atol {atol:g}",
        hint="use a larger --atol to accept it",
    )


def _with_pooling(plan: Plan) -> tuple[Plan, list[str]]:
    """Pool by the mean, as sentence-transformers does, if the model does not specify the pooling."""
    if plan.task != _EMBEDDING or plan.pooling is not None:
        return plan, []
    if find_model(plan, with_weights=False).find("modules.json") is not None:
        return plan, []
    note = "mean pooling, the default of sentence-transformers: the model does not specify it"
    return replace(plan, pooling="mean"), [note]


def _with_tokenizer(plan: Plan, tokenizer: str, folder: Path) -> Path:
    """Create a model directory with the files of the model and another tokenizer."""
    from hasten.builder.sources.quiet import quiet_libraries
    from hasten.builder.sources.tokenizer import load_tokenizer

    local = Path(tokenizer).expanduser()
    # Only the tokenizer is read, so pickled weights are harmless.
    path = local if local.is_dir() else find_model(Plan(tokenizer, allow_pickle=True), with_weights=False).path
    model = find_model(plan)
    with quiet_libraries():
        # Saved first, so that it is never written through a link into the model.
        load_tokenizer(ModelDirectory(path, tokenizer, None, {}), plan).save_pretrained(folder)
    for name in list_files(model.path):
        target = folder / name
        if not target.exists() and not name.startswith(_TOKENIZER_FILES):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to((model.path / name).resolve())
    return folder


def _measure(
    engines: Mapping[str, Artifact], bundle: Bundle, measures: BenchOptions, progress: Progress
) -> list[Latencies]:
    """Time the engines one after another in this process, like transformer-deploy; all must agree with the first."""
    batches, options = _batches(bundle, measures), RunOptions(bundle.report.plan.threads)
    expected: list[Outputs] = []
    latencies = []
    with step(progress, "latencies", total=len(engines)):
        for name, artifact in engines.items():
            with open_session(artifact, options) as session:
                outputs = [session.run(batch) for batch in batches]
                expected = expected or outputs
                error = max_error(outputs, expected)
                if not error <= measures.atol:
                    raise _too_far(name, error, measures.atol)
                if outputs is not expected or not measures.is_fast:
                    latencies.append(Latencies(name, tuple(_time(session, batches[0], measures.count)), error))
            progress.advance(note=name)
    return latencies


def _batches(bundle: Bundle, measures: BenchOptions) -> list[Batch]:
    """Return batches of the optimal shape with tokens of the reference texts, each in another random order."""
    signature, shapes = bundle.manifest.signature, bundle.report.plan.shapes
    rows, generator = family_of_bundle(bundle).pipeline.bench_rows(bundle), np.random.default_rng(measures.seed)
    lengths = np.full(shapes.batch.opt, shapes.sequence.at_most(signature.max_length).opt)
    return [
        tile_rows(rows.take(generator.permutation(len(rows))), lengths, signature.mask_id)
        for _ in range(max(1, measures.warmup))
    ]


def max_error(outputs: Sequence[Outputs], reference: Sequence[Outputs]) -> float:
    """Return the largest absolute difference; NaN if any value is NaN."""
    pairs = zip(outputs, reference, strict=True)
    errors = [np.abs(actual[name] - expected[name]).max() for actual, expected in pairs for name in expected]
    return float(np.max(errors))


def _time(session: Session, batch: Batch, count: int) -> Iterator[float]:
    for _ in range(count):
        start = time.perf_counter()
        session.run(batch)
        yield (time.perf_counter() - start) * 1e3


def write_graph_model(graph: Path, target: Path) -> None:
    """Copy a graph; external weights get the graph's new name, since the target directory holds two graphs."""
    if any(graph.parent.glob(f"{graph.name}.data*")):
        write_graph(read_graph(graph), target, external_data=True)
    else:
        shutil.copyfile(graph, target)


def _notes(bundle: Bundle, entries: Sequence[VariantEntry], options: Options) -> Iterator[str]:
    """Yield the differences that users of transformer-deploy may not expect."""
    manifest = bundle.manifest
    yield "latencies are measured one engine after another; in the table, engines alternate in separate processes"
    for entry in entries:
        agreement = entry.agreement
        yield (
            f"verified: {entry.name} agrees with the reference"
            f" ({agreement.measure} {agreement.value:.5f}, largest difference {agreement.max_error:.1e})"
        )
    yield "--atol limits the largest difference of an output, not the mean of all differences"
    yield f"truncation: texts are truncated to {manifest.tokenizer.max_length} tokens"
    if is_batched(manifest.signature):
        max_rows = bundle.report.plan.shapes.batch.max if entries[0].backend == TENSORRT else options.max_rows
        yield f"dynamic batching: concurrent texts of equal length run together; a request has at most {max_rows}"
    if labels := manifest.task.labels:
        yield f"labels: the repository contains them ({', '.join(labels[:4])}{', …' if len(labels) > 4 else ''})"
