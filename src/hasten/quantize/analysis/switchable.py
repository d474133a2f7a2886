"""Run a graph with some of its operators quantized, chosen anew at each run: one session for any number of choices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.core.batching import batch_by_length
from hasten.core.errors import StageError
from hasten.core.tensors import Batch, IntArray, Outputs, Signature, gather, pad, unpad
from hasten.onnx_graph import read_graph
from hasten.quantize.analysis.matmuls import GraphIndex
from hasten.quantize.analysis.session import open_in_memory

# The input that says which operators are quantized. No exporter uses this prefix in names.
_SWITCHES = "hasten/switches"
_BATCH_TOKENS = 1024


class SwitchableGraph:
    """A float graph and its quantized form in one session; each operator runs in one of its two forms."""

    def __init__(self, graph: Path, quantized: Path, names: Sequence[str], signature: Signature) -> None:
        model = read_graph(graph)
        self.names = _add_switches(model, read_graph(quantized), names)
        self._signature = signature
        self._session = open_in_memory(model, graph.parent, is_optimized=True)
        self._inputs = {entry.name for entry in self._session.get_inputs()}

    def outputs(self, rows: Batch, quantized: Collection[str], groups: Sequence[IntArray] | None = None) -> Outputs:
        """Return the outputs with these operators quantized and all others in float.

        Without `groups`, rows of similar length run together.
        """
        names = [spec.name for spec in self._signature.outputs]
        switches = np.array([name in quantized for name in self.names])
        parts = []
        for group in groups or batch_by_length(rows.lengths, budget=_BATCH_TOKENS):
            batch = rows.take(group)
            feeds = {name: values for name, values in pad(batch, self._signature).items() if name in self._inputs}
            try:
                values = self._session.run(names, {**feeds, _SWITCHES: switches})
            except Exception as error:  # the binding raises its own unrelated classes
                raise StageError(f"the graph fails on calibration rows: {error}") from error
            parts.append((group, unpad(dict(zip(names, values, strict=True)), batch, self._signature)))
        return gather(parts, rows, self._signature)


def _add_switches(model: Any, quantized: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Replace each named operator by a choice between it and its quantized form; return those that have one."""
    from onnx import TensorProto, helper

    index, quantized_index = GraphIndex(model), GraphIndex(quantized)
    known = {*index.producers, *index.constants, *(entry.name for entry in model.graph.input)}
    needed: dict[str, Any] = {}
    switched: list[str] = []
    nodes = []
    for node in model.graph.node:
        form = _quantized_form(node, quantized_index, known) if node.name in names else []
        if not form or (len(form) == 1 and form[0].op_type == node.op_type):
            nodes.append(node)  # the quantizer leaves it in float
            continue
        needed |= {
            name: quantized_index.constants[name]
            for each in form
            for name in each.input
            if name not in known and name in quantized_index.constants
        }
        choice = f"{_SWITCHES}/{node.name}"
        position = index.add_constant(f"{choice}/position", np.array(len(switched), np.int64))
        outputs = [name for name in node.output if name]
        branches = {
            "then_branch": _branch(f"{choice}/quantized", form, outputs),
            "else_branch": _branch(f"{choice}/float", [node], outputs),
        }
        nodes += [
            helper.make_node("Gather", [_SWITCHES, position], [choice], axis=0),
            helper.make_node("If", [choice], outputs, name=node.name, **branches),
        ]
        switched.append(node.name)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(needed.values())
    model.graph.input.append(helper.make_tensor_value_info(_SWITCHES, TensorProto.BOOL, [len(switched)]))
    for entry in quantized.opset_import:
        if entry.domain not in {own.domain for own in model.opset_import}:
            model.opset_import.append(entry)
    return tuple(switched)


def _quantized_form(node: Any, quantized: GraphIndex, known: set[str]) -> list[Any]:
    """Return the nodes of the quantized graph that compute the outputs of a float node from the same inputs."""
    outputs = {name for name in node.output if name}
    form: set[str] = set()
    pending = list(outputs)
    while pending:
        producer = quantized.producers.get(pending.pop())
        if producer is None or producer.output[0] in form:
            continue
        form.add(producer.output[0])
        pending += [name for name in producer.input if name and (name not in known or name in outputs)]
    return [each for each in quantized.graph.node if each.output[0] in form]


def _branch(name: str, nodes: Sequence[Any], outputs: Sequence[str]) -> Any:
    """Return a graph of copies of these nodes, with other names for the outputs: a branch must not shadow a tensor."""
    from onnx import GraphProto, NodeProto, ValueInfoProto

    renamed = {output: f"{name}/{output}" for output in outputs}
    branch = GraphProto(name=name, output=[ValueInfoProto(name=renamed[output]) for output in outputs])
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        for names in (copy.input, copy.output):
            names[:] = [renamed.get(each, each) for each in names]
        branch.node.append(copy)
    return branch
