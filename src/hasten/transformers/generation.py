"""Drop-in generative models: `generate` with the options of transformers, run by our decode scheduler."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from hasten.auto_build import variant_of
from hasten.backends import Decoder, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import InputError, PlanError
from hasten.core.generation_types import GenerationSpec, SamplingParams
from hasten.core.variant import Variant, VariantChoice
from hasten.generation.generator import SLOTS, open_decoder
from hasten.generation.options import sampling_params
from hasten.generation.prompts import check_tokens
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextSequence
from hasten.predictor import first_runnable_variant, require_variant
from hasten.transformers.base import InferenceModel
from hasten.transformers.tensors import IDS, check, rows_of

# Options of transformers' generate that are implemented here.
_SUPPORTED = {
    *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("num_beams", "length_penalty", "stop_strings", "num_return_sequences", "pad_token_id", "eos_token_id"),
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids", "early_stopping"),
}
# Options about how to compute, and tokens that the bundle already defines.
_IGNORED = {
    *("use_cache", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "transformers_version"),
    *("cache_implementation", "disable_compile", "use_mtp", "forced_eos_token_id", "renormalize_logits"),
}


class GenerativeModel(InferenceModel):
    """A generative model. Thread-safe: one call runs at a time."""

    def __init__(self, bundle: Bundle, decoder: Decoder, spec: GenerationSpec, variant: Variant) -> None:
        super().__init__(bundle, variant.device, variant.precision.value)
        file = bundle.configuration("generation_config.json")
        config_class = transformers.GenerationConfig
        self.generation_config = config_class.from_pretrained(file.parent) if file is not None else config_class()
        self._spec = spec
        self._decoder = decoder
        self._scheduler = DecodeScheduler(decoder, spec, bundle.tokenizer(), prefills_per_step=decoder.slots)
        self._lock = threading.Lock()

    def can_generate(self) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._unsupported("calling it for logits is not supported", hint="use model.generate(…)")

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Tensor:
        """Generate: return prompts with their continuations or, for an encoder-decoder, the answers alone.

        Greedy and beam search give the tokens of transformers. Samples depend on PyTorch's seed but differ from those
        of transformers.
        """
        ids = options.pop(IDS, None) if inputs is None else inputs
        if ids is None:
            raise InputError("input_ids are missing", hint="model.generate(**tokenizer(texts, return_tensors='pt'))")
        settings = self._settings(generation_config, options)
        mask = self._mask(ids, settings) if attention_mask is None else attention_mask
        tensors = {IDS: ids} if mask is None else {IDS: ids, "attention_mask": mask}
        check(tensors, axes=("rows", "tokens"))
        prompts = rows_of(tensors)
        for prompt in prompts:
            check_tokens(prompt, self._spec)
        count = _integer(settings, "num_return_sequences", minimum=1) or 1
        sampling = self._sampling(settings)
        if count > 1 and sampling.temperature == 0:
            self._unsupported(f"{count} sequences per prompt without sampling", hint="set do_sample=True")
        if streamer is not None and len(prompts) * count > 1:
            self._unsupported("a streamer receives one sequence, not several")
        sequences = [
            self._scheduler.new_sequence(
                prompt, self._with_limits(sampling, settings, ids.shape[1]), lambda _: None, continues=True
            )
            for prompt in prompts
            for _ in range(count)
        ]
        with self._lock:
            self._decode(sequences, ids, streamer)
        answers = [self._with_end(sequence) for sequence in sequences]
        pad = settings.get("pad_token_id")
        # In beam search, transformers treats a pad token of 0 as not set.
        is_none = pad is None or (pad == 0 and sampling.num_beams > 1)
        pad = self._spec.eos_token_ids[0] if is_none and self._spec.eos_token_ids else int(pad or 0)
        longest = max(map(len, answers))
        output = torch.tensor([[*answer, *[pad] * (longest - len(answer))] for answer in answers], dtype=ids.dtype)
        if not self._spec.decoder_start_token_ids:
            output = torch.cat([ids.cpu().repeat_interleave(count, dim=0), output], dim=1)
        return output.to(ids.device)

    def close(self) -> None:
        """Free the decoder."""
        self._decoder.close()

    def _settings(self, generation_config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options, else the values of `generation_config`, of the model, and of transformers."""
        defaults = transformers.GenerationConfig._get_default_generation_params()
        settings: dict[str, Any] = defaults | self.generation_config.to_diff_dict()
        if generation_config is not None:
            settings |= generation_config.to_diff_dict()
        requested = {name: value for name, value in options.items() if value is not None}
        settings |= requested
        for name, value in settings.items():
            is_known = name.startswith("_") or name in _SUPPORTED | _IGNORED
            # Empty lists, such as stopping criteria, have no effect.
            if is_known or value is None or value is False or (isinstance(value, list) and not value):
                continue
            if isinstance(value, Tensor | np.ndarray) or value != defaults.get(name):
                self._unsupported(
                    f"generate() does not support '{name}'", hint=f"supported: {', '.join(sorted(_SUPPORTED))}"
                )
        ends = settings.get("eos_token_id")
        ends = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        if ends and set(ends) != set(self._spec.eos_token_ids):
            self._unsupported(f"its end-of-sequence tokens are {self._spec.eos_token_ids}, not {ends}")
        if "max_length" in requested and "max_new_tokens" not in requested:
            settings.pop("max_new_tokens", None)
        return settings

    def _sampling(self, settings: Mapping[str, Any]) -> SamplingParams:
        stops = settings.get("stop_strings") or ()
        is_sampled = bool(settings["do_sample"])
        if is_sampled and settings["num_beams"] > 1:
            self._unsupported("beam search with sampling", hint="set do_sample=False or num_beams=1")
        names = ["repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "length_penalty"]
        names += ["temperature", "top_k", "top_p", "min_p"] if is_sampled else []
        params = {name: settings.get(name) for name in names}
        early_stopping = settings.get("early_stopping", False)
        if not isinstance(early_stopping, bool):
            self._unsupported(f"early_stopping={early_stopping!r}", hint="use True or False")
        params |= {"stop": stops, "num_beams": settings["num_beams"], "early_stopping": early_stopping}
        return sampling_params(SamplingParams(), params)

    def _with_limits(self, sampling: SamplingParams, settings: Mapping[str, Any], width: int) -> SamplingParams:
        """Return the parameters with a seed and the length limits, which transformers counts from the padded prompt."""
        starts = self._spec.decoder_start_token_ids
        # transformers counts all but the first of the forced start tokens as new.
        max_tokens, forced = _integer(settings, "max_new_tokens", minimum=1), max(0, len(starts) - 1)
        prefix = len(starts) or width
        max_tokens = (_integer(settings, "max_length") or 0) - prefix if max_tokens is None else max_tokens - forced
        min_tokens = max(
            (_integer(settings, "min_length") or 0) - prefix, (_integer(settings, "min_new_tokens") or 0) - forced
        )
        if max_tokens < 1:
            raise InputError(
                f"max_length leaves no room for new tokens after {width} prompt tokens", hint="set max_new_tokens"
            )
        seed = int(torch.randint(2**31, ())) if sampling.temperature > 0 else None
        return replace(sampling, max_tokens=max_tokens, min_tokens=max(0, min_tokens), seed=seed)

    def _mask(self, ids: Tensor, settings: Mapping[str, Any]) -> Tensor | None:
        """Infer the attention mask from the pad token, unless it also ends sequences, as transformers does."""
        pad = settings.get("pad_token_id")
        if not isinstance(ids, Tensor) or pad is None or pad in self._spec.eos_token_ids:
            return None
        return ids != pad

    def _decode(self, sequences: Sequence[TextSequence], ids: Tensor, streamer: Any) -> None:
        for sequence in sequences:
            self._scheduler.add(sequence)
        first, *starts = self._spec.decoder_start_token_ids or [None]
        if streamer is not None:
            # A streamer that skips the prompt skips the first value.
            streamer.put(ids.cpu() if first is None else torch.tensor([[first]]))
            for token in starts:
                streamer.put(torch.tensor([token]))
        streamed = 0
        try:
            while not all(sequence.is_over for sequence in sequences):
                self._scheduler.step()
                if streamer is not None:
                    for token in sequences[0].ids[streamed:]:
                        streamer.put(torch.tensor([token]))
                    streamed = len(sequences[0].ids)
        except BaseException:
            self._scheduler.clear()
            raise
        if streamer is not None:
            if sequences[0].eos_token_id is not None:
                streamer.put(torch.tensor([sequences[0].eos_token_id]))
            streamer.end()

    def _with_end(self, sequence: TextSequence) -> list[int]:
        """Return the tokens with the end-of-sequence token, unless a stop string or a limit ended the sequence."""
        end = [] if sequence.eos_token_id is None else [sequence.eos_token_id]
        return [*self._spec.decoder_start_token_ids, *sequence.ids, *end]


def _integer(settings: Mapping[str, Any], name: str, minimum: int = 0) -> int | None:
    value = settings.get(name)
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = minimum - 1
    if number is not None and number < minimum:
        raise InputError(f"{name} is {value!r}; it must be a whole number, at least {minimum}")
    return number


def open_generative_model(
    bundle: Bundle, kind: str, task: str, choice: VariantChoice, threads: int | None
) -> GenerativeModel:
    """Open a bundle as a generative model of one of transformers' Auto classes."""
    bundle_task, spec = bundle.manifest.task.name, bundle.manifest.generation
    if bundle_task != task or spec is None:
        raise PlanError(f"{bundle.path} is for {bundle_task}, and {kind} is not")
    variant = variant_of(bundle, choice)
    artifact = require_variant(bundle, bundle.entry(variant)) if variant is not None else first_runnable_variant(bundle)
    decoder = open_decoder(artifact, RunOptions(threads), SLOTS)
    # Pipelines of transformers identify supported models by the names of their classes.
    named_class = type(bundle.manifest.model.architecture or kind, (GenerativeModel,), {})
    model: GenerativeModel = named_class(bundle, decoder, spec, artifact.variant)
    return model
