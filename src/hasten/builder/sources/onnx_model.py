"""Load a model from an ONNX graph: read it, check it, and complete it for its task. The graph is the baseline.

PyTorch is not needed: transformers reads the configuration and the tokenizer without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hasten.backends import BACKENDS, MODEL, Artifact, RunOptions, Source
from hasten.backends.onnxruntime import stored_precision
from hasten.builder.sources.cross_encoder import read_scoring_layout
from hasten.builder.sources.detect import EMBEDDING, RANKING, detect_task
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.pytorch_model import Loaded, ModelFacts, read_facts
from hasten.builder.sources.quiet import first_line, quiet_libraries
from hasten.builder.sources.sentence_layout import SentenceLayout, read_layout
from hasten.builder.sources.tokenizer import load_fast_tokenizer
from hasten.core.errors import StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.tensors import ATTENTION_MASK, Batch, DType, TensorSpec
from hasten.core.variant import Precision, Variant
from hasten.onnx_graph import EXTERNAL_DATA_BYTES, opset_version
from hasten.tasks import TASKS, AnyTask

if TYPE_CHECKING:
    from onnx import ModelProto

_BACKEND = "graph"
_SUPPORTED_INPUTS = ("input_ids", ATTENTION_MASK, "token_type_ids")
# Optimum's output name of embeddings that the graph pools, and the names of token vectors.
_SENTENCE_OUTPUT = "sentence_embedding"
_TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
_MIN_OPSET = 11
# Block-quantized weights: the file does not state the precision they stand for.
_BLOCK_QUANTIZED = ("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized")


# RoBERTa-like models count positions from the padding position, so texts are shorter than the position table. A module
# shows this in its table; for a graph, the architecture decides.
_POSITIONS_AFTER_PADDING = (
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
    """A model loaded from a graph, which is completed for its task."""

    graph: Path
    precision: Precision
    notes: tuple[str, ...]

    @property
    def baseline(self) -> Variant:
        """Return the variant that others are compared with: the graph itself."""
        return Variant(_BACKEND, self.precision)

    @property
    def source(self) -> Source:
        """Return the source that variants are built from."""
        return Source(self.signature, {MODEL: self.graph})


def load_graph(model: ModelDirectory, plan: Plan, file: Path) -> LoadedGraph:
    """Read the graph in the model's directory and write it, complete, to `file`."""
    try:
        import onnx
        import transformers

        from hasten.builder.sources import onnx_heads
    except ImportError as error:
        raise missing_package(error.name or "onnx", "building", "build") from error

    assert model.graph is not None
    label = f"{model.id}: {model.graph}"
    task = TASKS.get(detect_task(model, plan))
    if task.name == RANKING and read_scoring_layout(model) is not None:
        raise UnsupportedError(f"{model.id} scores with layers outside of its graph", hint="build it from its weights")
    with quiet_libraries():
        tokenizer = load_fast_tokenizer(model, plan)
        try:
            config = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=plan.trust_remote_code)
        except Exception as error:
            raise StageError(f"the configuration of {model.id} does not load: {first_line(error)}") from error
    try:
        graph = onnx.load(model.path / model.graph)
    except Exception as error:  # protobuf's own classes, or external weights that are missing
        raise StageError(f"{label} does not load: {first_line(error)}") from error
    inputs = _check_inputs(graph, label)
    notes = [f"{model.graph}: opset {opset_version(graph)}, IR {graph.ir_version}"]
    if onnx_heads.has_half_precision(graph):
        onnx_heads.widen_to_fp32(graph.graph)
        notes.append("half-precision weights widened to fp32")
    output_names = [output.name for output in graph.graph.output]
    layout = _layout(model, plan, output_names) if task.name == EMBEDDING else None
    reserved = (config.pad_token_id or 0) + 1 if config.model_type in _POSITIONS_AFTER_PADDING else 0
    facts = read_facts(inputs, config, tokenizer, task, layout, model, reserved)
    for name in inputs:
        if name not in [spec.name for spec in facts.signature.inputs]:
            # As transformers does if the tokenizer returns no token types.
            onnx_heads.replace_input_with_zeros(graph.graph, name, like="input_ids")
    _complete_outputs(graph, task, layout, facts, inputs["input_ids"], label)
    # The size of the weights: protobuf cannot compute the size of a message beyond 2 GiB.
    is_large = sum(len(tensor.raw_data) for tensor in graph.graph.initializer) > EXTERNAL_DATA_BYTES
    onnx.save_model(graph, file, save_as_external_data=is_large, location=f"{file.name}.data")
    precision = stored_precision(file)
    if precision is not Precision.FP32:
        notes.append(f"its weights are {precision}: this graph is the baseline, not the model it was quantized from")
    outputs = _probe_outputs(file, facts, task, Variant(_BACKEND, precision), label)
    labels = len(facts.task.labels)
    if labels and outputs[0].shape[-1] != labels:
        raise StageError(f"{label} has {outputs[0].shape[-1]} labels, and its config.json has {labels}")
    return LoadedGraph(
        task=facts.task,
        tokenizer=facts.tokenizer,
        original_tokenizer=tokenizer,
        signature=replace(facts.signature, outputs=outputs),
        config=config,
        architecture=model.architecture or type(config).__name__.removesuffix("Config"),
        graph=file,
        precision=precision,
        notes=tuple(notes),
    )


