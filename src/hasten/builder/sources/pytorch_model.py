"""Load a model from its weights: a PyTorch module, a tokenizer and the task's settings."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.backends import Source
from hasten.builder.sources.cross_encoder import read_cross_encoder, read_scoring_layout, score_labels
from hasten.builder.sources.detect import EMBEDDING, MULTI_VECTOR, RANKING, SPARSE, detect_task
from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.late_layout import late_interaction, read_late_layout, register_prefixes
from hasten.builder.sources.logit_ranker import LogitRanker
from hasten.builder.sources.peft import load_adapted
from hasten.builder.sources.quiet import first_line, quiet_libraries
from hasten.builder.sources.sentence_layout import SentenceLayout, read_layout
from hasten.builder.sources.sparse_layout import read_sparse_layout
from hasten.builder.sources.tokenizer import load_fast_tokenizer, prepend_lowercase, tokenizer_spec
from hasten.core.errors import HastenError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.tensors import (
    ATTENTION_MASK,
    BATCH,
    EXPANSION_MASK,
    MASKS,
    PROMPT_MASK,
    SEQUENCE,
    DType,
    Signature,
    TensorSpec,
)
from hasten.core.text.tokenizer import TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.measure.encoder_gate import FP32_TOLERANCE
from hasten.tasks import TASKS, AnyTask, TaskSpec

if TYPE_CHECKING:
    from hasten.builder.sources.export_wrapper import Exportable

# Tokenizers without a limit report a number near 10^30.
_NO_LIMIT = 1_000_000
_TOKEN_TYPES = "token_type_ids"
# Why a traced graph would be right only for texts as long as the example.
_UNSUPPORTED_ARCHITECTURES = {
    "funnel": "shortens texts by pooling them, to sizes that tracing freezes",
    "longformer": "divides texts into windows, whose number tracing freezes",
}
# Inputs of models that do not read texts alone.
_BOXES = "bbox"
_OTHER_INPUTS = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The properties of a loaded model that the build needs, whatever its source."""

    task: TaskSpec
    tokenizer: TokenizerSpec
    # transformers' tokenizer, which the saved file must reproduce.
    original_tokenizer: Any
    signature: Signature
    config: Any
    architecture: str


@dataclass(frozen=True, slots=True)
class LoadedModel(Loaded):
    """A model loaded from weights, as a PyTorch module."""

    module: Exportable

    @property
    def baseline(self) -> Variant:
        """Return the variant that others are compared with."""
        return Variant("torch", Precision.FP32)

    @property
    def source(self) -> Source:
        """Return the source that variants are built from."""
        return Source(self.signature, {}, self.module)

    @property
    def precision(self) -> Precision:
        """Return the precision of the baseline."""
        return Precision.FP32


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties that follow from configuration and tokenizer, before the model runs."""

    task: TaskSpec
    tokenizer: TokenizerSpec
    # The outputs are added after the first run.
    signature: Signature


def load_module(model: ModelDirectory, auto_class: str, plan: Plan, *, needs_pooler: bool = True) -> tuple[Any, Any]:
    """Load a model's weights in fp32 and its tokenizer with transformers. Raise if weights are missing."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise missing_package(error.name or "torch", "building", "build") from error
    from hasten.quantize.qdq.patch import unpatched

    with quiet_libraries(), unpatched():
        tokenizer = load_fast_tokenizer(model, plan)
        try:
            load = partial(
                getattr(transformers, auto_class).from_pretrained,
                output_loading_info=True,
                dtype=torch.float32,
                trust_remote_code=plan.trust_remote_code,
                use_safetensors=None if plan.allow_pickle else True,
            )
            if model.base is None:
                module, loading = load(model.path)
                missing_keys = loading["missing_keys"]
            else:
                module, missing_keys = load_adapted(model, load, plan)
        except HastenError:
            raise
        except Exception as error:
            hint = "--trust-remote-code if you trust its author" if "trust_remote_code" in str(error) else None
            raise StageError(f"{model.id} does not load: {first_line(error)}", hint=hint) from error
    # transformers fills in random numbers and only warns.
    missing = sorted(name for name in missing_keys if needs_pooler or "pooler." not in name)
    if missing:
        raise StageError(
            f"{model.id} has no weights for {len(missing)} tensors of {type(module).__name__}, such as '{missing[0]}'"
        )
    return module.eval(), tokenizer


