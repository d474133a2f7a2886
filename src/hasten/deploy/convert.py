"""What transformer-deploy's command does: a model becomes a repository for tritonserver, and is timed on the way."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hasten.backends import Artifact, RunOptions, Session
from hasten.builder.build import build
from hasten.builder.rebench import make_original, token_rows
from hasten.builder.source import ModelDirectory, find_model, list_files
from hasten.bundle import Bundle, VariantEntry
from hasten.core.errors import AccuracyError, PlanError, translate_os_errors
from hasten.core.generation import WRITING
from hasten.core.plan import Plan
from hasten.core.progress import Progress, Silent, step
from hasten.core.report import Report
from hasten.core.tensors import Batch, Outputs, tiled
from hasten.core.variant import CPU, Precision, Variant
from hasten.deploy import written
from hasten.deploy.tritonserver import Options, write_models
from hasten.deploy.tritonserver.around import write_around, write_image
from hasten.deploy.tritonserver.configs import is_batched
from hasten.deploy.tritonserver.options import TENSORRT
from hasten.deploy.tritonserver.writer import write_asking, write_writer
from hasten.graph import read_graph, write_graph
from hasten.predictor import open_session

# The names that transformer-deploy gave them.
ORIGINAL_GRAPH = "model-original.onnx"
GRAPH = "model.onnx"
PLAN = "model.plan"
# Whom the others must equal, and what of it is timed: the model, or the graph that it came as.
_ORIGINALS = {"torch": ("Pytorch", "Pytorch (FP32)"), "graph": ("the given graph's", "ONNX Runtime (as given)")}
_ONNX = "onnxruntime"
_EMBEDDING = "sentence-similarity"
# What a model's own tokenizer may lie in.
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "spiece", "sentencepiece")


@dataclass(frozen=True, slots=True)
class Measures:
    """How latencies are taken, and how far outputs may be away from PyTorch's."""

    warmup: int = 10
    count: int = 1000
    seed: int = 123
    atol: float = 0.3
    # PyTorch answers, for the comparison, but is not timed.
    is_fast: bool = False

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise PlanError(f"--warmup {self.warmup} is less than nothing")
        if self.count < 1:
            raise PlanError(f"--nb-measures {self.count} measures nothing", hint="give one or more")
        if self.seed < 0:
            raise PlanError(f"--seed {self.seed} is less than nothing")
        if not self.atol >= 0:
            raise PlanError(f"--atol {self.atol} is not zero or more")


@dataclass(frozen=True, slots=True)
class Order:
    plan: Plan
    measures: Measures
    repository: Options
    # Where a tokenizer lies that takes the place of the model's own.
    tokenizer: str | None = None
    # Whose variants are deployed, each in models of its own.
    backends: tuple[str, ...] = (_ONNX,)


@dataclass(frozen=True, slots=True)
class Latencies:
    """One engine at the optimal shape; its text is the line that transformer-deploy prints."""

    engine: str
    ms: tuple[float, ...]
    # The largest difference of an output to PyTorch's.
    max_error: float

    def __str__(self) -> str:
        taken = np.asarray(self.ms)
        median, p95, p99 = np.percentile(taken, (50, 95, 99))
        shown = {"mean": taken.mean(), "sd": taken.std(), "min": taken.min(), "max": taken.max()}
        shown |= {"median": median, "95p": p95, "99p": p99}
        return f"[{self.engine}] " + ", ".join(f"{name}={value:.2f}ms" for name, value in shown.items())


@dataclass(frozen=True, slots=True)
class Converted:
    path: Path
    variant: str
    # Whose outputs its own were compared with.
    original: str
    # In the repository.
    models: tuple[str, ...]
    latencies: tuple[Latencies, ...]
    report: Report
    # Where it does more than transformer-deploy did, or something else.
    notes: tuple[str, ...]


def convert(order: Order, output: Path, *, force: bool = False, progress: Progress | None = None) -> Converted:
    """Nothing appears at the output unless every engine answers like PyTorch."""
    shown = progress or Silent()
    with (
        written(output, force=force) as staging,
        translate_os_errors(f"working in {tempfile.gettempdir()}"),
        tempfile.TemporaryDirectory(prefix="hasten-") as temporary,
    ):
        work = Path(temporary)
        if order.plan.task in WRITING:
            converted = _convert_writer(order, staging.path, work, shown)
            staging.put_in_place()
            return replace(converted, path=staging.target)
        plan, notes = _with_pooling(order.plan)
        directory = _with_tokenizer(plan, order.tokenizer, work / "model") if order.tokenizer else None
        bundle = build(plan, work / "bundle", progress=shown, directory=directory)
        entries = {backend: _deployed(bundle, order.measures.atol, backend) for backend in order.backends}
        original = make_original(plan, work, directory, device=entries[order.backends[0]].device)
        whose, engine = _ORIGINALS[original.variant.backend]
        latencies = _race({engine: original, **dict(_engines(bundle, entries))}, bundle, order.measures, shown)
        with step(shown, f"write {output.name}"), translate_os_errors(f"writing {output}"):
            place_graph(bundle.graph().path(), staging.path / ORIGINAL_GRAPH)
            models = write_engines(bundle, list(entries.values()), order.repository, staging.path)
        staging.put_in_place()
        notes += _safer(bundle, list(entries.values()), order.repository)
        first = entries[order.backends[0]]
        return Converted(staging.target, first.name, whose, models, tuple(latencies), bundle.report, tuple(notes))


