"""What every pass over an ONNX graph needs: read it, ask its nodes, write it without what nobody reads."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hasten.core.errors import StageError, missing_package

# Past this, weights lie in a second file: protobuf ends at 2 GiB, and the graph needs some of it.
EXTERNAL_DATA_BYTES = 2**31 - 2**27
# In a file of weights, where each begins, so that it can be mapped; smaller ones stay in the graph.
_ALIGNMENT = 4096
_LEAST_EXTERNAL_BYTES = 1024


def read_graph(file: Path, *, with_weights: bool = True) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise missing_package("onnx", "reading a graph", "inspect") from error
    try:
        return onnx.load(file, load_external_data=with_weights)
    except Exception as error:  # protobuf's own classes
        raise StageError(f"{file} is not an ONNX graph: {error}") from error


def write_graph(model: Any, file: Path, *, external_data: bool) -> None:
    """One file, or the weights in a second one beside it."""
    import onnx

    drop_unread(model.graph)
    onnx.save_model(
        model,
        file,
        save_as_external_data=external_data,
        location=f"{file.name}.data",
        all_tensors_to_one_file=True,
    )


def write_together(models: Mapping[Path, Any]) -> None:
    """Graphs beside each other, their weights in one file behind the first: what several hold is there once."""
    data = next(iter(models)).with_name(f"{next(iter(models)).name}.data")
    found: dict[bytes, int] = {}
    with data.open("wb") as stream:
        for model in models.values():
            drop_unread(model.graph)
            for tensor in model.graph.initializer:
                raw = tensor.raw_data
                if len(raw) < _LEAST_EXTERNAL_BYTES:
                    continue
                digest = hashlib.sha256(raw).digest()
                if digest not in found:
                    stream.seek(-stream.tell() % _ALIGNMENT, os.SEEK_CUR)
                    found[digest] = stream.tell()
                    stream.write(raw)
                tensor.ClearField("raw_data")
                tensor.data_location = tensor.EXTERNAL
                about = {"location": data.name, "offset": str(found[digest]), "length": str(len(raw))}
                for key, value in about.items():
                    entry = tensor.external_data.add()
                    entry.key, entry.value = key, value
    for file, model in models.items():
        file.write_bytes(model.SerializeToString())


def copy_graph(graph: Path, file: Path) -> None:
    """For a pass that had nothing to do: the same files, without reading gigabytes of weights to write them again."""
    for part in (graph, *graph.parent.glob(f"{graph.name}.data*")):
        # The weights keep their name: the graph goes by it.
        target = file if part == graph else file.with_name(part.name)
        if not target.exists():
            shutil.copyfile(part, target)  # no link: onnx takes one for an attack


def is_large(graph: Path) -> bool:
    """Whether a graph and its weights are more than one file of protobuf may hold, or nearly so."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*")) > EXTERNAL_DATA_BYTES


def operators(file: Path) -> dict[str, int]:
    """How often each operator occurs, branches and loops looked into, the most frequent first."""
    graph = read_graph(file, with_weights=False).graph
    return dict(Counter(node.op_type for node in all_nodes(graph)).most_common())


def depends_on_batch(file: Path) -> bool:
    """Whether a row may be answered otherwise beside other rows: one scale is taken for all, as they come."""
    return bool(operators(file).keys() & {"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})


def attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def drop_unread(graph: Any) -> None:
    read = {entry.name for entry in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            # What a branch reads may be of the graph around it.
            read.update(node.input, *(inner.input for inner in _inner_nodes(node)))
            read.update(entry.name for branch in _branches(node) for entry in branch.output)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _branches(node: Any) -> list[Any]:
    return [graph for entry in node.attribute for graph in (entry.g, *entry.graphs)]


def _inner_nodes(node: Any) -> Iterator[Any]:
    for branch in _branches(node):
        yield from all_nodes(branch)


def all_nodes(graph: Any) -> Iterator[Any]:
    """Those in branches and loops too."""
    for node in graph.node:
        yield node
        yield from _inner_nodes(node)
