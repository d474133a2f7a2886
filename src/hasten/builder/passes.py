"""What each pass did to the graph, counted in the files before it and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hasten.core.errors import StageError, missing_package
from hasten.core.report import Pass, Unfused


def record(
    name: str,
    before: Path | None,
    after: Path,
    *,
    variants: Iterable[str],
    notes: Sequence[str] = (),
    left: Sequence[Unfused] = (),
) -> Pass:
    """A pass takes a graph file and writes another; the first one has none to take."""
    counted = operators(before) if before is not None else {}
    return Pass(name, counted, operators(after), tuple(variants), tuple(notes), tuple(left))


def operators(graph: Path) -> dict[str, int]:
    """How often each operator occurs in an ONNX file, branches and loops looked into, the most frequent first."""
    try:
        import onnx
    except ImportError as error:
        raise missing_package("onnx", "counting a graph's operators", "inspect") from error
    try:
        model = onnx.load(graph, load_external_data=False)
    except Exception as error:  # protobuf's own classes
        raise StageError(f"{graph} is not an ONNX graph: {error}") from error
    return dict(Counter(node.op_type for node in _nodes(model.graph)).most_common())


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