def _convert_writer(order: Order, place: Path, work: Path, progress: Progress) -> Converted:
    """Its gate, along the original's own answers, is in the build; and so is what it takes to read and to write."""
    directory = _with_tokenizer(order.plan, order.tokenizer, work / "model") if order.tokenizer else None
    bundle = build(order.plan, work / "bundle", progress=progress, directory=directory)
    whole = {entry.precision: entry for entry in reversed(bundle.manifest.variants)}
    wants = (
        Precision.INT8 if any(Variant.parse(name).precision is Precision.INT8 for name in order.plan.variants) else None
    )
    if wants is not None and wants not in whole:
        raise AccuracyError(
            "quantized to int8 it does not write like the original",
            hint="without -q it is deployed in fp32",
            candidates=bundle.report.candidates,
        )
    entry = bundle.manifest.chosen if wants is None else whole[wants]
    with step(progress, "write"), translate_os_errors(f"writing {place}"):
        repository = write_writer(bundle, place, replace(order.repository, variant=entry.name))
        write_image(order.repository, repository)
        write_asking(repository)
    notes = (
        "one model does it all: the loop over tokens is in it, with a cache, for several requests at once",
        "how long and how it writes is asked for: sampling_parameters, JSON",
    )
    return Converted(place, entry.name, "Pytorch", repository.names, (), bundle.report, notes)


def write_engines(bundle: Bundle, entries: Sequence[VariantEntry], options: Options, place: Path) -> tuple[str, ...]:
    """Each engine's file by transformer-deploy's name, and the repository; the names of its models are returned."""
    repositories = []
    for entry in entries:
        artifact = bundle.artifact(entry)
        if entry.backend == TENSORRT:
            shutil.copyfile(artifact.path(), place / PLAN)
        else:
            place_graph(artifact.path(), place / GRAPH)
        repositories.append(write_models(bundle, place, replace(options, variant=entry.name)))
    write_around(bundle.manifest.task, options, *repositories)
    return tuple(name for repository in repositories for name in repository.names)


def _engines(bundle: Bundle, entries: Mapping[str, VariantEntry]) -> Iterator[tuple[str, Artifact]]:
    """What races against the original, by transformer-deploy's names."""
    for backend, entry in entries.items():
        if backend == TENSORRT:
            yield f"TensorRT ({entry.precision.upper()})", bundle.artifact(entry)
        else:
            yield "ONNX Runtime (FP32)", _plain(bundle, entry.device)
            yield "ONNX Runtime (optimized)", bundle.artifact(entry)


def _deployed(bundle: Bundle, atol: float, backend: str) -> VariantEntry:
    """The fastest of a backend within the tolerance and, where int8 was asked for, in int8."""
    found = [entry for entry in bundle.manifest.variants if entry.backend == backend]
    if not found:
        raise AccuracyError(f"no variant of {backend} answers like the original", candidates=bundle.report.candidates)
    if Precision.INT8 in [Variant.parse(name).precision for name in bundle.report.plan.variants]:
        found = [entry for entry in found if entry.precision is Precision.INT8]
    if not found:
        raise AccuracyError(
            "quantized to int8 it does not answer like the original",
            hint="without -q it is deployed in fp16; --min-agreement opens the gate wider"
            if backend == TENSORRT
            else "without -q it is deployed in fp32; hasten build searches more ways to quantize",
            candidates=bundle.report.candidates,
        )
    nearest = min(found, key=lambda entry: entry.agreement.max_error)
    if nearest.agreement.max_error > atol:
        raise _too_far(nearest.name, nearest.agreement.max_error, atol)
    return next(entry for entry in found if entry.agreement.max_error <= atol)


def _plain(bundle: Bundle, device: str) -> Artifact:
    """ONNX Runtime in fp32 as one would have it: the graph alone, which is for processors, or what runs on the GPU."""
    found = [entry for entry in bundle.manifest.variants if entry.device == device != CPU]
    whole = next((entry for entry in found if entry.precision is Precision.FP32), None)
    return bundle.graph() if whole is None else bundle.artifact(whole)


