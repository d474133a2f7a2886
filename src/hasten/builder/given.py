"""A model that comes as an ONNX graph: read, checked, completed for its task. The graph is then the original.

No PyTorch is needed: transformers reads the configuration and the tokenizer without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.backends.onnxruntime import stored_precision
from hasten.builder.detect import EMBEDDING, detect_task
from hasten.builder.libraries import first_line, quiet_libraries
from hasten.builder.load import Facts, Loaded, read_facts
from hasten.builder.sentence_layout import SentenceLayout, read_layout
from hasten.builder.source import ModelDirectory
from hasten.builder.tokenizer import load_tokenizer
from hasten.core.errors import StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.tensors import ATTENTION_MASK, Batch, DType, TensorSpec
from hasten.core.variant import Precision, Variant
from hasten.graph import EXTERNAL_DATA_BYTES
from hasten.tasks import AnyTask

if TYPE_CHECKING:
    from onnx import ModelProto

_BACKEND = "graph"
_FED = ("input_ids", ATTENTION_MASK, "token_type_ids")
# What Optimum calls an embedding that the graph pools itself, and what token vectors are called.
_SENTENCE = "sentence_embedding"
_TOKENS = ("last_hidden_state", "token_embeddings")
_OLDEST_OPSET = 11
# Weights in blocks of a few bits: what precision they stand for cannot be told from the file.
_PACKED = ("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized")


# RoBERTa and its kin count positions from behind that of padding, so texts are shorter than the table. A module's own
# table says so; of a graph, the architecture does.
_COUNTING_FROM_PADDING = (
    "camembert",
    "data2vec-text",
    "longformer",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


@dataclass(frozen=True, slots=True)
class LoadedGraph(Loaded):
    """A model that came as a graph, completed for its task."""

    graph: Path
    precision: Precision
    notes: tuple[str, ...]

    @property
    def baseline(self) -> Variant:
        """What its variants are compared with: the graph itself."""
        return Variant(_BACKEND, self.precision)

    @property
    def source(self) -> Source:
        return Source(self.signature, {MODEL: self.graph})


def load_graph(model: ModelDirectory, plan: Plan, file: Path) -> LoadedGraph:
    """Read the graph in the model's directory and write it, complete, to `file`."""
    try:
        import onnx
        import transformers

        from hasten.builder import attach
    except ImportError as error:
        raise missing_package(error.name or "onnx", "building", "build") from error

    assert model.graph is not None
    task = detect_task(model, plan)
    with quiet_libraries():
        tokenizer = load_tokenizer(model, plan)
        try:
            config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=plan.trust_remote_code)
        except Exception as error:
            raise StageError(f"the configuration of {model.id} does not load: {first_line(error)}") from error
    try:
        graph = onnx.load(model.path / model.graph)
    except Exception as error:  # protobuf's own classes, and weights beside the graph that are not there
        raise StageError(f"{model.id}: {model.graph} does not load: {first_line(error)}") from error
    inputs = _checked_inputs(graph, model)
    notes = [f"{model.graph} as given: opset {attach.opset(graph)}, IR {graph.ir_version}"]
    if attach.has_halves(graph):
        attach.widen(graph.graph)
        notes.append("its half-precision weights widened to fp32")
    found = [output.name for output in graph.graph.output]
    layout = _layout(model, plan, found) if task.name == EMBEDDING else None
    reserved = (config.pad_token_id or 0) + 1 if config.model_type in _COUNTING_FROM_PADDING else 0
    facts = read_facts(inputs, config, tokenizer, task, layout, model, reserved)
    for name in inputs:
        if name not in facts.inputs:
            attach.zeros(graph, name, like="input_ids")  # as transformers does where a tokenizer gives no types
    _complete(graph, task, layout, facts, inputs["input_ids"], model)
    is_large = _size_bytes(graph) > EXTERNAL_DATA_BYTES
    onnx.save_model(graph, file, save_as_external_data=is_large, location=f"{file.name}.data")
    precision = stored_precision(file)
    if precision is not Precision.FP32:
        notes.append(f"its weights are {precision}: it is the original here, not the model it was made from")
    where = f"{model.id}: {model.graph}"
    outputs = _probed(file, facts, inputs, task, Variant(_BACKEND, precision), where)
    labels = len(facts.task.labels)
    if labels and outputs[0].shape[-1] != labels:
        raise StageError(f"{where} has {outputs[0].shape[-1]} labels, and its config.json has {labels}")
    return LoadedGraph(
        task=facts.task,
        tokenizer=facts.tokenizer,
        original_tokenizer=tokenizer,
        signature=facts.signature(inputs, outputs),
        config=config,
        architecture=model.architecture or type(config).__name__.removesuffix("Config"),
        graph=file,
        precision=precision,
        notes=tuple(notes),
    )


def _size_bytes(graph: ModelProto) -> int:
    """Of its weights, which are all of it that counts: the size of a message past 2 GiB cannot be asked for."""
    return sum(len(tensor.raw_data) for tensor in graph.graph.initializer)


