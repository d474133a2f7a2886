"""Fold token type embeddings that are always type zero into the word embeddings: saves a lookup and an addition.

Exact to the last bit: the same two numbers are added, once here instead of for every token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.onnx_graph import attribute, copy_graph, has_external_data, read_graph, write_graph

# Operators that move values without changing them: zeros stay zeros.
_VALUE_PRESERVING = "Cast Expand Gather GatherElements Identity Reshape Slice Squeeze Transpose Unsqueeze"


def fold_types(graph: Path, file: Path) -> bool:
    """Write the folded graph and return True; copy the graph and return False if token types vary or are absent."""
    if _TypeFolder(read_graph(graph, with_weights=False).graph).find() is None:
        copy_graph(graph, file)
        return False
    model = read_graph(graph)
    _TypeFolder(model.graph).run()
    write_graph(model, file, external_data=has_external_data(graph))
    return True


class _TypeFolder:
    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._tables = {tensor.name: tensor for tensor in graph.initializer}
        self._producers = {output: node for node in graph.node for output in node.output}
        self._inputs = {entry.name for entry in graph.input}
        self._readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def run(self) -> None:
        from onnx import numpy_helper

        match = self.find()
        assert match is not None
        types, words, addition = match
        table, row = self._tables[words.input[0]], numpy_helper.to_array(self._tables[types.input[0]])[0]
        table.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(table) + row, table.name))
        words.output[0] = addition.output[0]
        self._graph.node.remove(addition)

    def find(self) -> tuple[Any, Any, Any] | None:
        """Return the lookup of types, the lookup of words and their addition. Does not need weights."""
        if any(entry.HasField("g") or entry.graphs for node in self._graph.node for entry in node.attribute):
            return None  # subgraphs may read any tensor without listing it as an input
        for types in self._graph.node:
            if not self._is_lookup(types) or not self._is_zero(types.input[1]):
                continue
            addition = self._only_reader(types.output[0])
            if addition is None or addition.op_type != "Add":
                continue
            words = next(self._producers.get(name) for name in addition.input if name != types.output[0])
            # A table with another reader (the head of a masked language model) must not change.
            if words is None or not self._is_lookup(words) or self._only_reader(words.input[0]) is not words:
                continue
            if self._only_reader(words.output[0]) is not addition:
                continue
            # Positions stored in the graph may have one row where the types have all: the sum would lose its rows.
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
        """Return whether a tensor is zero for every input of the model."""
        from onnx import numpy_helper

        producer = self._producers.get(name)
        if producer is None:
            tensor = self._tables.get(name)
            is_stored = tensor is not None and tensor.data_location != tensor.EXTERNAL
            return is_stored and not numpy_helper.to_array(tensor).any()
        if producer.op_type in ("Constant", "ConstantOfShape"):
            value = attribute(producer, "value", None)
            is_default = value is None and producer.op_type == "ConstantOfShape"
            return is_default or (value is not None and not numpy_helper.to_array(value).any())
        return producer.op_type in _VALUE_PRESERVING.split() and self._is_zero(producer.input[0])