def _check_inputs(graph: ModelProto, label: str) -> dict[str, DType]:
    """Return the graph's inputs. Raise unless they are ids by row and position, both of dynamic size."""
    from onnx import TensorProto

    if opset_version(graph) < _MIN_OPSET:
        raise UnsupportedError(
            f"{label} has opset {opset_version(graph)}, older than {_MIN_OPSET}", hint="export it again"
        )
    packed = sorted({node.op_type for node in graph.graph.node} & set(_BLOCK_QUANTIZED))
    if packed:
        raise UnsupportedError(f"{label} has block-quantized weights ({packed[0]}), which are not supported")
    stored = {tensor.name for tensor in graph.graph.initializer}
    dtypes = {TensorProto.INT64: DType.INT64, TensorProto.INT32: DType.INT32}
    inputs: dict[str, DType] = {}
    for entry in graph.graph.input:
        tensor_type = entry.type.tensor_type
        if entry.name in stored:
            continue  # old exporters list weights as inputs too
        if entry.name not in _SUPPORTED_INPUTS:
            raise UnsupportedError(
                f"{label} has an unsupported input '{entry.name}'", hint=f"supported are {', '.join(_SUPPORTED_INPUTS)}"
            )
        if tensor_type.elem_type not in dtypes:
            raise UnsupportedError(
                f"{label} has the input '{entry.name}' as {TensorProto.DataType.Name(tensor_type.elem_type)}"
            )
        sizes = [dim.dim_value for dim in tensor_type.shape.dim]
        if tensor_type.HasField("shape") and len(sizes) != 2:
            raise UnsupportedError(
                f"{label} has the input '{entry.name}' with {len(sizes)} axes instead of batch and sequence",
                hint="build it from its weights",
            )
        for axis, size in zip(("batch", "sequence"), sizes, strict=False):
            if size > 0:
                raise UnsupportedError(
                    f"{label} has the input '{entry.name}' with a fixed {axis} of {size}",
                    hint=f"export it again with a dynamic {axis}",
                )
        inputs[entry.name] = dtypes[tensor_type.elem_type]
    for name in _SUPPORTED_INPUTS[:2]:
        if name not in inputs:
            raise UnsupportedError(f"{label} has no input '{name}'")
    return inputs