def _checked_inputs(graph: ModelProto, model: ModelDirectory) -> dict[str, DType]:
    """What the graph takes, if that is what we can feed: ids by row and position, of any number of both."""
    from onnx import TensorProto

    from hasten.builder.attach import opset

    where = f"{model.id}: {model.graph}"
    if opset(graph) < _OLDEST_OPSET:
        raise UnsupportedError(f"{where} has opset {opset(graph)}, older than {_OLDEST_OPSET}", hint="export it again")
    packed = sorted({node.op_type for node in graph.graph.node} & set(_PACKED))
    if packed:
        raise UnsupportedError(f"{where} has weights of a few bits in blocks ({packed[0]}), which hasten does not know")
    stored = {tensor.name for tensor in graph.graph.initializer}
    kinds = {TensorProto.INT64: DType.INT64, TensorProto.INT32: DType.INT32}
    found: dict[str, DType] = {}
    for entry in graph.graph.input:
        about = entry.type.tensor_type
        if entry.name in stored:
            continue  # old exporters list weights as inputs too
        if entry.name not in _FED:
            raise UnsupportedError(
                f"{where} takes '{entry.name}', which hasten does not feed", hint=f"it feeds {', '.join(_FED)}"
            )
        if about.elem_type not in kinds:
            raise UnsupportedError(f"{where} takes '{entry.name}' as {TensorProto.DataType.Name(about.elem_type)}")
        sizes = [dim.dim_value for dim in about.shape.dim]
        if about.HasField("shape") and len(sizes) != 2:
            raise UnsupportedError(
                f"{where} takes '{entry.name}' with {len(sizes)} axes instead of batch and sequence",
                hint="build it from its weights",
            )
        for axis, size in zip(("batch", "sequence"), sizes, strict=False):
            if size > 0:
                raise UnsupportedError(
                    f"{where} takes '{entry.name}' with a {axis} of exactly {size}",
                    hint=f"export it again with a dynamic {axis}",
                )
        found[entry.name] = kinds[about.elem_type]
    for name in _FED[:2]:
        if name not in found:
            raise UnsupportedError(f"{where} takes no '{name}'")
    return found


def _layout(model: ModelDirectory, plan: Plan, found: list[str]) -> SentenceLayout:
    """How to pool. A graph that pools itself needs no layout, but has prompts and a limit where it has one."""
    if _SENTENCE not in found or plan.pooling is not None:
        return read_layout(model, plan)
    if model.find("modules.json") is None:
        return SentenceLayout(pooling=(), normalize=False)
    return replace(read_layout(model, plan), pooling=())


def _complete(
    graph: ModelProto,
    task: AnyTask,
    layout: SentenceLayout | None,
    facts: Facts,
    ids: DType,
    model: ModelDirectory,
) -> None:
    """The task's outputs and no others, made from the graph's own."""
    from hasten.builder import attach

    found = [output.name for output in graph.graph.output]
    new = attach.Addition(graph)
    outputs: dict[str, str] = {}
    for name in task.outputs:
        wanted = (name,) if layout is None else _TOKENS if layout.pooling else (_SENTENCE,)
        # One output for one is the same by any name; its shape is checked with the first batch.
        is_only = layout is None and len(found) == len(task.outputs) == 1
        source = next((output for output in wanted if output in found), found[0] if is_only else None)
        if source is None:
            hint = f"--task {EMBEDDING} takes its {_SENTENCE}" if _SENTENCE in found else f"it gives {', '.join(found)}"
            raise UnsupportedError(
                f"{model.id}: {model.graph} gives no '{wanted[0]}', which {task.name} needs", hint=hint
            )
        if layout is not None and layout.pooling:
            outputs[name] = attach.pooled(new, source, ATTENTION_MASK, layout)
        elif facts.mask_id is not None:
            of_all = f"{source}_of_all_tokens"
            attach.rename(graph.graph, source, of_all)
            outputs[name] = attach.at_masks(new, of_all, "input_ids", facts.mask_id, ids.value)
        else:
            outputs[name] = source
    new.give(outputs)


def _probed(
    file: Path, facts: Facts, inputs: Mapping[str, DType], task: AnyTask, variant: Variant, where: str
) -> tuple[TensorSpec, ...]:
    """The outputs with their widths as the graph itself shows them, on two batches of different length."""
    blank = tuple(TensorSpec(name, DType.FLOAT32, task.axes) for name in task.outputs)
    artifact = Artifact(variant, facts.signature(inputs, blank), file.parent, {MODEL: file.name})
    widths: list[dict[str, tuple[int, ...]]] = []
    with BACKENDS.get(variant.backend).open(artifact, RunOptions(1)) as session:
        for lengths in ([7, 5], [4, 2]):
            batch = _example(lengths, facts)
            try:
                results = session.run(batch)
            except IndexError as error:  # padding taken out of what has no axis for it
                raise StageError(f"{where} does not answer for each token, as {task.name} does") from error
            for spec in blank:
                count = artifact.signature.count(spec, batch)
                if results[spec.name].shape[:1] != (count,):
                    raise StageError(
                        f"{where} gives '{spec.name}' with {results[spec.name].shape[:1]} entries instead of {count}"
                    )
            widths.append({name: value.shape[1:] for name, value in results.items()})
    if widths[0] != widths[1]:
        raise StageError(f"{where} answers for each token, and {task.name} needs one answer a text")
    return tuple(replace(spec, shape=(*task.axes, *widths[0][spec.name])) for spec in blank)


def _example(lengths: Sequence[int], facts: Facts) -> Batch:
    """Rows with a mask token each, where the task is about them."""
    values = {name: np.zeros(sum(lengths), np.int32) for name in facts.tokenizer.inputs}
    values["input_ids"] += 5
    if facts.mask_id is not None:
        values["input_ids"][[0, lengths[0]]] = facts.mask_id
    return Batch(values, np.asarray(lengths, np.int32))
