"""Read, query and write ONNX graphs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hasten.core.errors import StageError, missing_package

# Larger graphs store their weights in a second file: protobuf is limited to 2 GiB, and the nodes need part of it.
EXTERNAL_DATA_BYTES = 2**31 - 2**27
# Weights in an external file are page-aligned so that they can be memory-mapped; small tensors stay in the graph.
_ALIGNMENT = 4096
_MIN_EXTERNAL_BYTES = 1024
# Passes over graphs read shapes, positions and biases of this size without loading the weights.
_INLINE_BYTES = 2**18


def read_graph(file: Path, *, with_weights: bool = True) -> Any:
    """Load an ONNX model; without weights, external data is not read."""
    try:
        import onnx
    except ImportError as error:
        raise missing_package("onnx", "reading a graph", "inspect") from error
    try:
        return onnx.load(file, load_external_data=with_weights)
    except Exception as error:  # protobuf's own classes
        raise StageError(f"{file} is not an ONNX graph: {error}") from error


def write_graph(model: Any, file: Path, *, external_data: bool) -> None:
    """Write a model without unused nodes and weights, as one file or with its weights in a second file beside it."""
    import onnx

    drop_unused(model.graph)
    if not external_data:
        _write_one_file(model, file)
        return
    name = f"{file.name}.data"
    onnx.save_model(model, file, save_as_external_data=True, location=name, size_threshold=_INLINE_BYTES)


def merge_weights(graph: Path) -> None:
    """Store a graph and its weights as one file, unless it is large."""
    if not has_external_data(graph) or is_large(graph):
        return
    model = read_graph(graph, with_weights=any(map(_branches, read_graph(graph, with_weights=False).graph.node)))
    merged = graph.with_name(f"{graph.name}.merged")
    _write_one_file(model, merged)
    graph.with_name(f"{graph.name}.data").unlink()
    merged.replace(graph)


def _write_one_file(model: Any, file: Path) -> None:
    """Write a model and its weights, of which those in an external file are read one by one.

    protobuf would build the whole file in memory, in three further copies of the weights.
    """
    import onnx

    outer, inner = onnx.ModelProto(), onnx.GraphProto()
    for copy, message, streamed in ((outer, model, "graph"), (inner, model.graph, "initializer")):
        for field, value in message.ListFields():
            if field.name == streamed:
                continue
            if isinstance(value, str | int):
                setattr(copy, field.name, value)
            else:
                getattr(copy, field.name).extend(value)
    beginning = inner.SerializeToString()
    tensors = [_TensorRecord(tensor, file.parent) for tensor in model.graph.initializer]
    size = len(beginning) + sum(tensor.size for tensor in tensors)
    with file.open("wb") as stream:
        stream.write(outer.SerializeToString())
        stream.write(_field(onnx.ModelProto, "graph", size))
        stream.write(beginning)
        for tensor in tensors:
            tensor.write(stream)


class _TensorRecord:
    """A weight in protobuf's encoding: a header and the values, which may still be in an external file."""

    def __init__(self, tensor: Any, folder: Path) -> None:
        import onnx

        self._folder, self._location = folder, {entry.key: entry.value for entry in tensor.external_data}
        self._values = tensor.raw_data
        length = int(self._location["length"]) if self._location else len(self._values)
        if length:
            header = onnx.TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            content = header.SerializeToString() + _field(onnx.TensorProto, "raw_data", length)
        else:
            content = tensor.SerializeToString()
        self._beginning = _field(onnx.GraphProto, "initializer", len(content) + length) + content
        self.size = len(self._beginning) + length

    def write(self, stream: BinaryIO) -> None:
        """Write the record."""
        stream.write(self._beginning)
        if not self._location:
            stream.write(self._values)
            return
        with (self._folder / self._location["location"]).open("rb") as data:
            data.seek(int(self._location.get("offset", 0)))
            stream.write(data.read(int(self._location["length"])))


