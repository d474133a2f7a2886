"""Looking into a finished bundle: what it takes and gives, what the passes made of its graph, what really runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hasten.backends import BACKENDS, DECODER, MODEL, Artifact, TellsExecutions
from hasten.backends.onnxruntime import stored_precision
from hasten.backends.onnxruntime.caches import CROSS, PAST
from hasten.bundle import Bundle
from hasten.bundle.manifest import ModelOrigin
from hasten.core.errors import BundleError, HastenError, PlanError, StageError, UnsupportedError, missing_package
from hasten.core.execution import Execution
from hasten.core.generation import GenerationSpec
from hasten.core.hardware import this_machine
from hasten.core.report import Pass
from hasten.core.tensors import Signature
from hasten.core.variant import Precision
from hasten.graph import operators, read_graph
from hasten.tasks import TaskSpec

# What the graph that all variants come from is called beside them.
GRAPH = "graph"
_PORTS = 65535


@dataclass(frozen=True, slots=True)
class GraphView:
    """One graph file of a bundle; `executed` where it was loaded to see."""

    name: str
    file: str
    operators: dict[str, int]
    executed: tuple[Execution, ...] = ()
    notes: tuple[str, ...] = ()
    # Which of the variant's graphs; most have one.
    graph: str = MODEL
    # What most of its weights are stored in, where that can be counted.
    weights: Precision | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """What a text in progress takes beside the weights: its keys and values, in fp32."""

    bytes_per_token: int
    # Where an encoder reads the prompt: of each token there.
    bytes_per_prompt_token: int
    # Of a text that fills the context, without a prompt that an encoder reads.
    full_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    path: Path
    model: ModelOrigin
    hasten: str
    created: str
    task: TaskSpec
    signature: Signature
    files: dict[str, int]
    passes: tuple[Pass, ...]
    graphs: tuple[GraphView, ...]
    # Of a model that writes.
    generation: GenerationSpec | None = None
    cache: Cache | None = None


def inspect(bundle: Bundle, variant: str | None = None) -> Inspection:
    """All of it, or one variant, which is then loaded to see what its runtime makes of it."""
    bundle.check()
    about, passes = bundle.manifest, bundle.report.passes
    if variant is not None:
        artifact = bundle.artifact(bundle.entry(variant))
        passes = tuple(step for step in passes if variant in step.variants)
        views = [_view(bundle, variant, artifact, graph, passes, is_loaded=True) for graph in artifact.graphs]
    else:
        # Models that write have graphs with their variants alone.
        artifacts = {GRAPH: bundle.graph()} if about.graphs else {}
        artifacts |= {entry.name: bundle.artifact(entry) for entry in about.variants}
        views = [
            _view(bundle, name, artifact, graph, passes, is_loaded=False)
            for name, artifact in artifacts.items()
            for graph in artifact.graphs
        ]
    return Inspection(
        path=bundle.path,
        model=about.model,
        hasten=about.hasten,
        created=about.created,
        task=about.task,
        signature=about.signature,
        files={name: (bundle.path / name).stat().st_size for name in about.files},
        passes=passes,
        graphs=tuple(views),
        generation=about.generation,
        cache=_cache(bundle) if about.generation is not None else None,
    )


def _cache(bundle: Bundle) -> Cache | None:
    """As the decoder's graph has it; None where there is no package to read that."""
    artifact = bundle.artifact(bundle.chosen)
    try:
        inputs = read_graph(artifact.path(DECODER), with_weights=False).graph.input
    except UnsupportedError:
        return None
    from onnx.helper import tensor_dtype_to_np_dtype

    sizes = {PAST: 0, CROSS: 0}
    for entry in inputs:
        for prefix in sizes:
            if entry.name.startswith(prefix):
                _, heads, _, width = entry.type.tensor_type.shape.dim
                number_bytes = tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type).itemsize
                sizes[prefix] += heads.dim_value * width.dim_value * number_bytes
    return Cache(sizes[PAST], sizes[CROSS], sizes[PAST] * artifact.signature.max_length)


def _view(
    bundle: Bundle, name: str, artifact: Artifact, graph: str, passes: tuple[Pass, ...], *, is_loaded: bool
) -> GraphView:
    file, place = artifact.path(graph), list(artifact.graphs).index(graph)
    notes = []
    counted: Mapping[str, int] = {}
    weights = None
    try:
        counted = _counted(file)
        weights = stored_precision(file) if file.suffix == ".onnx" else None
    except UnsupportedError as error:
        # What the build wrote down is what its last pass left in the file; each goes over all graphs in their order.
        recorded = [step for step in passes if name in step.variants]
        if recorded and file.suffix == ".onnx":
            counted = recorded[place - len(artifact.graphs)].operators_after
        else:
            notes.append(str(error))
    executed: tuple[Execution, ...] = ()
    # A runtime tells of all its graphs at once.
    if is_loaded and place == 0:
        try:
            executed = _executions(artifact)
        except HastenError as error:
            notes.append(f"what it executes is not known: {error}")
    where = file.relative_to(bundle.path).as_posix()
    return GraphView(name, where, dict(counted), executed, tuple(notes), graph, weights)


def _counted(file: Path) -> dict[str, int]:
    if file.suffix == ".onnx":
        return operators(file)
    if file.suffix == ".xml":
        return _openvino_layers(file)
    raise UnsupportedError(f"operators of '{file.suffix}' files cannot be counted")


def _openvino_layers(file: Path) -> dict[str, int]:
    """OpenVINO's graphs are XML beside their weights: no package is needed to read them."""
    try:
        layers = ElementTree.parse(file).iterfind("layers/layer")
        return dict(Counter(layer.attrib["type"] for layer in layers).most_common())
    except (ElementTree.ParseError, KeyError) as error:
        raise BundleError(f"{file} is not an OpenVINO graph: {error}") from error


def _executions(artifact: Artifact) -> tuple[Execution, ...]:
    backend = BACKENDS.get(artifact.variant.backend)
    support = backend.probe(this_machine(), artifact.variant)
    if not support.ok:
        raise UnsupportedError(f"{artifact.variant} does not run here: {support.reason}", hint=support.hint or None)
    if not isinstance(backend, TellsExecutions):
        raise UnsupportedError(f"the backend '{backend.name}' does not tell")
    return tuple(backend.executions(artifact))


def show(bundle: Bundle, variant: str | None = None, port: int | None = None) -> str:
    """Open the graph, or a variant's, in Netron's viewer, and return the viewer's address."""
    try:
        import netron
    except ImportError as error:
        raise missing_package("netron", "showing a graph", "inspect") from error
    if port is not None and not 0 <= port <= _PORTS:
        raise PlanError(f"--port {port} is not between 0 and {_PORTS}")
    if variant is None and bundle.manifest.graphs:
        artifact = bundle.graph()
    else:
        artifact = bundle.artifact(bundle.entry(variant) if variant is not None else bundle.chosen)
    graph = DECODER if DECODER in artifact.graphs else MODEL
    logging.getLogger("netron").setLevel(logging.WARNING)
    try:
        host, taken = netron.start(str(artifact.path(graph)), address=("localhost", port))
    except OSError as error:
        raise StageError(f"port {port} cannot be used: {error.strerror}", hint="--port 0 takes a free one") from error
    return f"http://{host}:{taken}"


def wait_for_viewer() -> None:
    """Until Ctrl-C."""
    import netron

    netron.wait()
