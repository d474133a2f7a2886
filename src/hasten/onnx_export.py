"""Export a PyTorch module to an ONNX graph by tracing it.

Tracing is nine times faster than dynamo's export, and ONNX Runtime's fusion recognises attention only in traced
graphs (docs/decisions/exporter.md).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hasten.core.errors import HastenError, StageError


def trace(
    module: Any,
    feeds: Mapping[str, Any],
    outputs: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    *,
    opset: int,
    domains: Mapping[str, int] | None = None,
) -> tuple[Any, int]:
    """Trace the module on `feeds` and return the graph and its size in bytes; `axes` names the dynamic axes."""
    import onnx
    import torch

    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        file = Path(work) / "model.onnx"
        try:
            with _silent_stdout():
                torch.onnx.export(
                    module,
                    tuple(feeds.values()),
                    str(file),  # a string: with a Path, torch does not write external weights past 2 GiB
                    dynamo=False,
                    opset_version=opset,
                    input_names=list(feeds),
                    output_names=list(outputs),
                    dynamic_axes={name: dict(named) for name, named in axes.items()},
                    custom_opsets=dict(domains or {}),
                )
        except (OSError, HastenError):
            raise
        except Exception as error:
            raise StageError((str(error).strip() or type(error).__name__).splitlines()[0]) from error
        finally:
            # Some versions of torch.onnx.export leave modules in train mode, and dropout would falsify the reference.
            module.eval()
        size_bytes = sum(part.stat().st_size for part in Path(work).iterdir())
        graph = onnx.load(file)
        if any(node.op_type == "If" for node in graph.graph.node):
            _take_branches(file, feeds)
            graph = onnx.load(file)
    _bound_buckets(graph.graph)
    return graph, size_bytes


def _take_branches(file: Path, feeds: Mapping[str, Any]) -> None:
    """Replace each If node by the branch that the example takes.

    Tracing resolves Python's own conditions, but parts of DeBERTa are scripted and keep If nodes, behind which OpenVINO
    does not know the rank. Their conditions compare the number of queries and keys; `check_graph` detects a graph that
    depends on anything else.
    """
    import onnx
    import onnxruntime

    probe = file.with_name("branches.onnx")
    while True:
        model = onnx.load(file, load_external_data=False)
        nodes = list(model.graph.node)
        conditions = sorted({node.input[0] for node in nodes if node.op_type == "If"})
        if not conditions:
            probe.unlink(missing_ok=True)
            return
        del model.graph.output[:]
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in conditions)
        onnx.save(model, probe)
        options = onnxruntime.SessionOptions()
        # No optimization: the conditions are cheap, and ONNX Runtime fuses float8 QDQ pairs into nodes it cannot run.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(probe), options, providers=["CPUExecutionProvider"])
        input_names = {entry.name for entry in session.get_inputs()}
        inputs = {name: value.numpy() for name, value in feeds.items() if name in input_names}
        values = dict(zip(conditions, session.run(conditions, inputs), strict=True))
        model = onnx.load(file, load_external_data=False)
        del model.graph.node[:]
        for node in nodes:
            model.graph.node.extend(_branch(node, bool(values[node.input[0]])) if node.op_type == "If" else [node])
        onnx.save(model, file)


def _bound_buckets(graph: Any) -> None:
    """Clamp DeBERTa's farthest relative position to its last bucket.

    The bucket is computed from the ratio of two logarithms, which is exactly one for the farthest position. One
    logarithm is PyTorch's, stored as a constant, the other the runtime's: if they differ in the last digit, the ratio
    is rounded up to a bucket that does not exist.
    """
    from onnx import helper

    producers = {output: node for node in graph.node for output in node.output}

    def producer(name: str, op_type: str) -> Any:
        node = producers.get(name)
        return node if node is not None and node.op_type == op_type else None

    for index, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "Ceil" or (scaled := producer(node.input[0], "Mul")) is None:
            continue
        ratio = producer(scaled.input[0], "Div")
        if ratio is not None and producer(ratio.input[0], "Log") is not None:
            bounded = f"{scaled.output[0]}_bounded"
            graph.node.insert(index, helper.make_node("Min", [scaled.output[0], scaled.input[1]], [bounded]))
            node.input[0] = bounded


def _branch(node: Any, condition: bool) -> list[Any]:
    """Return the nodes of one branch, with its results renamed to the outputs of the If node."""
    import onnx

    name = "then_branch" if condition else "else_branch"
    graph = next(attribute.g for attribute in node.attribute if attribute.name == name)
    results = [
        onnx.helper.make_node("Identity", [inner.name], [outer])
        for inner, outer in zip(graph.output, node.output, strict=True)
    ]
    return [*graph.node, *results]


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Discard what torch writes to stdout: the whole graph, when it meets an operator that ONNX does not have."""
    sys.stdout.flush()
    before = os.dup(1)
    try:
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), 1)
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)
