"""From a directory to a model that writes, its tokenizer, and what its configuration says about writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.builder.adapter import load_adapted
from hasten.builder.libraries import first_line, loading_hint, quiet_libraries
from hasten.builder.source import ModelDirectory
from hasten.builder.tokenizer import load_tokenizer, tidies_spaces
from hasten.core.errors import HastenError, StageError, UnsupportedError, missing_package
from hasten.core.generation import TEXT2TEXT_GENERATION, TEXT_GENERATION, GenerationSpec, Sampling
from hasten.core.plan import Plan
from hasten.core.tensors import BATCH, SEQUENCE, DType, Signature, TensorSpec
from hasten.core.tokenizer import TokenizerSpec

CLASSES = {TEXT_GENERATION: "AutoModelForCausalLM", TEXT2TEXT_GENERATION: "AutoModelForSeq2SeqLM"}
# Where a configuration knows no limit, as T5's relative positions do not.
_NO_LIMIT = 512
_MOST_TOKENS = 128
# Of transformers' options those that change what is written and are not done here, each with what changes nothing.
_NOT_DONE = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), 1.0),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty", "penalty_alpha"), None),
    **dict.fromkeys(("sequence_bias", "token_healing", "watermarking_config"), None),
}


@dataclass(frozen=True, slots=True)
class Writer:
    """A PyTorch module that writes, and what the rest of the build needs to know of it."""

    task: str
    module: Any
    original_tokenizer: Any
    tokenizer: TokenizerSpec
    spec: GenerationSpec

    @property
    def architecture(self) -> str:
        return type(self.module).__name__

    @property
    def has_encoder(self) -> bool:
        return self.task == TEXT2TEXT_GENERATION

    @property
    def signature(self) -> Signature:
        return Signature(
            inputs=(TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE), self.tokenizer.pad_id),),
            outputs=(TensorSpec("logits", DType.FLOAT32, (BATCH, self.spec.vocabulary)),),
            max_length=self.spec.context,
        )


def load_writer(model: ModelDirectory, task: str, plan: Plan) -> Writer:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise missing_package(error.name or "torch", "building", "build") from error
    from hasten.quantize.qdq.patch import outside

    with quiet_libraries(), outside():
        tokenizer = load_tokenizer(model, plan)
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedError(
                f"the tokenizer of {model.id} ({type(tokenizer).__name__}) has no tokenizers-library form,"
                " and bundles are served without transformers"
            )
        try:
            if model.base is None:
                module, loading = getattr(transformers, CLASSES[task]).from_pretrained(
                    model.path,
                    output_loading_info=True,
                    dtype=torch.float32,
                    trust_remote_code=plan.trust_remote_code,
                    use_safetensors=None if plan.allow_pickle else True,
                )
                missing = sorted(loading["missing_keys"])
            else:
                module, missing = load_adapted(model, CLASSES[task], plan)
        except HastenError:
            raise
        except Exception as error:
            raise StageError(f"{model.id} does not load: {first_line(error)}", hint=loading_hint(error)) from error
    if missing:
        raise StageError(
            f"{model.id} has no weights for {len(missing)} tensors of {type(module).__name__}, such as '{missing[0]}'"
        )
    spec = read_spec(module, tokenizer, has_encoder=task == TEXT2TEXT_GENERATION)
    return Writer(task, module.eval(), tokenizer, _tokenizer_spec(module, tokenizer, spec, task), spec)


def read_spec(module: Any, tokenizer: Any, *, has_encoder: bool) -> GenerationSpec:
    """What configuration, generation_config and tokenizer say about writing."""
    told, config = module.generation_config, module.config.get_text_config(decoder=True)
    ends = _ids(_first(told.eos_token_id, config.eos_token_id, tokenizer.eos_token_id))
    start = _first(told.decoder_start_token_id, getattr(config, "decoder_start_token_id", None))
    if has_encoder and start is None:
        raise UnsupportedError(f"{type(module).__name__} does not say what an answer begins with")
    # What is forced to come first is what an answer begins with.
    starts = (*_ids(start), *_ids(told.forced_bos_token_id)) if has_encoder else ()
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    special = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return GenerationSpec(
        context=_limit(config),
        vocabulary=int(module.get_output_embeddings().weight.shape[0]),
        end_ids=ends,
        start_ids=starts,
        chat_template=template or "",
        special_tokens=special,
        defaults=_defaults(told, starts),
        forced_end_id=next(iter(_ids(told.forced_eos_token_id)), None) if has_encoder else None,
        renormalizes=bool(told.renormalize_logits),
    )


def unknown_options(module: Any) -> list[str]:
    """What the model's own configuration asks for and nobody does here, with what it is."""
    told = module.generation_config.to_diff_dict()
    found = {name: told[name] for name, none in _NOT_DONE.items() if told.get(name) and told[name] != none}
    if told.get("early_stopping") == "never":
        found["early_stopping"] = "never"
    if told.get("min_length") and not module.config.is_encoder_decoder:
        # It counts the prompt, which is not known yet.
        found["min_length"] = told["min_length"]
    return [f"{name}={value}" for name, value in found.items()]


def _defaults(told: Any, starts: Sequence[int]) -> Sampling:
    """transformers takes the likeliest word, or the best of beams, unless told to sample.

    It counts what every answer begins with as part of it, and of its new tokens all but the first.
    """
    samples = bool(told.do_sample)
    most = told.max_new_tokens and told.max_new_tokens - max(0, len(starts) - 1)
    least = (told.min_new_tokens or 0) - max(0, len(starts) - 1)
    if starts:
        most = most or (told.max_length and told.max_length - len(starts))
        least = max(least, (told.min_length or 0) - len(starts))
    return Sampling(
        max_tokens=max(1, int(most or _MOST_TOKENS)),
        temperature=float(_first(told.temperature, 1.0)) if samples else 0.0,
        top_k=int(_first(told.top_k, 50)) if samples else 0,
        top_p=float(_first(told.top_p, 1.0)) if samples else 1.0,
        min_p=float(told.min_p or 0.0) if samples else 0.0,
        repetition_penalty=float(_first(told.repetition_penalty, 1.0)),
        no_repeat_ngram_size=int(told.no_repeat_ngram_size or 0),
        bad_words_ids=_bad_words(told),
        min_tokens=max(0, int(least)),
        beams=int(_first(told.num_beams, 1)),
        length_penalty=float(_first(told.length_penalty, 1.0)),
        early_stopping=told.early_stopping is True,
    )


def _bad_words(told: Any) -> tuple[tuple[int, ...], ...]:
    """Without the end by itself, as transformers takes them."""
    ends = {(token,) for token in _ids(told.eos_token_id)}
    words = [tuple(word) for word in told.bad_words_ids or ()] + [(token,) for token in told.suppress_tokens or ()]
    return tuple(word for word in words if word not in ends)


def _limit(config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else _NO_LIMIT


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)


def _tokenizer_spec(module: Any, tokenizer: Any, spec: GenerationSpec, task: str) -> TokenizerSpec:
    # What an encoder reads has a limit of its own.
    limit = _limit(module.config) if task == TEXT2TEXT_GENERATION else spec.context
    return TokenizerSpec(
        inputs=("input_ids",),
        max_length=min(limit, tokenizer.model_max_length),
        pad_id=_first(tokenizer.pad_token_id, 0),
        truncates_left=tokenizer.truncation_side == "left",
        tidies_spaces=tidies_spaces(tokenizer),
        pads_left=tokenizer.padding_side == "left",
        cls_id=tokenizer.cls_token_id,
    )
