"""Save a model object to a temporary directory, so that it is built like a model on disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hasten.builder.sources.directory import temporary_directory
from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError

_TRANSFORMERS = "transformers.PreTrainedModel"
_PEFT = "peft.PeftModel"
# The module that hasten.quantize.qdq inserts into a model.
_QUANTIZER = "hasten.Quantizer"
# These classes include their tokenizer.
_WITH_TOKENIZER = ("sentence_transformers.SentenceTransformer", "sentence_transformers.CrossEncoder")


def get_model_name(model: object) -> str:
    """Return the model's name in a plan: a path or hub id, or for an object its class and its source."""
    if isinstance(model, str | Path):
        return str(model)
    model = _unwrap_compiled(model)
    inner = _find_transformers(model)
    origin = str(getattr(inner.config, "name_or_path", "") or "") if inner is not None else ""
    origin = Path(origin).name if Path(origin).is_absolute() else origin
    return f"{type(model).__name__}({origin})" if origin else type(model).__name__


class SavedModel(NamedTuple):
    """The inputs of a build from an object; empty for a model on disk or on the hub."""

    directory: Path | None = None
    # The module itself if it has active quantizers; the saved files hold the float model.
    quantized: Any = None


@contextmanager
def saved_to_directory(model: Any, tokenizer: Any = None) -> Iterator[SavedModel]:
    """Save the object to a temporary directory, which is deleted when the context exits."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise PlanError(f"tokenizer is for models in memory, and {model} comes with its tokenizer")
        yield SavedModel()
        return
    model = _unwrap_compiled(model)
    _check_object(model, tokenizer)
    quantized = None
    if any(_QUANTIZER in _kinds(part) for part in model.modules()):
        from hasten.quantize.qdq.toggle import has_quantizers

        if _PEFT in _kinds(model):
            raise UnsupportedError(
                f"{type(model).__name__} has quantizers and adapters", hint="merge the adapters, then calibrate"
            )
        quantized = _find_transformers(model) if has_quantizers(model) else None
    # The baseline is the plain model: saving and loading drops the quantizers and restores its attention.
    with _saved(model, tokenizer) as directory:
        yield SavedModel(directory, quantized)


@contextmanager
def _saved(model: Any, tokenizer: Any) -> Iterator[Path]:
    with temporary_directory() as work:
        try:
            _save(model, tokenizer, work)
        except (HastenError, OSError):
            raise
        except Exception as error:  # a custom class may raise anything
            raise StageError(f"{type(model).__name__} cannot be saved: {type(error).__name__}: {error}") from error
        yield work


def _check_object(model: Any, tokenizer: Any) -> None:
    kinds = _kinds(model)
    if not kinds & {_TRANSFORMERS, _PEFT, *_WITH_TOKENIZER}:
        raise PlanError(
            f"{type(model).__name__} is not a supported model class",
            hint="pass a hub id, a directory, or a model of transformers, peft or sentence-transformers",
        )
    has_tokenizer = bool(kinds & set(_WITH_TOKENIZER))
    if has_tokenizer and tokenizer is not None:
        raise PlanError(f"{type(model).__name__} includes its tokenizer", hint="omit the tokenizer argument")
    if not has_tokenizer and tokenizer is None:
        raise PlanError(f"{type(model).__name__} has no tokenizer", hint="hasten.build(model, tokenizer=tokenizer)")
    # transformers saves only the adapters of a model that has some.
    if _PEFT not in kinds and any(getattr(part, "_hf_peft_config_loaded", False) for part in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} holds adapters from add_adapter()", hint="save it, and build from the directory"
        )


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from hasten.builder.sources.peft import merge_adapter
    from hasten.builder.sources.quiet import quiet_libraries

    with quiet_libraries():
        if _PEFT in _kinds(model):
            if model.active_peft_config.is_prompt_learning:
                raise UnsupportedError(f"a {model.active_peft_config.peft_type} adapter cannot be merged into weights")
            # Merge into a copy: merging rewrites the weights of the caller's object.
            model = merge_adapter(copy.deepcopy(model))
        with _restored_configs(model):
            if tokenizer is None:
                model.save_pretrained(folder, create_model_card=False)
            else:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)


@contextmanager
def _restored_configs(model: Any) -> Iterator[None]:
    """Restore the configurations on exit: saving writes the dtype into them."""
    owners = [part for part in model.modules() if _TRANSFORMERS in _kinds(part)]
    configs = [owner.config for owner in owners]
    for owner in owners:
        owner.config = copy.deepcopy(owner.config)
    try:
        yield
    finally:
        for owner, config in zip(owners, configs, strict=True):
            owner.config = config


def _unwrap_compiled(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


def _find_transformers(model: Any) -> Any:
    parts = model.modules() if hasattr(model, "modules") else ()
    return next((part for part in parts if _TRANSFORMERS in _kinds(part)), None)


def _kinds(model: object) -> set[str]:
    """Return the names of the object's classes with their packages, without importing any of these libraries."""
    return {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
