"""Load PEFT adapters: find the base model, load it with the adapter's head, and merge the two into one module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hasten.builder.sources.directory import ADAPTER, ModelDirectory, read_json
from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError, missing_package
from hasten.core.plan import Plan
from hasten.families import family_of

# Suffixes of the classes with the head that an adapter was trained for, by PEFT's task type.
_HEADS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "FEATURE_EXTRACTION": "Model",
    "CAUSAL_LM": "ForCausalLM",
    "SEQ_2_SEQ_LM": "ForConditionalGeneration",
}
_HEAD_SUFFIX = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")
# PEFT's prefix for the names of the module it wraps.
_PEFT_PREFIX = "base_model.model."
# The last layers of classification heads; they have one output per label.
_OUTPUT_LAYERS = tuple(
    f"{name}.weight" for name in ("classifier", "score", "classifier.out_proj", "qa_outputs", "logits_proj")
)


def resolve_adapter(
    path: Path, name: str, revision: str | None, plan: Plan, find: Callable[[Plan], ModelDirectory]
) -> ModelDirectory:
    """Return an adapter's directory with its base, which `find` locates; the architecture is that of the two merged."""
    adapter_config = read_json(path / ADAPTER)
    base_name = adapter_config.get("base_model_name_or_path") if isinstance(adapter_config, dict) else None
    if not base_name:
        raise PlanError(f"{path / ADAPTER} does not name the adapter's base model (base_model_name_or_path)")
    sibling = path / str(base_name)
    location = str(sibling) if not Path(base_name).is_dir() and sibling.is_dir() else str(base_name)
    # PEFT stores the base's revision even if the base is a directory, which has none.
    base_revision = None if Path(location).is_dir() else adapter_config.get("revision")
    try:
        base = find(replace(plan, model=location, revision=base_revision))
    except HastenError as error:
        hint = error.hint or f"{ADAPTER} names the base in base_model_name_or_path"
        raise type(error)(f"{name} is an adapter of {base_name}: {error.message}", hint=hint) from error
    if base.base is not None or base.graph is not None:
        kind = "an adapter itself" if base.base is not None else "an ONNX graph"
        raise UnsupportedError(f"{name} is an adapter of {base_name}, which is {kind}")
    overrides = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    architecture = _architecture(base.architecture, adapter_config.get("task_type"), plan)
    config = base.config | overrides | {"architectures": [architecture]}
    return ModelDirectory(path, name, revision, config, base=base)


def _architecture(base: str, task_type: str | None, plan: Plan) -> str:
    """Return the class with the head for the plan's task, else for the adapter's task type, else the base's class."""
    heads = family_of(plan.task).heads(plan.task) if plan.task is not None else ()
    suffix = heads[0] if heads else _HEADS.get(task_type or "")
    return base if suffix is None or base.endswith(suffix) else _HEAD_SUFFIX.sub("", base) + suffix


def load_adapted(model: ModelDirectory, load: Callable[..., Any], plan: Plan) -> tuple[Any, list[str]]:
    """Return base and adapter merged into one plain module, and the names of tensors that both lack.

    `load` is `from_pretrained` of the class, with its options.
    """
    try:
        import peft
    except ImportError as error:
        raise missing_package("peft", "building from an adapter", "peft") from error
    import transformers

    assert model.base is not None
    adapter_config = peft.PeftConfig.from_pretrained(model.path)
    if adapter_config.is_prompt_learning:
        raise UnsupportedError(f"{model.id} is a {adapter_config.peft_type} adapter: it cannot be merged into weights")
    weights = peft.utils.load_peft_weights(str(model.path), device="cpu")
    config_path = model.path if (model.path / "config.json").is_file() else model.base.path
    config = transformers.AutoConfig.from_pretrained(config_path, trust_remote_code=plan.trust_remote_code)
    labels = count_labels({name: tuple(value.shape) for name, value in weights.items()})
    if labels is not None and labels != config.num_labels:
        config.num_labels = labels
    # A head of another size belongs to the base: the adapter has its own head, or the head is missing.
    module, loading = load(model.base.path, config=config, ignore_mismatched_sizes=True)
    try:
        adapted = peft.PeftModel.from_pretrained(module, str(model.path), torch_device="cpu")
    except KeyError as error:  # the file lacks a tensor of a module that was saved whole
        raise StageError(f"{model.id} has no weights for {error} of the adapter") from error
    # Reject a file that lacks tensors: PEFT leaves them zero or random and only warns.
    missing = sorted(set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)) - set(weights))
    if missing:
        raise StageError(f"{model.id} has no weights for {len(missing)} tensors of the adapter, such as '{missing[0]}'")
    missing_in_base = {*loading["missing_keys"], *(entry[0] for entry in loading["mismatched_keys"])}
    adapter_names = {name.removeprefix(_PEFT_PREFIX) for name in weights}
    return merge_adapter(adapted), sorted(missing_in_base - adapter_names)


def merge_adapter(adapted: Any) -> Any:
    """Merge a PeftModel into one plain module. The PeftModel must not be used afterwards."""
    from peft.utils import ModulesToSaveWrapper

    # Unwrap modules that were saved whole first: IA3 fails on those with several layers (peft 0.21).
    for name, module in list(adapted.named_modules()):
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            parent, _, child = name.rpartition(".")
            setattr(adapted.get_submodule(parent), child, module.modules_to_save[module.active_adapters[0]])
    return adapted.merge_and_unload(safe_merge=True)


def count_labels(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the number of labels of the adapter's head, or None if the adapter has no head."""
    for name, shape in shapes.items():
        if name.removeprefix(_PEFT_PREFIX) in _OUTPUT_LAYERS and len(shape) == 2:
            return shape[0]
    return None
