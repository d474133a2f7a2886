"""Models that write: `generate` with transformers' options, over our own loop."""

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

from hasten.backends import Decoder, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import InputError, PlanError
from hasten.core.generation import GenerationSpec, Sampling
from hasten.core.variant import Variant, VariantChoice
from hasten.generation.generator import SLOTS, open_decoder
from hasten.generation.options import sampling_of
from hasten.generation.prompts import check_tokens
from hasten.generation.rows import Row
from hasten.generation.writing import Writer
from hasten.on_demand import variant_of
from hasten.predictor import required, runnable
from hasten.transformers.stand_in import StandIn
from hasten.transformers.tensors import IDS, check, rows_of

# Options of transformers' generate that have one of ours, or whose effect is known here.
_TAKEN = {
    *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("num_beams", "length_penalty", "stop_strings", "num_return_sequences", "pad_token_id", "eos_token_id"),
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids", "early_stopping"),
}
# Those that say how to compute, or whose tokens the bundle knows already.
_WITHOUT_EFFECT = {
    *("use_cache", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id", "transformers_version"),
    *("cache_implementation", "disable_compile", "use_mtp", "forced_eos_token_id", "renormalize_logits"),
}


class WritingModel(StandIn):
    """A model that writes. Safe to share between threads: they take turns."""

    def __init__(self, bundle: Bundle, decoder: Decoder, spec: GenerationSpec, variant: Variant) -> None:
        super().__init__(bundle, variant.device, variant.precision.value)
        file = bundle.configuration("generation_config.json")
        kind = transformers.GenerationConfig
        self.generation_config = kind.from_pretrained(file.parent) if file is not None else kind()
        self._spec = spec
        self._decoder = decoder
        self._writer = Writer(decoder, spec, bundle.tokenizer(), prompts_a_step=decoder.slots)
        self._lock = threading.Lock()

    def can_generate(self) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("it gives the logits of the next token alone, and only to generate()", hint="model.generate(…)")

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
        """The prompts and what was written after them or, where an encoder reads them, the answers alone.

        Greedy answers and beams are transformers' own; what is drawn is drawn from PyTorch's seed, but otherwise.
        """
        ids = options.pop(IDS, None) if inputs is None else inputs
        if ids is None:
            raise InputError("no input_ids given", hint="model.generate(**tokenizer(texts, return_tensors='pt'))")
        told = self._told(generation_config, options)
        mask = self._mask(ids, told) if attention_mask is None else attention_mask
        given = {IDS: ids} if mask is None else {IDS: ids, "attention_mask": mask}
        check(given, axes=("rows", "tokens"))
        prompts = rows_of(given)
        for prompt in prompts:
            check_tokens(prompt, self._spec)
        count = _whole(told, "num_return_sequences", least=1) or 1
        sampling = self._sampling(told)
        if count > 1 and sampling.temperature == 0:
            self._refuse(f"{count} sequences of one prompt without sampling", hint="do_sample=True")
        if streamer is not None and len(prompts) * count > 1:
            self._refuse("a streamer takes one text at a time")
        rows = [
            self._writer.row(prompt, self._limited(sampling, told, ids.shape[1]), lambda _: None, continues=True)
            for prompt in prompts
            for _ in range(count)
        ]
        with self._lock:
            self._write(rows, ids, streamer)
        answers = [self._ended(row) for row in rows]
        pad = told.get("pad_token_id")
        # transformers takes a pad of 0 for none where it searches.
        is_none = pad is None or (pad == 0 and sampling.beams > 1)
        pad = self._spec.end_ids[0] if is_none and self._spec.end_ids else int(pad or 0)
        longest = max(map(len, answers))
        written = torch.tensor([[*answer, *[pad] * (longest - len(answer))] for answer in answers], dtype=ids.dtype)
        if not self._spec.start_ids:
            written = torch.cat([ids.cpu().repeat_interleave(count, dim=0), written], dim=1)
        return written.to(ids.device)

    def close(self) -> None:
        self._decoder.close()

    def _told(self, generation_config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """What was asked for, over the configuration that was given, over the model's own, over transformers' own."""
        kind = transformers.GenerationConfig
        common = kind._get_default_generation_params()
        told: dict[str, Any] = common | self.generation_config.to_diff_dict()
        if generation_config is not None:
            told |= generation_config.to_diff_dict()
        asked = {name: value for name, value in options.items() if value is not None}
        told |= asked
        for name, value in told.items():
            is_known = name.startswith("_") or name in _TAKEN | _WITHOUT_EFFECT
            # What is empty, as a list of stopping criteria may be, changes nothing.
            if is_known or value is None or value is False or (isinstance(value, list) and not value):
                continue
            if isinstance(value, Tensor | np.ndarray) or value != common.get(name):
                self._refuse(f"'{name}' is not taken by generate()", hint=f"taken: {', '.join(sorted(_TAKEN))}")
        ends = told.get("eos_token_id")
        ends = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        if ends and set(ends) != set(self._spec.end_ids):
            self._refuse(f"its texts end with the tokens {self._spec.end_ids}, not with {ends}")
        if "max_length" in asked and "max_new_tokens" not in asked:
            told.pop("max_new_tokens", None)
        return told

    def _sampling(self, told: Mapping[str, Any]) -> Sampling:
        stops = told.get("stop_strings") or ()
        drawn = bool(told["do_sample"])
        if drawn and told["num_beams"] > 1:
            self._refuse("beams that are drawn", hint="do_sample=False, or num_beams=1")
        names = ["repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "length_penalty"]
        names += ["temperature", "top_k", "top_p", "min_p"] if drawn else []
        asked = {name: told.get(name) for name in names}
        asked |= {"stop": stops, "beams": told["num_beams"], "early_stopping": self._stops_early(told)}
        return sampling_of(Sampling(), asked)

    def _stops_early(self, told: Mapping[str, Any]) -> bool:
        asked = told.get("early_stopping", False)
        if not isinstance(asked, bool):
            self._refuse(f"early_stopping={asked!r}", hint="True or False")
        return asked

    def _limited(self, sampling: Sampling, told: Mapping[str, Any], width: int) -> Sampling:
        """With its length, which transformers counts from the padded prompt, and a seed of its own."""
        starts = self._spec.start_ids
        # Of what every answer begins with, all but the first is new to transformers.
        most, forced = _whole(told, "max_new_tokens", least=1), max(0, len(starts) - 1)
        most = (_whole(told, "max_length") or 0) - (len(starts) or width) if most is None else most - forced
        least = max(
            (_whole(told, "min_length") or 0) - (len(starts) or width), (_whole(told, "min_new_tokens") or 0) - forced
        )
        if most < 1:
            raise InputError(f"max_length leaves no token to write after {width} of prompt", hint="max_new_tokens=…")
        seed = int(torch.randint(2**31, ())) if sampling.temperature > 0 else None
        return replace(sampling, max_tokens=most, min_tokens=max(0, least), seed=seed)

    def _mask(self, ids: Tensor, told: Mapping[str, Any]) -> Tensor | None:
        """Where nobody says, what is padding shows by its token, unless texts end with it: as transformers has it."""
        pad = told.get("pad_token_id")
        if not isinstance(ids, Tensor) or pad is None or pad in self._spec.end_ids:
            return None
        return ids != pad

    def _write(self, rows: Sequence[Row], ids: Tensor, streamer: Any) -> None:
        for row in rows:
            self._writer.add(row)
        first, *starts = self._spec.start_ids or [None]
        if streamer is not None:
            # Whoever leaves out the prompt leaves out what comes first.
            streamer.put(ids.cpu() if first is None else torch.tensor([[first]]))
            for token in starts:
                streamer.put(torch.tensor([token]))
        told = 0
        try:
            while not all(row.is_over for row in rows):
                self._writer.step()
                if streamer is not None:
                    for token in rows[0].ids[told:]:
                        streamer.put(torch.tensor([token]))
                    told = len(rows[0].ids)
        except BaseException:
            self._writer.clear()
            raise
        if streamer is not None:
            if rows[0].end_id is not None:
                streamer.put(torch.tensor([rows[0].end_id]))
            streamer.end()

    def _ended(self, row: Row) -> list[int]:
        """Its tokens, with the one that ended it, if one did: a stop string may have."""
        return [*self._spec.start_ids, *row.ids, *([] if row.end_id is None else [row.end_id])]


def _whole(told: Mapping[str, Any], name: str, least: int = 0) -> int | None:
    value = told.get(name)
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        number = least - 1
    if number is not None and number < least:
        raise InputError(f"{name} is {value!r}; it must be a whole number, at least {least}")
    return number


def open_writer(bundle: Bundle, kind: str, task: str, choice: VariantChoice, threads: int | None) -> WritingModel:
    own, spec = bundle.manifest.task.name, bundle.manifest.generation
    if own != task or spec is None:
        raise PlanError(f"{bundle.path} is for {own}, which {kind} is not")
    variant = variant_of(bundle, choice)
    artifact = required(bundle, bundle.entry(variant)) if variant is not None else runnable(bundle)
    decoder = open_decoder(artifact, RunOptions(threads), SLOTS)
    # Pipelines know what they support by the names of classes.
    named = type(bundle.manifest.model.architecture or kind, (WritingModel,), {})
    made: WritingModel = named(bundle, decoder, spec, artifact.variant)
    return made
