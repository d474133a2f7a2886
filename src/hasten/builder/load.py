"""From a directory to a PyTorch module, a tokenizer and everything the task needs to know about them."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.backends import Source
from hasten.builder.adapter import load_adapted
from hasten.builder.cross_encoder import read_cross_encoder
from hasten.builder.detect import EMBEDDING, RANKING, detect_task
from hasten.builder.libraries import first_line, loading_hint, quiet_libraries
from hasten.builder.sentence_layout import SentenceLayout, read_layout
from hasten.builder.source import ModelDirectory
from hasten.builder.tokenizer import load_tokenizer, lowercase_first, tidies_spaces
from hasten.core.errors import HastenError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.core.tensors import ATTENTION_MASK, BATCH, MASKS, SEQUENCE, DType, Signature, TensorSpec
from hasten.core.tokenizer import TokenizerSpec
from hasten.core.variant import Precision, Variant
from hasten.measure.verify import FP32_TOLERANCE
from hasten.tasks import AnyTask, TaskSpec

if TYPE_CHECKING:
    from hasten.builder.head import Exportable

# Tokenizers that know no limit say so with a number near 10^30.
_NO_LIMIT = 1_000_000

_TYPES = "token_type_ids"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the rest of the build needs to know of a model, whatever it came as."""

    task: TaskSpec
    tokenizer: TokenizerSpec
    # transformers' tokenizer, for what our file must reproduce.
    original_tokenizer: Any
    signature: Signature
    config: Any
    architecture: str


@dataclass(frozen=True, slots=True)
class LoadedModel(Loaded):
    """A model that came as weights: a PyTorch module."""

    module: Exportable

    @property
    def baseline(self) -> Variant:
        """What its variants are compared with."""
        return Variant("torch", Precision.FP32)

    @property
    def source(self) -> Source:
        return Source(self.signature, {}, self.module)

    @property
    def precision(self) -> Precision:
        return Precision.FP32


@dataclass(frozen=True, slots=True)
class Facts:
    """What configuration and tokenizer say, before anything runs."""

    task: TaskSpec
    tokenizer: TokenizerSpec
    pads_left: bool
    mask_id: int | None

    @property
    def inputs(self) -> list[str]:
        first, *rest = self.tokenizer.inputs
        return [first, ATTENTION_MASK, *rest]

    def signature(self, dtypes: Mapping[str, DType], outputs: tuple[TensorSpec, ...]) -> Signature:
        pads = {"input_ids": self.tokenizer.pad_id}
        return Signature(
            inputs=tuple(TensorSpec(name, dtypes[name], (BATCH, SEQUENCE), pads.get(name, 0)) for name in self.inputs),
            outputs=outputs,
            max_length=self.tokenizer.max_length,
            pads_left=self.pads_left,
            mask_id=self.mask_id,
        )


def load_model(model: ModelDirectory, plan: Plan) -> LoadedModel:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise missing_package(error.name or "torch", "building", "build") from error
    from hasten.quantize.qdq.patch import outside

    task = detect_task(model, plan)
    layout = read_layout(model, plan) if task.name == EMBEDDING else None
    with quiet_libraries(), outside():
        tokenizer = load_tokenizer(model, plan)
        try:
            if model.base is None:
                module, loading = getattr(transformers, task.auto_class).from_pretrained(
                    model.path,
                    output_loading_info=True,
                    dtype=torch.float32,
                    trust_remote_code=plan.trust_remote_code,
                    use_safetensors=None if plan.allow_pickle else True,
                )
                lacking = loading["missing_keys"]
            else:
                module, lacking = load_adapted(model, task.auto_class, plan)
        except HastenError:
            raise
        except Exception as error:
            raise StageError(f"{model.id} does not load: {first_line(error)}", hint=loading_hint(error)) from error
    # transformers fills in random numbers and only warns. Of a bare model, nobody reads the pooler.
    missing = sorted(name for name in lacking if task.heads or "pooler." not in name)
    if missing:
        raise StageError(
            f"{model.id} has no weights for {len(missing)} tensors of {type(module).__name__}, such as '{missing[0]}'"
        )
    return describe(module, tokenizer, task, layout, model)


