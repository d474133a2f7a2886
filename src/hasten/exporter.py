"""The tracing exporter: a PyTorch module that takes tensors by name, as an ONNX graph.

Tracing is nine times faster than dynamo's export, and ONNX Runtime's fusion finds attention only in its graphs
(docs/decisions/exporter.md).
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
    """The graph of what the module does with `feeds`, and its size in bytes; `axes` name what may be of any size."""
    import onnx
    import torch

    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        file = Path(work) / "model.onnx"
        try:
            with _silent_stdout():
                torch.onnx.export(
                    module,
                    tuple(feeds.values()),
                    str(file),  # a string: only then does it write weights beside a graph past 2 GiB
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
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StageError(first) from error
        finally:
            # torch.onnx.export leaves modules in train mode in some versions; a reference with dropout is no reference.
            module.eval()
        _take_branches(file, feeds)
        size_bytes = sum(part.stat().st_size for part in Path(work).iterdir())
        graph = onnx.load(file)
    _bound_buckets(graph.graph)
    return graph, size_bytes


def _take_branches(file: Path, feeds: Mapping[str, Any]) -> None:
    """Put the branch that the example takes in the place of each If.

    Tracing does so with Python's own, but parts of DeBERTa are scripted and keep theirs, whose rank OpenVINO then does
    not know. They ask whether queries are as many as keys; one that asks about more, `check_graph` finds.
    """
    import onnx
    import onnxruntime

    asking = file.with_name("branches.onnx")
    while True:
        model = onnx.load(file, load_external_data=False)
        nodes = list(model.graph.node)
        conditions = sorted({node.input[0] for node in nodes if node.op_type == "If"})
        if not conditions:
            asking.unlink(missing_ok=True)
            return
        del model.graph.output[:]
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in conditions)
        onnx.save(model, asking)
        options = onnxruntime.SessionOptions()
        # As written: what is asked about is small, and ONNX Runtime fuses pairs of float8 into what it cannot run.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(str(asking), options, providers=["CPUExecutionProvider"])
        wanted = {entry.name for entry in session.get_inputs()}
        given = {name: value.numpy() for name, value in feeds.items() if name in wanted}
        answers = dict(zip(conditions, session.run(conditions, given), strict=True))
        model = onnx.load(file, load_external_data=False)
        del model.graph.node[:]
        for node in nodes:
            model.graph.node.extend(_branch(node, bool(answers[node.input[0]])) if node.op_type == "If" else [node])
        onnx.save(model, file)


def _bound_buckets(graph: Any) -> None:
    """Keep DeBERTa's farthest relative position in its last bucket.

    It is found by the ratio of two logarithms, which there are the same: one. But PyTorch's is in the graph already,
    the other is the runtime's, and where they differ in their last digit the ratio is rounded up to a bucket more.
    """
    from onnx import helper

    makers = {output: node for node in graph.node for output in node.output}

    def made_by(name: str, kind: str) -> Any:
        node = makers.get(name)
        return node if node is not None and node.op_type == kind else None

    for place, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "Ceil" or (scaled := made_by(node.input[0], "Mul")) is None:
            continue
        ratio = made_by(scaled.input[0], "Div")
        if ratio is not None and made_by(ratio.input[0], "Log") is not None:
            bounded = f"{scaled.output[0]}_bounded"
            graph.node.insert(place, helper.make_node("Min", [scaled.output[0], scaled.input[1]], [bounded]))
            node.input[0] = bounded


def _branch(node: Any, answer: bool) -> list[Any]:
    """The nodes of one branch, their results under the names of the whole."""
    import onnx

    name = "then_branch" if answer else "else_branch"
    graph = next(attribute.g for attribute in node.attribute if attribute.name == name)
    results = [
        onnx.helper.make_node("Identity", [inner.name], [outer])
        for inner, outer in zip(graph.output, node.output, strict=True)
    ]
    return [*graph.node, *results]


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Where an operator has no counterpart, torch writes the whole graph to the descriptor that is for results."""
    sys.stdout.flush()
    before = os.dup(1)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(before, 1)
        os.close(before)
