"""A PEFT adapter: its base model is found, loaded with the adapter's head, and the two become one module."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.builder.source import ADAPTER, ModelDirectory, find_model, read_json
from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.tasks import TASKS

# How classes end that have the head an adapter was trained for, by PEFT's word for its task.
_HEADS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": "Model",
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_2_SEQ_LM": "ForConditionalGeneration",
}
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
# What PEFT puts before the names of the module it wraps.
_WRAPPED = "base_model.model."
# The last layers of classification heads, whose height is the number of labels.
_LAST_LAYERS = tuple(
    f"{name}.weight" for name in ("classifier", "score", "classifier.out_proj", "qa_outputs", "logits_proj")
)


def find_adapted(path: Path, name: str, revision: str | None, plan: Plan, *, with_weights: bool) -> ModelDirectory:
    """An adapter's directory together with its base; the architecture is that of the two together."""
    about = read_json(path / ADAPTER)
    wanted = about.get("base_model_name_or_path") if isinstance(about, dict) else None
    if not wanted:
        raise PlanError(f"{path / ADAPTER} does not name the adapter's base model (base_model_name_or_path)")
    beside = path / str(wanted)
    where = str(beside) if not Path(wanted).is_dir() and beside.is_dir() else str(wanted)
    # PEFT writes the revision of the base beside its name, also where that is a directory and has none.
    at = None if Path(where).is_dir() else about.get("revision")
    try:
        base = find_model(replace(plan, model=where, revision=at), with_weights=with_weights)
    except HastenError as error:
        hint = error.hint or f"{ADAPTER} names the base in base_model_name_or_path"
        raise type(error)(f"{name} is an adapter of {wanted}: {error.message}", hint=hint) from error
    if base.base is not None or base.graph is not None:
        kind = "an adapter itself" if base.base is not None else "an ONNX graph"
        raise UnsupportedError(f"{name} is an adapter of {wanted}, which is {kind}")
    own = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    architecture = _architecture(base.architecture, about.get("task_type"), plan)
    config = base.config | own | {"architectures": [architecture]}
    return ModelDirectory(path, name, revision, config, base=base)


def _architecture(base: str, trained_for: str | None, plan: Plan) -> str:
    """The class that has the head: for the task that was asked for, else the one it was trained for, else its base."""
    heads = TASKS.get(plan.task).heads if plan.task is not None else ()
    ending = heads[0] if heads else _HEADS.get(trained_for or "")
    return base if ending is None or base.endswith(ending) else _HEAD.sub("", base) + ending


def load_adapted(model: ModelDirectory, auto_class: str, plan: Plan) -> tuple[Any, list[str]]:
    """Base and adapter merged into one plain module, and the names of tensors that neither of them has."""
    try:
        import peft
    except ImportError as error:
        raise missing_package("peft", "building from an adapter", "peft") from error
    import torch
    import transformers

    assert model.base is not None
    kind = peft.PeftConfig.from_pretrained(model.path)
    if kind.is_prompt_learning:
        raise UnsupportedError(f"{model.id} is a {kind.peft_type} adapter: what it adds cannot become part of weights")
    weights = peft.utils.load_peft_weights(str(model.path), device="cpu")
    has_config = (model.path / "config.json").is_file()
    config = transformers.AutoConfig.from_pretrained(
        model.path if has_config else model.base.path, trust_remote_code=plan.trust_remote_code
    )
    labels = label_count({name: tuple(value.shape) for name, value in weights.items()})
    if labels is not None and labels != config.num_labels:
        config.num_labels = labels
    module, loading = getattr(transformers, auto_class).from_pretrained(
        model.base.path,
        config=config,
        output_loading_info=True,
        # A head of another size is the base's own: the adapter brings its head along, or it is missing.
        ignore_mismatched_sizes=True,
        dtype=torch.float32,
        trust_remote_code=plan.trust_remote_code,
        use_safetensors=None if plan.allow_pickle else True,
    )
    try:
        adapted = peft.PeftModel.from_pretrained(module, str(model.path), torch_device="cpu")
    except KeyError as error:  # of a module that was saved whole, a tensor is not in the file
        raise StageError(f"{model.id} has no weights for {error} of the adapter") from error
    _check_complete(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False), weights, model)
    lacking = {*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])}
    brought = {name.removeprefix(_WRAPPED) for name in weights}
    return merged(adapted), sorted(lacking - brought)


def merged(adapted: Any) -> Any:
    """One plain module of a PeftModel, which is used up by it."""
    from peft.utils import ModulesToSaveWrapper

    # Modules that were saved whole are put in place first: IA3 stumbles over those of several layers (peft 0.21).
    for name, part in list(adapted.named_modules()):
        if isinstance(part, ModulesToSaveWrapper) and part.active_adapters:
            above, _, own = name.rpartition(".")
            setattr(adapted.get_submodule(above), own, part.modules_to_save[part.active_adapters[0]])
    return adapted.merge_and_unload(safe_merge=True)


def label_count(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """How many labels the head that an adapter brings along has."""
    for name, shape in shapes.items():
        if name.removeprefix(_WRAPPED) in _LAST_LAYERS and len(shape) == 2:
            return shape[0]
    return None


def _check_complete(expected: Collection[str], found: Collection[str], model: ModelDirectory) -> None:
    """PEFT leaves what its file lacks at zero, or at random, and only warns."""
    missing = sorted(set(expected) - set(found))
    if missing:
        raise StageError(f"{model.id} has no weights for {len(missing)} tensors of the adapter, such as '{missing[0]}'")
