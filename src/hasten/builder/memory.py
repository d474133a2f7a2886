"""A model that lives in this process: saved where nobody looks, to go the way of every other model from there."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hasten.core.errors import HastenError, PlanError, StageError, UnsupportedError, translate_os_errors

_TRANSFORMERS = "transformers.PreTrainedModel"
_PEFT = "peft.PeftModel"
# What hasten.quantize.qdq puts into a model.
_QUANTIZER = "hasten.Quantizer"
# These carry their tokenizer.
_WHOLE = ("sentence_transformers.SentenceTransformer", "sentence_transformers.CrossEncoder")


def name_of(model: object) -> str:
    """What a plan calls the model: an address, or for an object its class and where it once came from."""
    if isinstance(model, str | Path):
        return str(model)
    model = _plain(model)
    inner = _find_transformers(model)
    origin = str(getattr(inner.config, "name_or_path", "") or "") if inner is not None else ""
    origin = Path(origin).name if Path(origin).is_absolute() else origin
    return f"{type(model).__name__}({origin})" if origin else type(model).__name__


class Saved(NamedTuple):
    """What a build takes for an object; nothing for a model that has an address."""

    directory: Path | None = None
    # The module itself, where quantizers in it round: its files are those of the model in float.
    quantized: Any = None


@contextmanager
def saved(model: object, tokenizer: Any = None) -> Iterator[Saved]:
    """The object's files lie in a directory for a while."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise PlanError(f"tokenizer is for models in memory, and {model} has its own beside it")
        yield Saved()
        return
    model = _plain(model)
    _check(model, tokenizer)
    if not _has_quantizers(model):
        with _saved(model, tokenizer) as directory:
            yield Saved(directory)
        return
    from hasten.builder.quantized import rounds

    if _PEFT in _kinds(model):
        raise UnsupportedError(
            f"{type(model).__name__} has quantizers and adapters", hint="merge the adapters, then calibrate"
        )
    quantized = _find_transformers(model) if rounds(model) else None
    # The original is the plain model: saved and loaded again, it comes without quantizers, in its own attention.
    with _saved(model, tokenizer) as directory:
        yield Saved(directory, quantized)


@contextmanager
def _saved(model: Any, tokenizer: Any) -> Iterator[Path]:
    doing = f"working in {tempfile.gettempdir()}"
    with (
        translate_os_errors(doing),
        tempfile.TemporaryDirectory(prefix="hasten-") as work,
        translate_os_errors(doing, Path(work).parent),
    ):
        try:
            _save(model, tokenizer, work)
        except (HastenError, OSError):
            raise
        except Exception as error:  # a model's own class may do anything
            raise StageError(f"{type(model).__name__} cannot be saved: {type(error).__name__}: {error}") from error
        yield Path(work)


def _check(model: Any, tokenizer: Any) -> None:
    kinds = _kinds(model)
    if not kinds & {_TRANSFORMERS, _PEFT, *_WHOLE}:
        raise PlanError(
            f"{type(model).__name__} is not a model hasten knows",
            hint="give a hub id, a directory, or a model of transformers, peft or sentence-transformers",
        )
    is_whole = bool(kinds & set(_WHOLE))
    if is_whole and tokenizer is not None:
        raise PlanError(f"{type(model).__name__} carries its own tokenizer", hint="leave tokenizer out")
    if not is_whole and tokenizer is None:
        raise PlanError(
            f"{type(model).__name__} comes without its tokenizer", hint="hasten.build(model, tokenizer=tokenizer)"
        )
    # Of a model with adapters inside, transformers saves the adapters alone.
    if _PEFT not in kinds and any(getattr(part, "_hf_peft_config_loaded", False) for part in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} holds adapters that were added to it", hint="save it, and build from the directory"
        )


def _save(model: Any, tokenizer: Any, folder: str) -> None:
    from hasten.builder.adapter import merged
    from hasten.builder.libraries import quiet_libraries

    with quiet_libraries():
        if _PEFT in _kinds(model):
            if model.active_peft_config.is_prompt_learning:
                kind = model.active_peft_config.peft_type
                raise UnsupportedError(f"a {kind} adapter cannot become part of weights")
            # Merged into a copy: merging rewrites the weights that the user goes on with.
            model = merged(copy.deepcopy(model))
        with _kept_configurations(model):
            if tokenizer is None:
                model.save_pretrained(folder, create_model_card=False)
            else:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)


@contextmanager
def _kept_configurations(model: Any) -> Iterator[None]:
    """Saving writes the dtype into the configuration of what it saves."""
    owners = [part for part in model.modules() if _TRANSFORMERS in _kinds(part)]
    before = [owner.config for owner in owners]
    for owner in owners:
        owner.config = copy.deepcopy(owner.config)
    try:
        yield
    finally:
        for owner, config in zip(owners, before, strict=True):
            owner.config = config


def _plain(model: Any) -> Any:
    """The model inside what torch.compile makes of it."""
    return getattr(model, "_orig_mod", model)


def _has_quantizers(model: Any) -> bool:
    return any(_QUANTIZER in _kinds(part) for part in model.modules())


def _find_transformers(model: Any) -> Any:
    parts = model.modules() if hasattr(model, "modules") else ()
    return next((part for part in parts if _TRANSFORMERS in _kinds(part)), None)


def _kinds(model: object) -> set[str]:
    """The classes it is of, by package: none of these libraries is imported to find out that it is not in play."""
    return {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(model).__mro__}
