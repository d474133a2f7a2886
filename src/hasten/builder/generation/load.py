"""Load a generative model, its tokenizer and its generation settings from a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.pytorch_model import Loaded, load_module
from hasten.builder.sources.tokenizer import tokenizer_spec
from hasten.core.errors import UnsupportedError
from hasten.core.generation_types import AUTO_CLASSES, TEXT2TEXT_GENERATION, GenerationSpec, SamplingParams
from hasten.core.plan import Plan
from hasten.core.tensors import BATCH, SEQUENCE, DType, Signature, TensorSpec
from hasten.tasks import TaskSpec

# The context of a configuration without a limit, such as T5's with its relative positions.
_DEFAULT_CONTEXT = 512
_DEFAULT_MAX_TOKENS = 128
# Options of transformers that change the output and are not supported, each with the value that disables it.
_UNSUPPORTED_OPTIONS = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), 1.0),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty", "penalty_alpha"), None),
    **dict.fromkeys(("sequence_bias", "token_healing", "watermarking_config"), None),
}


@dataclass(frozen=True, slots=True)
class LoadedGenerator(Loaded):
    """A generative PyTorch module with its tokenizer and settings."""

    module: Any
    spec: GenerationSpec

    @property
    def has_encoder(self) -> bool:
        """Return whether an encoder reads the prompt."""
        return self.task.name == TEXT2TEXT_GENERATION


def load_generator(model: ModelDirectory, task: str, plan: Plan) -> LoadedGenerator:
    """Load a model in fp32 for a generation task."""
    module, tokenizer = load_module(model, AUTO_CLASSES[task], plan)
    spec = read_spec(module, tokenizer, has_encoder=task == TEXT2TEXT_GENERATION)
    # The encoder has its own limit.
    limit = _limit(module.config) if task == TEXT2TEXT_GENERATION else spec.max_context
    tokenizer_settings = tokenizer_spec(tokenizer, ("input_ids",), min(limit, tokenizer.model_max_length))
    return LoadedGenerator(
        task=TaskSpec(task),
        tokenizer=tokenizer_settings,
        original_tokenizer=tokenizer,
        # The inputs and outputs of a decode step.
        signature=Signature(
            inputs=(TensorSpec("input_ids", DType.INT32, (BATCH, SEQUENCE), tokenizer_settings.pad_id),),
            outputs=(TensorSpec("logits", DType.FLOAT32, (BATCH, spec.vocab_size)),),
            max_length=spec.max_context,
        ),
        config=module.config,
        architecture=type(module).__name__,
        module=module,
        spec=spec,
    )


def read_spec(module: Any, tokenizer: Any, *, has_encoder: bool) -> GenerationSpec:
    """Return the generation settings of the configuration, the generation_config and the tokenizer."""
    generation_config, config = module.generation_config, module.config.get_text_config(decoder=True)
    start = _first(generation_config.decoder_start_token_id, getattr(config, "decoder_start_token_id", None))
    if has_encoder and start is None:
        raise UnsupportedError(f"{type(module).__name__} has no decoder_start_token_id")
    # A forced first token is part of the decoder's start.
    starts = (*_ids(start), *_ids(generation_config.forced_bos_token_id)) if has_encoder else ()
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", "")
    return GenerationSpec(
        max_context=_limit(config),
        vocab_size=int(module.get_output_embeddings().weight.shape[0]),
        eos_token_ids=_ids(_first(generation_config.eos_token_id, config.eos_token_id, tokenizer.eos_token_id)),
        decoder_start_token_ids=starts,
        chat_template=template or "",
        special_tokens={name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
        defaults=_defaults(generation_config, starts),
        forced_eos_token_id=next(iter(_ids(generation_config.forced_eos_token_id)), None) if has_encoder else None,
        renormalize_logits=bool(generation_config.renormalize_logits),
    )


def unsupported_options(module: Any) -> list[str]:
    """Return the options of the model's generation_config that are not supported, as `name=value`."""
    options = module.generation_config.to_diff_dict()
    unsupported = {
        name: options[name]
        for name, disabled in _UNSUPPORTED_OPTIONS.items()
        if options.get(name) and options[name] != disabled
    }
    if options.get("early_stopping") == "never":
        unsupported["early_stopping"] = "never"
    if options.get("min_length") and not module.config.is_encoder_decoder:
        # It includes the prompt, whose length is not known yet.
        unsupported["min_length"] = options["min_length"]
    return [f"{name}={value}" for name, value in unsupported.items()]


def _defaults(generation_config: Any, starts: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters of a generation_config.

    transformers decodes greedily or by beam search unless `do_sample` is set. It counts the start tokens as part of the
    answer's length, and all but the first of them as new tokens.
    """
    is_sampled = bool(generation_config.do_sample)
    max_tokens = generation_config.max_new_tokens and generation_config.max_new_tokens - max(0, len(starts) - 1)
    min_tokens = (generation_config.min_new_tokens or 0) - max(0, len(starts) - 1)
    if starts:
        max_tokens = max_tokens or (generation_config.max_length and generation_config.max_length - len(starts))
        min_tokens = max(min_tokens, (generation_config.min_length or 0) - len(starts))
    return SamplingParams(
        max_tokens=max(1, int(max_tokens or _DEFAULT_MAX_TOKENS)),
        temperature=float(_first(generation_config.temperature, 1.0)) if is_sampled else 0.0,
        top_k=int(_first(generation_config.top_k, 50)) if is_sampled else 0,
        top_p=float(_first(generation_config.top_p, 1.0)) if is_sampled else 1.0,
        min_p=float(generation_config.min_p or 0.0) if is_sampled else 0.0,
        repetition_penalty=float(_first(generation_config.repetition_penalty, 1.0)),
        no_repeat_ngram_size=int(generation_config.no_repeat_ngram_size or 0),
        bad_words_ids=_bad_words(generation_config),
        min_tokens=max(0, int(min_tokens)),
        num_beams=int(_first(generation_config.num_beams, 1)),
        length_penalty=float(_first(generation_config.length_penalty, 1.0)),
        early_stopping=generation_config.early_stopping is True,
    )


def _bad_words(generation_config: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must not occur, without the end token alone, as in transformers."""
    ends = {(token,) for token in _ids(generation_config.eos_token_id)}
    suppressed = [(token,) for token in generation_config.suppress_tokens or ()]
    words = [tuple(word) for word in generation_config.bad_words_ids or ()] + suppressed
    return tuple(word for word in words if word not in ends)


def _limit(config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else _DEFAULT_CONTEXT


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)