def _field(message: Any, name: str, size: int) -> bytes:
    """Return protobuf's tag and length of a field that holds `size` bytes."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    """Return a number in groups of seven bits, the lowest first; all but the last have the highest bit set."""
    groups = [value >> shift & 127 for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def write_merged(models: Mapping[Path, Any]) -> None:
    """Write several graphs that share one weight file, named after the first; equal tensors are stored once."""
    first = next(iter(models))
    data = first.with_name(f"{first.name}.data")
    offsets: dict[bytes, int] = {}
    with data.open("wb") as stream:
        for model in models.values():
            drop_unused(model.graph)
            for tensor in model.graph.initializer:
                raw = tensor.raw_data
                if len(raw) < _MIN_EXTERNAL_BYTES:
                    continue
                digest = hashlib.sha256(raw).digest()
                if digest not in offsets:
                    stream.seek(-stream.tell() % _ALIGNMENT, os.SEEK_CUR)
                    offsets[digest] = stream.tell()
                    stream.write(raw)
                tensor.ClearField("raw_data")
                tensor.data_location = tensor.EXTERNAL
                location = {"location": data.name, "offset": str(offsets[digest]), "length": str(len(raw))}
                for key, value in location.items():
                    tensor.external_data.add(key=key, value=value)
    for file, model in models.items():
        file.write_bytes(model.SerializeToString())


def copy_graph(graph: Path, file: Path) -> None:
    """Copy a graph and its weight file unchanged, without parsing gigabytes of weights."""
    for part in (graph, *graph.parent.glob(f"{graph.name}.data*")):
        # The weight file keeps its name: the graph refers to it.
        target = file if part == graph else file.with_name(part.name)
        if not target.exists():
            shutil.copyfile(part, target)  # not a link: onnx rejects links as an attack


def graph_bytes(graph: Path) -> int:
    """Return the size of a graph with its weights."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))


def is_large(graph: Path) -> bool:
    """Return whether a graph with its weights is too large, or nearly so, for one protobuf file."""
    return graph_bytes(graph) > EXTERNAL_DATA_BYTES


def has_external_data(graph: Path) -> bool:
    """Return whether the weights of a graph that hasten wrote are in a second file."""
    return graph.with_name(f"{graph.name}.data").exists()


def operators(file: Path) -> dict[str, int]:
    """Count the operators of a graph, including those in branches and loops, the most frequent first."""
    graph = read_graph(file, with_weights=False).graph
    return dict(Counter(node.op_type for node in all_nodes(graph)).most_common())


def depends_on_batch(file: Path) -> bool:
    """Return whether a row's outputs may depend on the batch: dynamic quantization takes one scale for all rows."""
    return bool(operators(file).keys() & {"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})


def opset_version(model: Any) -> int:
    """Return the version of the standard operators, or 0 if the model does not import them."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def attribute(node: Any, name: str, default: Any) -> Any:
    """Return the value of a node's attribute, or `default` if the node does not have it."""
    from onnx import helper

    return next((helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def drop_unused(graph: Any) -> None:
    """Remove nodes and weights that no output depends on, in place."""
    read = {entry.name for entry in graph.output}
    used = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            used.append(node)
            # A branch may read tensors of the enclosing graph.
            read.update(node.input)
            for branch in _branches(node):
                read.update(entry.name for entry in branch.output)
                read.update(*(inner.input for inner in all_nodes(branch)))
    del graph.node[:]
    graph.node.extend(reversed(used))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in read]:
        graph.initializer.remove(tensor)


def _branches(node: Any) -> list[Any]:
    return [graph for entry in node.attribute for graph in (entry.g, *entry.graphs)]


def all_nodes(graph: Any) -> Iterator[Any]:
    """Yield all nodes of a graph, including those in branches and loops."""
    for node in graph.node:
        yield node
        for branch in _branches(node):
            yield from all_nodes(branch)