def load_model(model: ModelDirectory, plan: Plan) -> LoadedModel:
    """Load a model, wrap it for export and run it once, to collect the properties that the build needs."""
    task = TASKS.get(detect_task(model, plan))
    _check_architecture(model)
    layout = _read_layout(model, task, plan)
    has_own_head = layout is None or layout.sparse is not None
    auto_class = task.auto_class if has_own_head else "AutoModel"
    if layout is not None and layout.logit_module is not None:
        auto_class = "AutoModelForCausalLM"
    # The pooler of a model without a head is not used.
    needs_pooler = bool(task.heads) and has_own_head
    module, tokenizer = load_module(model, _encoder_class(model, auto_class), plan, needs_pooler=needs_pooler)
    from hasten.builder.sources.export_wrapper import example_inputs

    architecture, ranker = type(module).__name__, None
    if layout is not None and layout.logit_module is not None:
        ranker, module = LogitRanker.read(model, layout.logit_module, module, tokenizer), module.base_model
    # int32 holds every id, and is copied in half the time of int64.
    accepted = dict.fromkeys(inspect.signature(module.forward).parameters, DType.INT32)
    facts = read_facts(accepted, module.config, tokenizer, task, layout, model, _reserved_positions(module))
    signature = facts.signature
    inputs = [spec.name for spec in signature.inputs]
    layers = [layer.module() for layer in layout.dense] if layout is not None else []
    layers += [] if ranker is None else [ranker.layer()]
    exportable = _exportable(module, inputs, task, layout, signature.mask_id, facts.tokenizer.pad_id, layers)
    feeds = example_inputs(inputs, facts.tokenizer.pad_id, signature.mask_id, pads_left=signature.pads_left)
    outputs, ignores_padding = _probe(exportable, task, feeds)
    if ranker is not None:
        ranker.check(exportable, feeds)
    return LoadedModel(
        task=facts.task,
        tokenizer=facts.tokenizer,
        original_tokenizer=tokenizer,
        signature=replace(signature, outputs=outputs, ignores_padding=ignores_padding),
        config=module.config,
        architecture=architecture,
        module=exportable,
    )


def _check_architecture(model: ModelDirectory) -> None:
    """Reject architectures whose computation depends on the length of a text in a way that one graph cannot hold."""
    kind = model.config.get("model_type")
    if kind == "big_bird" and model.config.get("attention_type", "block_sparse") == "block_sparse":
        raise UnsupportedError(
            f"{model.id} attends to long texts in blocks and to short ones in full, which is more than one graph",
            hint='set "attention_type": "original_full" in its config.json to use full attention',
        )
    if kind in _UNSUPPORTED_ARCHITECTURES:
        raise UnsupportedError(f"{model.id} cannot be exported: a {kind} {_UNSUPPORTED_ARCHITECTURES[kind]}")


def _read_layout(model: ModelDirectory, task: AnyTask, plan: Plan) -> SentenceLayout | None:
    if task.name == EMBEDDING:
        return read_layout(model, plan)
    if task.name == SPARSE:
        return read_sparse_layout(model)
    if task.name == MULTI_VECTOR:
        return read_late_layout(model)
    return read_scoring_layout(model) if task.name == RANKING else None


def _encoder_class(model: ModelDirectory, auto_class: str) -> str:
    """Return the class that loads the model; of an encoder-decoder whose encoder has a class, the encoder alone."""
    if auto_class != "AutoModel":
        return auto_class
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(model.config.get("model_type"), "")
    return "AutoModelForTextEncoding" if encoder.endswith("EncoderModel") else auto_class


