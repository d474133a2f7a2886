"""Token types that are always zero, folded into the word embeddings: a lookup and an addition for every token less.

Exact to the last bit: the same two numbers are added, once here instead of for every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.graph import attribute, copy_graph, read_graph, write_graph

# What moves values without changing them: zeros in, zeros out.
_MOVING = [
    "Cast",
    "Expand",
    "Gather",
    "GatherElements",
    "Identity",
    "Reshape",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
]


def fold_types(graph: Path, file: Path, *, external_data: bool) -> bool:
    """Write the folded graph; the same graph, and False, where no table is looked up at zero alone."""
    if _Folder(read_graph(graph, with_weights=False).graph).find() is None:
        copy_graph(graph, file)
        return False
    model = read_graph(graph)
    _Folder(model.graph).run()
    write_graph(model, file, external_data=external_data)
    return True


class _Folder:
    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._tables = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {output: node for node in graph.node for output in node.output}
        self._inputs = {entry.name for entry in graph.input}
        self._readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def run(self) -> None:
        from onnx import numpy_helper

        found = self.find()
        assert found is not None
        types, words, addition = found
        table, row = self._tables[words.input[0]], numpy_helper.to_array(self._tables[types.input[0]])[0]
        table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) + row, table.name))
        words.output[0] = addition.output[0]
        self._graph.node.remove(addition)

    def find(self) -> tuple[Any, Any, Any] | None:
        """The lookup of types, that of words, and the addition of the two; needs no weights."""
        if any(entry.HasField("g") or entry.graphs for node in self._graph.node for entry in node.attribute):
            return None  # branches may read any tensor without saying so
        for types in self._graph.node:
            if not self._is_lookup(types) or not self._is_zero(types.input[1]):
                continue
            addition = self._only_reader(types.output[0])
            if addition is None or addition.op_type != "Add":
                continue
            words = next(self._makers.get(name) for name in addition.input if name != types.output[0])
            # A table that something else reads too (the head of a masked language model) must stay as it is.
            if words is None or not self._is_lookup(words) or self._only_reader(words.input[0]) is not words:
                continue
            if self._only_reader(words.output[0]) is not addition:
                continue
            # Positions kept in the graph may have one row where the types have all: the sum would lose its rows.
            if words.input[1] not in self._inputs:
                continue
            return types, words, addition
        return None

    def _is_lookup(self, node: Any) -> bool:
        is_table = node.op_type == "Gather" and node.input[0] in self._tables and attribute(node, "axis", 0) == 0
        return is_table and len(self._tables[node.input[0]].dims) == 2

    def _only_reader(self, name: str) -> Any:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and all(entry.name != name for entry in self._graph.output) else None

    def _is_zero(self, name: str) -> bool:
        """Whether a tensor holds zeros whatever the model is given."""
        from onnx import numpy_helper

        maker = self._makers.get(name)
        if maker is None:
            tensor = self._tables.get(name)
            is_here = tensor is not None and tensor.data_location != tensor.EXTERNAL
            return is_here and not numpy_helper.to_array(tensor).any()
        if maker.op_type == "Constant":
            return not numpy_helper.to_array(attribute(maker, "value", None)).any()
        if maker.op_type == "ConstantOfShape":
            value = attribute(maker, "value", None)
            return value is None or not numpy_helper.to_array(value).any()
        return maker.op_type in _MOVING and self._is_zero(maker.input[0])