def _too_far(engine: str, error: float, atol: float) -> AccuracyError:
    return AccuracyError(
        f"{engine} is away from the original by {error:.2g}, more than --atol {atol:g}",
        hint="a larger --atol accepts it",
    )


def _with_pooling(plan: Plan) -> tuple[Plan, list[str]]:
    """sentence-transformers takes the mean where a model does not say how to pool."""
    if plan.task != _EMBEDDING or plan.pooling is not None:
        return plan, []
    if find_model(plan, with_weights=False).find("modules.json") is not None:
        return plan, []
    return replace(plan, pooling="mean"), ["mean pooling, as sentence-transformers assumes: the model does not say"]


def _with_tokenizer(plan: Plan, tokenizer: str, folder: Path) -> Path:
    """The model's files beside another tokenizer's."""
    from hasten.builder.libraries import quiet_libraries
    from hasten.builder.tokenizer import load_tokenizer

    local = Path(tokenizer).expanduser()
    # Of a repository on the hub the tokenizer alone is read: how its weights are stored does not matter.
    found = local if local.is_dir() else find_model(Plan(tokenizer, allow_pickle=True), with_weights=False).path
    model = find_model(plan)
    with quiet_libraries():
        # First, so that it never writes through a link into the model.
        load_tokenizer(ModelDirectory(found, tokenizer, None, {}), plan).save_pretrained(folder)
    for name in list_files(model.path):
        target = folder / name
        if not target.exists() and not name.startswith(_TOKENIZER_FILES):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to((model.path / name).resolve())
    return folder


def _race(engines: Mapping[str, Artifact], bundle: Bundle, measures: Measures, progress: Progress) -> list[Latencies]:
    """One engine after the other in this process, as transformer-deploy does; the others must answer like the first."""
    batches, options = _batches(bundle, measures), RunOptions(bundle.report.plan.threads)
    expected: list[Outputs] = []
    taken = []
    with step(progress, "latencies", total=len(engines)):
        for name, artifact in engines.items():
            with open_session(artifact, options) as session:
                outputs = [session.run(batch) for batch in batches]
                expected = expected or outputs
                error = max_error(outputs, expected)
                if not error <= measures.atol:
                    raise _too_far(name, error, measures.atol)
                if outputs is not expected or not measures.is_fast:
                    taken.append(Latencies(name, tuple(_time(session, batches[0], measures.count)), error))
            progress.advance(note=name)
    return taken


def _batches(bundle: Bundle, measures: Measures) -> list[Batch]:
    """Of the optimal shape, real tokens: each from the texts of the reference in another order, by the seed."""
    signature, shapes = bundle.manifest.signature, bundle.report.plan.shapes
    rows, order = token_rows(bundle), np.random.default_rng(measures.seed)
    lengths = np.full(shapes.batch.opt, shapes.sequence.at_most(signature.max_length).opt)
    return [
        tiled(rows.take(order.permutation(len(rows))), lengths, signature.mask_id)
        for _ in range(max(1, measures.warmup))
    ]


def max_error(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> float:
    """The largest difference of any number; not a number where one of them is none."""
    pairs = zip(ours, theirs, strict=True)
    return float(np.max([np.abs(mine[name] - own[name]).max() for mine, own in pairs for name in own]))


def _time(session: Session, batch: Batch, count: int) -> Iterator[float]:
    for _ in range(count):
        begin = time.perf_counter()
        session.run(batch)
        yield (time.perf_counter() - begin) * 1e3


def place_graph(graph: Path, target: Path) -> None:
    """Two graphs lie in one directory here, so weights beside them take their graph's name."""
    if any(graph.parent.glob(f"{graph.name}.data*")):
        write_graph(read_graph(graph), target, external_data=True)
    else:
        shutil.copyfile(graph, target)


def _safer(bundle: Bundle, entries: Sequence[VariantEntry], options: Options) -> Iterator[str]:
    """What somebody who comes from transformer-deploy would not expect."""
    about = bundle.manifest
    yield "latencies are of one engine after the other; in the table engines take turns, each in its own process"
    for entry in entries:
        agreement = entry.agreement
        yield (
            f"verified: {entry.name} answers like the original"
            f" ({agreement.measure} {agreement.value:.5f}, largest difference {agreement.max_error:.1e})"
        )
    yield "--atol bounds the largest difference of an output, not the mean of all differences"
    yield f"truncation: texts of more than {about.tokenizer.max_length} tokens are cut to that many"
    if is_batched(about.signature):
        most = bundle.report.plan.shapes.batch.max if entries[0].backend == TENSORRT else options.max_rows
        yield f"dynamic batching: texts of one length that come together run together; a request holds {most} at most"
    if labels := about.task.labels:
        yield f"labels: the repository has their names ({', '.join(labels[:4])}{', …' if len(labels) > 4 else ''})"