def read_facts(
    accepted: Mapping[str, DType],
    config: Any,
    tokenizer: Any,
    task: AnyTask,
    layout: SentenceLayout | None,
    model: ModelDirectory,
    reserved_positions: int,
) -> ModelFacts:
    """Collect the facts from configuration and tokenizer; `accepted` are the types of the model's inputs."""
    if layout is not None and layout.lowercase:
        prepend_lowercase(tokenizer)
    if layout is not None and layout.late is not None:
        register_prefixes(tokenizer, layout.late)
    columns = [name for name in tokenizer.model_input_names if name in accepted and name != ATTENTION_MASK]
    if "input_ids" not in columns:
        raise UnsupportedError(f"{model.id} has no input_ids: only text models are supported")
    if _BOXES in accepted:
        raise UnsupportedError(f"{model.id} reads the boxes of words on a page, and only texts are supported")
    if not task.takes_pairs and not any(tokenizer("a text").get(_TOKEN_TYPES, ())):
        columns = [name for name in columns if name != _TOKEN_TYPES]
    inputs = ("input_ids", *(name for name in columns if name != "input_ids"))
    tokenizer_settings = tokenizer_spec(tokenizer, inputs, _max_length(config, tokenizer, layout, reserved_positions))
    mask_id = None
    if MASKS in task.axes:
        if tokenizer.mask_token_id is None:
            raise UnsupportedError(f"the tokenizer of {model.id} has no mask token, which fill-mask needs")
        mask_id = int(tokenizer.mask_token_id)
    spec = _task_spec(task, config, tokenizer, layout)
    late = None if layout is None else late_interaction(layout, tokenizer, tokenizer_settings.max_length, model.id)
    spec = replace(spec, late_interaction=late)
    if task.name == RANKING:
        spec = read_cross_encoder(model, tokenizer, spec)
    pads = {"input_ids": tokenizer_settings.pad_id}
    masks = (PROMPT_MASK,) if layout is not None and not layout.pools_prompt else ()
    if late is not None and late.expansion_length and not late.is_expansion_attended:
        masks = (EXPANSION_MASK,)
    signature = Signature(
        inputs=tuple(
            TensorSpec(name, accepted.get(name, DType.INT32), (BATCH, SEQUENCE), pads.get(name, 0))
            for name in ("input_ids", ATTENTION_MASK, *inputs[1:], *masks)
        ),
        outputs=(),
        max_length=tokenizer_settings.max_length,
        # Pooling expects rows to start at the first position (export_wrapper.py).
        pads_left=tokenizer_settings.pads_left and layout is None,
        mask_id=mask_id,
    )
    return ModelFacts(spec, tokenizer_settings, signature)


def _exportable(
    module: Any,
    inputs: Sequence[str],
    task: AnyTask,
    layout: SentenceLayout | None,
    mask_id: int | None,
    pad_id: int,
    layers: Sequence[Any],
) -> Exportable:
    """Return the module to export; `layers` follow the pooling of the layout."""
    from hasten.builder.sources import export_wrapper

    if layout is not None and layout.sparse is not None:
        return export_wrapper.SparsePooled(module, inputs, task.outputs, layout.sparse, pad_id)
    if layout is not None and layout.late is not None:
        return export_wrapper.TokenVectors(module, inputs, task.outputs, layers, layout.normalize)
    if layout is not None:
        head = export_wrapper.PoolingHead(layout.pooling, layers, layout.normalize)
        return export_wrapper.Pooled(module, inputs, task.outputs, head)
    if mask_id is not None:
        return export_wrapper.MaskPositionHead(module, inputs, task.outputs, mask_id)
    wrapper = export_wrapper.Exportable
    if task.auto_class == "AutoModelForMultipleChoice":
        wrapper = export_wrapper.SingleChoice
    elif module.config.is_encoder_decoder and hasattr(module, "classification_head"):
        wrapper = export_wrapper.LastTokenHead
    return wrapper(module, inputs, task.outputs)