def describe(
    module: Any,
    tokenizer: Any,
    task: AnyTask,
    layout: SentenceLayout | None,
    model: ModelDirectory,
) -> LoadedModel:
    """Everything the rest of the build needs to know, gathered once."""
    from hasten.builder.head import example

    if getattr(module.config, "attention_type", None) == "block_sparse":
        raise UnsupportedError(
            f"{model.id} attends to long texts in blocks and to short ones in full, which is more than one graph",
            hint='with "attention_type": "original_full" in its config.json it attends in full to all',
        )
    accepted = set(inspect.signature(module.forward).parameters)
    facts = read_facts(accepted, module.config, tokenizer, task, layout, model, _reserved_positions(module))
    exportable = _exportable(module.eval(), facts.inputs, task, layout, facts.mask_id)
    feeds = example(facts.inputs, facts.tokenizer.pad_id, facts.mask_id, pads_left=facts.pads_left)
    outputs, ignores_padding = _try(exportable, task, feeds)
    # 32 bits hold every id, and what is half as wide is copied in half the time.
    signature = facts.signature(dict.fromkeys(facts.inputs, DType.INT32), outputs)
    return LoadedModel(
        task=facts.task,
        tokenizer=facts.tokenizer,
        original_tokenizer=tokenizer,
        signature=replace(signature, ignores_padding=ignores_padding),
        config=module.config,
        architecture=type(module).__name__,
        module=exportable,
    )


def read_facts(
    accepted: Collection[str],
    config: Any,
    tokenizer: Any,
    task: AnyTask,
    layout: SentenceLayout | None,
    model: ModelDirectory,
    reserved_positions: int,
) -> Facts:
    """`accepted` are the names of the inputs that the model takes."""
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"the tokenizer of {model.id} ({type(tokenizer).__name__}) has no tokenizers-library form,"
            " and bundles are served without transformers"
        )
    if layout is not None and layout.lowercase:
        lowercase_first(tokenizer)
    columns = [name for name in tokenizer.model_input_names if name in accepted and name != ATTENTION_MASK]
    if "input_ids" not in columns:
        raise UnsupportedError(f"{model.id} takes no token ids: hasten handles text models")
    if not task.takes_pairs and not any(tokenizer("a text").get(_TYPES, ())):
        columns = [name for name in columns if name != _TYPES]
    limit = _max_length(config, tokenizer, layout, reserved_positions)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    pads_left = tokenizer.padding_side == "left"
    mask_id = _mask_id(tokenizer, model) if MASKS in task.axes else None
    if layout is not None:
        pads_left = False  # pooling reads rows from their first position (builder/head.py)
    spec = _task_spec(task, config, tokenizer, layout)
    if task.name == RANKING:
        spec = read_cross_encoder(model, tokenizer, spec)
    return Facts(
        task=spec,
        tokenizer=TokenizerSpec(
            inputs=("input_ids", *(name for name in columns if name != "input_ids")),
            max_length=limit,
            pad_id=pad_id,
            truncates_left=tokenizer.truncation_side == "left",
            tidies_spaces=tidies_spaces(tokenizer),
            pads_left=tokenizer.padding_side == "left",
            cls_id=tokenizer.cls_token_id,
        ),
        pads_left=pads_left,
        mask_id=mask_id,
    )


def _exportable(
    module: Any, inputs: Sequence[str], task: AnyTask, layout: SentenceLayout | None, mask_id: int | None
) -> Exportable:
    from hasten.builder.head import AtLastEnd, AtMasks, Exportable, OneChoice, Pooled, PoolingHead

    if layout is not None:
        head = PoolingHead(layout.pooling, [layer.module() for layer in layout.dense], layout.normalize)
        return Pooled(module, inputs, task.outputs, head)
    if mask_id is not None:
        return AtMasks(module, inputs, task.outputs, mask_id)
    if task.auto_class == "AutoModelForMultipleChoice":
        return OneChoice(module, inputs, task.outputs)
    if module.config.is_encoder_decoder and hasattr(module, "classification_head"):
        return AtLastEnd(module, inputs, task.outputs)
    return Exportable(module, inputs, task.outputs)


