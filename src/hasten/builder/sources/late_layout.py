"""Read the layout of a multi-vector encoder as sentence-transformers, PyLate and Stanford's ColBERT store it."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.sentence_layout import (
    DenseLayer,
    LateLayout,
    NormLayer,
    SentenceLayout,
    add_settings,
    module_kinds,
    read_layer,
)
from hasten.core.errors import PlanError, UnsupportedError
from hasten.tasks import LateInteraction
from hasten.tasks.multi_vector_embedding import DOCUMENT, MAXSIM, MEAN_MAXSIM, QUERY

_MASK = "MultiVectorMask"
_STANFORD = "HF_ColBERT"
# The names in config_sentence_transformers.json: of sentence-transformers, and of PyLate up to version 3.
_MODEL_TYPES = ("MultiVectorEncoder", "ColBERT")
_PUNCTUATION = tuple(string.punctuation)
# The length of queries and their markers where Stanford's files do not say otherwise.
_QUERY_LENGTH, _MARKERS = 32, {QUERY: "[unused0]", DOCUMENT: "[unused1]"}
_MARKER_KEYS = {QUERY: "query_token_id", DOCUMENT: "doc_token_id"}
_PREFIX_KEYS = {QUERY: "query_prefix", DOCUMENT: "document_prefix"}
# Keys by which sentence-transformers recognizes that PyLate saved a model, whose queries are expanded by default.
_PYLATE_KEYS = (*_PREFIX_KEYS.values(), "query_length", "document_length", "skiplist_words", "do_query_expansion")


def is_multi_vector_encoder(model: ModelDirectory) -> bool:
    """Return whether the model was saved as a multi-vector encoder."""
    if model.json("modules.json") is None:
        return model.architecture == _STANFORD
    return _settings(model).get("model_type") in _MODEL_TYPES or any(kind == _MASK for kind, _ in module_kinds(model))


def read_late_layout(model: ModelDirectory) -> SentenceLayout:
    """Read the layout from the model's files."""
    if model.json("modules.json") is not None:
        return _read_modules(model)
    if model.architecture == _STANFORD:
        return _read_stanford(model)
    raise PlanError(
        f"{model.id} has no layout of a multi-vector encoder, so its projection is unknown",
        hint="save it with sentence-transformers' MultiVectorEncoder",
    )


def _read_modules(model: ModelDirectory) -> SentenceLayout:
    settings, modules = _settings(model), module_kinds(model)
    kinds = " → ".join(kind for kind, _ in modules)
    unsupported = UnsupportedError(f"{model.id} computes token vectors with {kinds}, which is not supported")
    if modules[0][0] != "Transformer":
        raise unsupported
    dense: list[DenseLayer | NormLayer] = []
    # PyLate up to version 3 lists neither its mask nor the normalization.
    is_pylate = settings.get("model_type") == "ColBERT"
    normalize, mask = is_pylate, None
    for kind, folder in modules[1:]:
        config = model.json(f"{folder}/config.json") or {}
        if kind == _MASK:
            mask = config
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense" and (is_pylate or not normalize):
            dense.append(read_layer(model, kind, folder))
        else:
            raise unsupported
    skipped = settings.get("skiplist_words")
    if mask is None:
        mask = {"skiplist_words": _PUNCTUATION if skipped is None and is_pylate else skipped or ()}
    if mask.get("keep_only_token_ids"):
        raise UnsupportedError(f"{model.id} scores image tokens only, and only texts are supported")
    sides = mask.get("skiplist_tasks") or (DOCUMENT,)
    transformer = {**_pylate_settings(settings), **(model.json("sentence_bert_config.json") or {})}
    late = replace(
        _read_lengths(model, transformer),
        skipped_words=tuple(map(str, mask.get("skiplist_words") or ())),
        skipped_sides=(sides,) if isinstance(sides, str) else tuple(map(str, sides)),
        prefixes={side: str(settings[key] or "") for side, key in _PREFIX_KEYS.items() if key in settings},
    )
    layout = add_settings(SentenceLayout((), normalize, tuple(dense), late=late), model)
    prompts = dict(layout.prompts)
    for side, prefix in late.prefixes.items():
        prompts[side] = prefix + prompts.get(side, "").removeprefix(prefix)
    similarity = settings.get("similarity_fn_name")
    return replace(layout, prompts=prompts, similarity=similarity if similarity == MEAN_MAXSIM else MAXSIM)


