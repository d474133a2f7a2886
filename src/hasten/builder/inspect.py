"""Inspect a bundle: its inputs and outputs, the passes over its graphs, and the operators that really run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hasten.backends import BACKENDS, DECODER, MODEL, Artifact, ReportsPlacement
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.kv_cache import CROSS, PAST
from hasten.bundle import Bundle
from hasten.bundle.manifest import ModelOrigin
from hasten.core.errors import BundleError, HastenError, PlanError, StageError, UnsupportedError, missing_package
from hasten.core.generation_types import GenerationSpec
from hasten.core.placement import OperatorPlacement
from hasten.core.report import Pass
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Signature
from hasten.core.variant import Precision
from hasten.onnx_graph import operators, read_graph
from hasten.tasks import TaskSpec

# The name of the graph that all variants are made from.
GRAPH = "graph"
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class GraphView:
    """A graph file of a bundle; `executed` are the operators that ran, if the variant was loaded."""

    name: str
    file: str
    operators: dict[str, int]
    executed: tuple[OperatorPlacement, ...] = ()
    notes: tuple[str, ...] = ()
    # The name among the variant's graphs; most variants have one.
    graph: str = MODEL
    # The precision of most of its weights, if it can be read.
    weights: Precision | None = None


@dataclass(frozen=True, slots=True)
class CacheView:
    """The size of the KV cache of a sequence."""

    bytes_per_token: int
    # The cross-attention, for each input token of the encoder.
    bytes_per_prompt_token: int
    # A sequence that fills the context, without cross-attention.
    full_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a bundle, or of one of its variants."""

    path: Path
    model: ModelOrigin
    hasten: str
    created: str
    task: TaskSpec
    signature: Signature
    files: dict[str, int]
    passes: tuple[Pass, ...]
    graphs: tuple[GraphView, ...]
    # Only for generative models.
    generation: GenerationSpec | None = None
    cache: CacheView | None = None


def inspect(bundle: Bundle, variant: str | None = None) -> Inspection:
    """Inspect a bundle, or one variant of it, which is then loaded to see the operators that its runtime executes."""
    bundle.check()
    manifest, passes = bundle.manifest, bundle.report.passes
    if variant is not None:
        artifacts = {variant: bundle.artifact(bundle.entry(variant))}
        passes = tuple(step for step in passes if variant in step.variants)
    else:
        # A generative model has no graph beside those of its variants.
        artifacts = {GRAPH: bundle.graph()} if manifest.graphs else {}
        artifacts |= {entry.name: bundle.artifact(entry) for entry in manifest.variants}
    views = [
        _view(bundle, name, artifact, graph, passes, is_loaded=variant is not None)
        for name, artifact in artifacts.items()
        for graph in artifact.graphs
    ]
    return Inspection(
        path=bundle.path,
        model=manifest.model,
        hasten=manifest.hasten,
        created=manifest.created,
        task=manifest.task,
        signature=manifest.signature,
        files={name: (bundle.path / name).stat().st_size for name in manifest.files},
        passes=passes,
        graphs=tuple(views),
        generation=manifest.generation,
        cache=_cache_size(bundle),
    )


def _cache_size(bundle: Bundle) -> CacheView | None:
    """Return the size that a decoder's graph declares; None without a decoder, or without a package to read it."""
    artifact = bundle.artifact(bundle.chosen)
    if DECODER not in artifact.graphs:
        return None
    try:
        inputs = read_graph(artifact.path(DECODER), with_weights=False).graph.input
    except UnsupportedError:
        return None
    from onnx.helper import tensor_dtype_to_np_dtype

    sizes = {PAST: 0, CROSS: 0}
    try:
        for entry in inputs:
            for prefix in sizes:
                if entry.name.startswith(prefix):
                    _, heads, _, width = entry.type.tensor_type.shape.dim
                    number_bytes = tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type).itemsize
                    sizes[prefix] += heads.dim_value * width.dim_value * number_bytes
    # Other ranks, unknown types, and names that are not UTF-8, which protobuf returns as bytes.
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{artifact.path(DECODER)} is not the graph of a decoder: {error}") from error
    return CacheView(sizes[PAST], sizes[CROSS], sizes[PAST] * artifact.signature.max_length)


def _view(
    bundle: Bundle, name: str, artifact: Artifact, graph: str, passes: tuple[Pass, ...], *, is_loaded: bool
) -> GraphView:
    file, index = artifact.path(graph), list(artifact.graphs).index(graph)
    notes = []
    operator_counts: Mapping[str, int] = {}
    weights = None
    try:
        operator_counts = _count_operators(file)
        weights = stored_precision(file) if file.suffix == ".onnx" else None
    except UnsupportedError as error:
        # The build recorded the operators after its last pass; each pass goes over all graphs in their order.
        recorded = [step for step in passes if name in step.variants]
        if recorded and file.suffix == ".onnx":
            operator_counts = recorded[index - len(artifact.graphs)].operators_after
        else:
            notes.append(str(error))
    executed: tuple[OperatorPlacement, ...] = ()
    # A runtime reports all its graphs at once.
    if is_loaded and index == 0:
        try:
            executed = _placements(artifact)
        except HastenError as error:
            notes.append(f"the executed operators are unknown: {error}")
    relative = file.relative_to(bundle.path).as_posix()
    return GraphView(name, relative, dict(operator_counts), executed, tuple(notes), graph, weights)


def _count_operators(file: Path) -> dict[str, int]:
    if file.suffix == ".onnx":
        return operators(file)
    if file.suffix != ".xml":
        raise UnsupportedError(f"counting the operators of '{file.suffix}' files is not supported")
    # An OpenVINO graph is XML beside its weights and needs no package to read.
    try:
        layers = ElementTree.parse(file).iterfind("layers/layer")
        return dict(Counter(layer.attrib["type"] for layer in layers).most_common())
    except (ElementTree.ParseError, KeyError) as error:
        raise BundleError(f"{file} is not an OpenVINO graph: {error}") from error


def _placements(artifact: Artifact) -> tuple[OperatorPlacement, ...]:
    backend = BACKENDS.get(artifact.variant.backend)
    support = backend.probe(this_machine(), artifact.variant)
    if not support.ok:
        raise UnsupportedError(f"{artifact.variant} does not run here: {support.reason}", hint=support.hint or None)
    if not isinstance(backend, ReportsPlacement):
        raise UnsupportedError(f"the backend '{backend.name}' does not report them")
    return tuple(backend.placements(artifact))


def open_viewer(bundle: Bundle, variant: str | None = None, port: int | None = None) -> str:
    """Open the graph, or a variant's, in Netron's viewer, and return the viewer's address."""
    try:
        import netron
    except ImportError as error:
        raise missing_package("netron", "showing a graph", "inspect") from error
    if port is not None and not 0 <= port <= _MAX_PORT:
        raise PlanError(f"--port {port} is not between 0 and {_MAX_PORT}")
    if variant is None and bundle.manifest.graphs:
        artifact = bundle.graph()
    else:
        artifact = bundle.artifact(bundle.entry(variant) if variant is not None else bundle.chosen)
    graph = DECODER if DECODER in artifact.graphs else MODEL
    logging.getLogger("netron").setLevel(logging.WARNING)
    try:
        host, used_port = netron.start(str(artifact.path(graph)), address=("localhost", port))
    except OSError as error:
        raise StageError(f"port {port} cannot be used: {error.strerror}", hint="--port 0 picks a free one") from error
    return f"http://{host}:{used_port}"


def wait_for_viewer() -> None:
    """Wait until the user presses Ctrl-C."""
    import netron

    netron.wait()