def _try(module: Exportable, task: AnyTask, feeds: Mapping[str, Any]) -> tuple[tuple[TensorSpec, ...], bool]:
    """What a padded batch and its padded row alone show: the outputs' widths, and whether padding is ignored.

    Widths come from the module itself because configurations have a name for each in every architecture.
    """
    import torch

    real = feeds[ATTENTION_MASK][1].bool()
    alone = {name: value[1:, real] for name, value in feeds.items()}
    try:
        with quiet_libraries(), torch.inference_mode():
            results, expected = module(**feeds), module(**alone)
    except Exception as error:  # a model raises what its author chose to
        raise StageError(f"{type(module.model).__name__} fails on its first batch: {first_line(error)}") from error
    outputs = tuple(
        TensorSpec(name, DType.FLOAT32, (*task.axes, *result.shape[len(task.axes) :]))
        for name, result in zip(task.outputs, results, strict=True)
    )
    ignores_padding = True
    for batched, single in zip(results, expected, strict=True):
        # The last rows are the second text's, whatever a row is: a text, or a mask token of it.
        own = batched[-len(single) :]
        own = own[:, real] if SEQUENCE in task.axes else own
        ignores_padding &= bool(torch.allclose(own, single, rtol=FP32_TOLERANCE, atol=FP32_TOLERANCE))
    return outputs, ignores_padding


def _mask_id(tokenizer: Any, model: ModelDirectory) -> int:
    if tokenizer.mask_token_id is None:
        raise UnsupportedError(f"the tokenizer of {model.id} has no mask token, and fill-mask is about nothing else")
    return int(tokenizer.mask_token_id)


def save_configurations(config: Any, tokenizer: Any, folder: Path) -> None:
    """What transformers reads of a model beside weights and vocabulary: its pipelines ask for labels and limits."""
    config.to_json_file(folder / "config.json")
    name = "tokenizer_config.json"
    with tempfile.TemporaryDirectory(prefix="hasten-") as work:
        tokenizer.save_pretrained(work)
        shutil.copyfile(Path(work) / name, folder / name)


def _task_spec(task: AnyTask, config: Any, tokenizer: Any, layout: SentenceLayout | None) -> TaskSpec:
    if layout is not None:
        return TaskSpec(
            task.name,
            pooling=layout.pooling,
            normalize=layout.normalize,
            prompts=layout.prompts,
            default_prompt=layout.default_prompt,
        )
    # Configurations have labels by default; only classifiers mean them.
    labels = range(config.num_labels) if task.auto_class.endswith("Classification") else ()
    return TaskSpec(
        task.name,
        labels=tuple(str(config.id2label[index]) for index in labels),
        problem=config.problem_type or "" if labels else "",
        mask_token=tokenizer.mask_token if MASKS in task.axes else "",
    )


def _max_length(config: Any, tokenizer: Any, layout: SentenceLayout | None, reserved_positions: int) -> int:
    """The smallest of all limits that are real."""
    limits = []
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - reserved_positions)
    # As in sentence-transformers, a layout's own limit takes the place of the tokenizer's, even a longer one.
    if layout is not None and layout.max_length:
        limits.append(layout.max_length)
    elif tokenizer.model_max_length < _NO_LIMIT:
        limits.append(int(tokenizer.model_max_length))
    return min(limits) if limits else 512


def _reserved_positions(module: Any) -> int:
    """RoBERTa and its kin count from behind the position of padding, so texts are shorter than the table."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and (padding := getattr(part, "padding_idx", None)) is not None:
            return int(padding) + 1
    return 0