def _layout(model: ModelDirectory, plan: Plan, output_names: list[str]) -> SentenceLayout:
    """Return the layout, without pooling if the graph pools; its prompts and maximum length apply even then."""
    pools = _SENTENCE_OUTPUT in output_names and plan.pooling is None
    if pools and model.find("modules.json") is None:
        return SentenceLayout(pooling=(), normalize=False)
    layout = read_layout(model, plan)
    if not layout.pools_prompt:
        raise UnsupportedError(
            f"{model.id} leaves its prompt out of the pooling, which its graph cannot", hint="build it from its weights"
        )
    return replace(layout, pooling=()) if pools else layout


def _complete_outputs(
    graph: ModelProto, task: AnyTask, layout: SentenceLayout | None, facts: ModelFacts, ids: DType, label: str
) -> None:
    """Replace the graph's outputs by those of the task, computed from them."""
    from hasten.builder.sources import onnx_heads

    existing = [output.name for output in graph.graph.output]
    new = onnx_heads.GraphAddition(graph)
    outputs: dict[str, str] = {}
    for name in task.outputs:
        candidates = (name,) if layout is None else _TOKEN_OUTPUTS if layout.pooling else (_SENTENCE_OUTPUT,)
        # A single output may have any name; its shape is checked with the first batch.
        is_only = layout is None and len(existing) == len(task.outputs) == 1
        source = next((output for output in candidates if output in existing), existing[0] if is_only else None)
        if source is None:
            hint = f"its outputs are {', '.join(existing)}"
            if _SENTENCE_OUTPUT in existing:
                hint = f"--task {EMBEDDING} uses its {_SENTENCE_OUTPUT}"
            raise UnsupportedError(f"{label} has no output '{candidates[0]}', which {task.name} needs", hint=hint)
        if layout is not None and layout.pooling:
            outputs[name] = onnx_heads.add_pooling(new, source, ATTENTION_MASK, layout)
        elif facts.signature.mask_id is not None:
            all_tokens = f"{source}_of_all_tokens"
            onnx_heads.rename_tensor(graph.graph, source, all_tokens)
            outputs[name] = onnx_heads.gather_mask_tokens(
                new, all_tokens, "input_ids", facts.signature.mask_id, ids.value
            )
        else:
            outputs[name] = source
    new.set_outputs(outputs)


def _probe_outputs(
    file: Path, facts: ModelFacts, task: AnyTask, variant: Variant, label: str
) -> tuple[TensorSpec, ...]:
    """Return the outputs with their widths, from running the graph on two batches of different length."""
    specs = tuple(TensorSpec(name, DType.FLOAT32, task.axes) for name in task.outputs)
    artifact = Artifact(variant, replace(facts.signature, outputs=specs), file.parent, {MODEL: file.name})
    widths: list[dict[str, tuple[int, ...]]] = []
    with BACKENDS.get(variant.backend).open(artifact, RunOptions(1)) as session:
        for lengths in ([7, 5], [4, 2]):
            batch = _example_batch(lengths, facts)
            try:
                results = session.run(batch)
            except IndexError as error:  # unpadding an output that has no sequence axis
                raise StageError(f"{label} does not return one output per token, as {task.name} needs") from error
            for spec in specs:
                count = artifact.signature.count(spec, batch)
                if results[spec.name].shape[:1] != (count,):
                    raise StageError(
                        f"{label} returns '{spec.name}' with {results[spec.name].shape[:1]} entries instead of {count}"
                    )
            widths.append({name: value.shape[1:] for name, value in results.items()})
    if widths[0] != widths[1]:
        raise StageError(f"{label} returns one output per token, and {task.name} needs one per text")
    return tuple(replace(spec, shape=(*task.axes, *widths[0][spec.name])) for spec in specs)


def _example_batch(lengths: Sequence[int], facts: ModelFacts) -> Batch:
    """Return rows of the given lengths, with a mask token each if the task needs one."""
    values = {name: np.zeros(sum(lengths), np.int32) for name in facts.tokenizer.inputs}
    values["input_ids"] += 5
    if facts.signature.mask_id is not None:
        values["input_ids"][[0, lengths[0]]] = facts.signature.mask_id
    return Batch(values, np.asarray(lengths, np.int32))
