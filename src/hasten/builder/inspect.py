"""Looking into a finished bundle: what it takes and gives, what the passes made of its graph, what really runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hasten.backends import BACKENDS, MODEL, Artifact, TellsExecutions
from hasten.bundle import Bundle
from hasten.bundle.manifest import ModelOrigin
from hasten.core.errors import BundleError, HastenError, PlanError, StageError, UnsupportedError, missing_package
from hasten.core.execution import Execution
from hasten.core.hardware import this_machine
from hasten.core.report import Pass
from hasten.core.tensors import Signature
from hasten.graph import operators
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


def inspect(bundle: Bundle, variant: str | None = None) -> Inspection:
    """All of it, or one variant, which is then loaded to see what its runtime makes of it."""
    bundle.check()
    about, passes = bundle.manifest, bundle.report.passes
    if variant is not None:
        artifact = bundle.artifact(bundle.entry(variant))
        passes = tuple(step for step in passes if variant in step.variants)
        views = [_view(bundle, variant, artifact, graph, passes, is_loaded=True) for graph in artifact.graphs]
    else:
        artifacts = {GRAPH: bundle.graph()} | {entry.name: bundle.artifact(entry) for entry in about.variants}
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
    )


def _view(
    bundle: Bundle, name: str, artifact: Artifact, graph: str, passes: tuple[Pass, ...], *, is_loaded: bool
) -> GraphView:
    file = artifact.path(graph)
    notes = []
    counted: Mapping[str, int] = {}
    try:
        counted = _counted(file)
    except UnsupportedError as error:
        # What the build wrote down is what its last pass left in the file.
        recorded = [step for step in passes if name in step.variants]
        if recorded and file.suffix == ".onnx":
            counted = recorded[-1].operators_after
        else:
            notes.append(str(error))
    executed: tuple[Execution, ...] = ()
    if is_loaded and graph == MODEL:
        try:
            executed = _executions(artifact)
        except HastenError as error:
            notes.append(f"what it executes is not known: {error}")
    return GraphView(name, file.relative_to(bundle.path).as_posix(), dict(counted), executed, tuple(notes))


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
    artifact = bundle.graph() if variant is None else bundle.artifact(bundle.entry(variant))
    logging.getLogger("netron").setLevel(logging.WARNING)
    try:
        host, taken = netron.start(str(artifact.path()), address=("localhost", port))
    except OSError as error:
        raise StageError(f"port {port} cannot be used: {error.strerror}", hint="--port 0 takes a free one") from error
    return f"http://{host}:{taken}"


def wait_for_viewer() -> None:
    """Until Ctrl-C."""
    import netron

    netron.wait()