def _probe(module: Exportable, task: AnyTask, feeds: Mapping[str, Any]) -> tuple[tuple[TensorSpec, ...], bool]:
    """Run a padded batch and its padded row alone; return the outputs' specs and whether padding is ignored.

    The module shows the widths; in configurations, their names differ by architecture.
    """
    import torch

    real = feeds[ATTENTION_MASK][1].bool()
    unpadded = {name: value[1:, real] for name, value in feeds.items()}
    try:
        with quiet_libraries(), torch.inference_mode():
            results, expected = module(**feeds), module(**unpadded)
    except Exception as error:  # a model may raise anything
        accepted = inspect.signature(module.model.forward).parameters
        if (other := next((kind for name, kind in _OTHER_INPUTS.items() if name in accepted), None)) is not None:
            raise UnsupportedError(
                f"{type(module.model).__name__} reads {other} besides texts, and only texts are supported",
                hint="if its text encoder has a class of its own, save and build that",
            ) from error
        raise StageError(f"{type(module.model).__name__} fails on its first batch: {first_line(error)}") from error
    outputs = tuple(
        TensorSpec(name, DType.FLOAT32, (*task.axes, *result.shape[len(task.axes) :]))
        for name, result in zip(task.outputs, results, strict=True)
    )
    ignores_padding = True
    for batched, single in zip(results, expected, strict=True):
        # The last rows belong to the second text: a row is a text, or a mask token.
        second = batched[-len(single) :]
        second = second[:, real] if SEQUENCE in task.axes else second
        ignores_padding &= bool(torch.allclose(second, single, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE))
    return outputs, ignores_padding


def save_configurations(config: Any, tokenizer: Any, folder: Path) -> None:
    """Save the configurations of model and tokenizer: transformers' pipelines read labels and limits from them."""
    config.to_json_file(folder / "config.json")
    name = "tokenizer_config.json"
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        tokenizer.save_pretrained(work)
        shutil.copyfile(Path(work) / name, folder / name)


def _task_spec(task: AnyTask, config: Any, tokenizer: Any, layout: SentenceLayout | None) -> TaskSpec:
    if layout is not None and task.name == RANKING:
        return TaskSpec(task.name, labels=score_labels(layout))
    if layout is not None:
        return TaskSpec(
            task.name,
            pooling=layout.pooling,
            normalize=layout.normalize,
            prompts=layout.prompts,
            default_prompt=layout.default_prompt,
            pools_prompt=layout.pools_prompt,
            special_ids=() if layout.pools_prompt else tuple(sorted(tokenizer.all_special_ids)),
            similarity=layout.similarity,
            max_active_dims=layout.max_active_dims,
        )
    # Every configuration has default labels; only those of classifiers are used.
    labels = range(config.num_labels) if task.auto_class.endswith("Classification") else ()
    return TaskSpec(
        task.name,
        labels=tuple(str(config.id2label[index]) for index in labels),
        problem=config.problem_type or "" if labels else "",
        mask_token=tokenizer.mask_token if MASKS in task.axes else "",
    )


def _max_length(config: Any, tokenizer: Any, layout: SentenceLayout | None, reserved_positions: int) -> int:
    """Return the smallest limit that is set, or 512."""
    limits = []
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - reserved_positions)
    # As in sentence-transformers, the layout's limit replaces the tokenizer's, even if it is longer.
    limit = layout.max_length if layout is not None and layout.max_length else int(tokenizer.model_max_length)
    limit = max(layout.late.limits(limit)) if layout is not None and layout.late is not None else limit
    if limit < _NO_LIMIT:
        limits.append(limit)
    return min(limits) if limits else 512


def _reserved_positions(module: Any) -> int:
    """Return the positions that texts cannot use: RoBERTa-like models count from the padding position."""
    for name, child in module.named_modules():
        if name.endswith("position_embeddings") and (padding := getattr(child, "padding_idx", None)) is not None:
            return int(padding) + 1
    return 0
