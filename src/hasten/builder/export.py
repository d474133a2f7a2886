"""PyTorch module to ONNX graph, batch and sequence dynamic."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.builder.load import LoadedModel, quiet_libraries
from hasten.core.errors import StageError, missing_package
from hasten.graph import EXTERNAL_DATA_BYTES

if TYPE_CHECKING:
    from hasten.builder.head import Exportable

# The oldest runtime we support (ONNX Runtime 1.14, in tritonserver of 2023) reads these; newer ones read them too.
OPSET = 17
IR_VERSION = 8


def export(loaded: LoadedModel, file: Path, *, external_data_bytes: int = EXTERNAL_DATA_BYTES) -> None:
    """Trace the module on a ragged example; what tracing could have frozen, `check_graph` finds."""
    try:
        import onnx
        import torch
    except ImportError as error:
        raise missing_package(error.name or "onnx", "exporting", "build") from error

    from hasten.builder.head import example

    module, signature = loaded.module, loaded.signature
    names = [spec.name for spec in signature.inputs]
    feeds = example(names, loaded.tokenizer.pad_id, signature.mask_id, pads_left=signature.pads_left)
    axes = {
        spec.name: {place: name for place, name in enumerate(spec.shape) if isinstance(name, str)}
        for spec in (*signature.inputs, *signature.outputs)
    }
    parts = file.parent / "export"
    parts.mkdir()
    # Eager attention is the one form ONNX Runtime's fusion recognises: SDPA's export hides it behind IsNaN and Where.
    with quiet_libraries(), silent_stdout(), _attention(module.model, "eager"), torch.inference_mode():
        module.has_additive_mask = _takes_additive_mask(module, feeds)
        try:
            # The tracing exporter: nine times faster than dynamo's, and fusion finds attention only in its graphs
            # (docs/decisions/exporter.md).
            torch.onnx.export(
                module,
                tuple(feeds[name] for name in names),
                str(parts / file.name),  # a string: only then does it write weights beside a graph past 2 GiB
                dynamo=False,
                opset_version=OPSET,
                input_names=names,
                output_names=[spec.name for spec in signature.outputs],
                dynamic_axes=axes,
            )
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise StageError(f"{loaded.config.model_type} does not export to ONNX: {first}") from error
        finally:
            # torch.onnx.export leaves modules in train mode in some versions; a reference with dropout is no reference.
            module.eval()
            module.has_additive_mask = False
    _take_branches(parts / file.name, feeds)
    graph = onnx.load(parts / file.name)
    _bound_buckets(graph.graph)
    graph.ir_version = IR_VERSION
    is_large = sum(part.stat().st_size for part in parts.iterdir()) > external_data_bytes
    onnx.save_model(
        graph,
        file,
        save_as_external_data=is_large,
        location=f"{file.name}.data",
        all_tensors_to_one_file=True,
    )
    _remove(parts)


def _takes_additive_mask(module: Exportable, feeds: Mapping[str, Any]) -> bool:
    """Whether the model passes on a mask of (rows, 1, 1, keys): from a plain one, transformers 5 makes one of
    (rows, 1, queries, keys), in sixty operators, and every layer of the graph then adds the larger one."""
    import torch

    config = module.model.config
    if getattr(config, "layer_types", None) or getattr(config, "sliding_window", None):
        return False  # some layers see a part of the text only: they need to make masks of their own
    plain = module(**feeds)
    module.has_additive_mask = True
    try:
        additive = module(**feeds)
        return all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(plain, additive, strict=True))
    except Exception:  # a model that takes no other mask raises whatever it comes to
        return False
    finally:
        module.has_additive_mask = False


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
        session = onnxruntime.InferenceSession(str(asking), providers=["CPUExecutionProvider"])
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
def _attention(model: Any, implementation: str) -> Iterator[None]:
    """Another attention implementation for a while, where the model has a choice."""
    before = getattr(model.config, "_attn_implementation", None)
    if before in (None, implementation) or not hasattr(model, "set_attn_implementation"):
        yield
        return
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def silent_stdout() -> Iterator[None]:
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


def _remove(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
