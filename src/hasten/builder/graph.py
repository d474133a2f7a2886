"""What every pass over an ONNX graph needs: read it, ask its nodes, write it without what nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.core.errors import missing_package


def read_graph(file: Path, *, with_weights: bool = True) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise missing_package("onnx", "optimizing", "build") from error
    return onnx.load(file, load_external_data=with_weights)


def write_graph(model: Any, file: Path, *, external_data: bool) -> None:
    """One file, or the weights in a second one beside it."""
    import onnx

    _drop_unread(model.graph)
    onnx.save_model(
        model,
        file,
        save_as_external_data=external_data,
        location=f"{file.name}.data",
        all_tensors_to_one_file=True,
    )


def attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def _drop_unread(graph: Any) -> None:
    read = {entry.name for entry in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(node.input)
            for entry in node.attribute:
                read.update(_read_inside(entry.g))
    del graph.node[:]
    graph.node.extend(reversed(kept))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _read_inside(graph: Any) -> set[str]:
    """What a branch reads, of its own or of the graph around it."""
    read = {name for node in graph.node for name in node.input} | {entry.name for entry in graph.output}
    return read.union(*(_read_inside(entry.g) for node in graph.node for entry in node.attribute))