def _read_stanford(model: ModelDirectory) -> SentenceLayout:
    """Read a checkpoint whose projection is beside the weights of its transformer."""
    from safetensors import safe_open

    file = model.find("model.safetensors")
    if file is None:
        raise UnsupportedError(f"{model.id} has no safetensors weights, in which its projection would be")
    with safe_open(str(file), "numpy") as weights:
        if "linear.weight" not in weights.keys():  # noqa: SIM118 – not a mapping
            raise UnsupportedError(f"{model.id} has no projection: its weights have no 'linear.weight'")
        outputs, inputs = weights.get_slice("linear.weight").get_shape()
    metadata = model.json("artifact.metadata") or {}
    late = LateLayout(
        document_length=_length(model, metadata, "doc_maxlen"),
        expansion_length=_length(model, metadata, "query_maxlen") or _QUERY_LENGTH,
        is_expansion_fixed=True,
        is_expansion_attended=bool(metadata.get("attend_to_mask_tokens")),
        skipped_words=_PUNCTUATION if metadata.get("mask_punctuation", True) else (),
        prefixes={side: f"{metadata.get(key) or _MARKERS[side]} " for side, key in _MARKER_KEYS.items()},
    )
    dense = DenseLayer(file, int(inputs), int(outputs), has_bias=False, activation="Identity")
    return SentenceLayout((), True, (dense,), prompts=dict(late.prefixes), late=late, similarity=MAXSIM)


def _settings(model: ModelDirectory) -> dict[str, Any]:
    settings = model.json("config_sentence_transformers.json")
    return settings if isinstance(settings, dict) else {}


def _pylate_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the lengths and the expansion of a model that PyLate saved, in the form of the transformer's settings."""
    if not any(key in settings for key in _PYLATE_KEYS):
        return {}
    translated: dict[str, Any] = {"document_length": settings.get("document_length")}
    if "query_expansion" in settings:
        translated["query_expansion"] = settings["query_expansion"]
    elif settings.get("do_query_expansion") is not False:
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = settings.get("query_length") or _QUERY_LENGTH
        return translated | {
            "query_expansion": {"strategy": "fixed", "attend": bool(attend), "length": length},
        }
    return translated | {"query_length": settings.get("query_length")}


def _read_lengths(model: ModelDirectory, transformer: dict[str, Any]) -> LateLayout:
    expansion = transformer.get("query_expansion") or {}
    if not isinstance(expansion, dict) or (strategy := expansion.get("strategy", "fixed")) not in ("fixed", "min"):
        raise UnsupportedError(f"{model.id} expands queries in an unsupported way: {expansion!r:.80}")
    return LateLayout(
        query_length=_length(model, transformer, "query_length"),
        document_length=_length(model, transformer, "document_length"),
        expansion_length=_length(model, expansion, "length") or 0,
        expansion_token=expansion.get("token"),
        is_expansion_fixed=strategy == "fixed",
        is_expansion_attended=bool(expansion.get("attend")),
    )


def _length(model: ModelDirectory, settings: dict[str, Any], key: str) -> int | None:
    value = settings.get(key)
    if value is None or (isinstance(value, int) and value > 0):
        return value
    raise UnsupportedError(f"{model.id} has the unsupported {key} {value!r:.40}")


def register_prefixes(tokenizer: Any, late: LateLayout) -> None:
    """Make markers such as [unused0] single tokens of the tokenizer, as the models were trained with them."""
    from transformers import AddedToken

    vocabulary = tokenizer.get_vocab()
    added = []
    for text in filter(str.strip, late.prefixes.values()):
        prefix = next((part for part in (text, text.split(None, 1)[0]) if part in vocabulary), None)
        if prefix is not None and tokenizer.tokenize(prefix) != [prefix]:
            added.append(AddedToken(prefix, normalized=False, special=True))
    if added:
        tokenizer.add_special_tokens({"additional_special_tokens": added})


def late_interaction(layout: SentenceLayout, tokenizer: Any, max_length: int, name: str) -> LateInteraction | None:
    """Return the settings of the task: lengths within the model's limit, and token ids instead of words."""
    late = layout.late
    if late is None:
        return None
    expansion_id = None
    if late.expansion_length:
        if tokenizer.padding_side == "left":
            raise UnsupportedError(f"{name} expands queries on the left, which is not supported")
        token = late.expansion_token
        ids = [tokenizer.mask_token_id, tokenizer.eos_token_id]
        ids = ids if token is None else [tokenizer.get_vocab().get(token)]
        expansion_id = next((token_id for token_id in ids if token_id is not None), None)
        if expansion_id is None or late.expansion_length > max_length:
            raise UnsupportedError(
                f"{name} cannot expand queries to {late.expansion_length} tokens: its limit is {max_length},"
                f" and its tokenizer has {'a' if expansion_id is not None else 'no'} token for them"
            )
    # Words that are no token must not make the model ignore every unknown word.
    words = {word: tokenizer.convert_tokens_to_ids(word) for word in late.skipped_words}
    skipped = {
        token_id
        for word, token_id in words.items()
        if token_id is not None and (token_id != tokenizer.unk_token_id or word == tokenizer.unk_token)
    }
    query_length, document_length = late.limits(layout.max_length or tokenizer.model_max_length)
    return LateInteraction(
        query_length=min(query_length, max_length),
        document_length=min(document_length, max_length),
        expansion_length=late.expansion_length,
        expansion_id=expansion_id or 0,
        is_expansion_attended=late.is_expansion_attended,
        skipped_ids=tuple(sorted(skipped)),
        skipped_sides=late.skipped_sides,
    )
