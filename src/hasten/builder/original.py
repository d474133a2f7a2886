"""The PyTorch module itself, as what others are held against: what it writes, and how fast.

`python -m hasten.builder.original read|write` is its lane in a benchmark.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import Artifact
from hasten.builder.libraries import quiet_libraries
from hasten.builder.written import CLASSES, Writer
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.variant import Precision, Variant
from hasten.measure.lane import Opening
from hasten.measure.writing import Answered, Read, Sample, likelihood, log_likelihoods
from hasten.measure.writing_lane import serve

ORIGINAL = Variant("torch", Precision.FP32)
# Beside its weights, what kind of module it is.
_TASK = "task"


def save_original(writer: Writer, folder: Path, variant: Variant = ORIGINAL) -> Artifact:
    """For its lane, on whichever device."""
    with quiet_libraries():
        writer.module.save_pretrained(folder)
    return Artifact(variant, writer.signature, folder, {_TASK: writer.task})


def sample_of(
    module: Any, prompts: Sequence[IntArray], texts: Sequence[IntArray], tokens: int, starts: Sequence[int]
) -> Sample:
    """Its greedy answers to the prompts, by transformers' own generate, and how likely it finds the texts.

    `starts` is what an answer begins with where an encoder reads the prompt: such a model reads no text by itself.
    """
    answers = []
    for prompt in prompts:
        answer = _generate(module, prompt, tokens, starts)
        answers.append(Answered(prompt, answer, _logits(module, prompt, answer, starts)))
    read = [] if starts else [Read.of(text) for text in texts]
    found = [log_likelihoods(_logits(module, text.prompt, text.tokens, ()), text.tokens) for text in read]
    return Sample(tuple(answers), tuple(read), likelihood(found))


def _generate(module: Any, prompt: IntArray, tokens: int, starts: Sequence[int]) -> IntArray:
    """The likeliest token each time, whatever its generation_config asks for beside."""
    import torch
    from transformers import GenerationConfig

    told = module.generation_config
    plain = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=told.eos_token_id,
        bos_token_id=told.bos_token_id,
        pad_token_id=told.pad_token_id if told.pad_token_id is not None else 0,
        decoder_start_token_id=told.decoder_start_token_id,
    )
    ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
    first = {"decoder_input_ids": torch.tensor([list(starts)])} if starts else {}
    # Some of what was set for a model would be merged into what is asked for here.
    module.generation_config = GenerationConfig()
    try:
        with quiet_libraries(), torch.inference_mode():
            found = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain, **first)
    finally:
        module.generation_config = told
    return np.asarray(found[0, len(starts) or len(prompt) :].numpy(), np.int32)


def _logits(module: Any, prompt: IntArray, tokens: IntArray, starts: Sequence[int]) -> FloatArray:
    """Of each of the tokens, by all before it, in one run."""
    import torch

    before = np.asarray(starts or prompt, np.int64)
    whole = torch.from_numpy(np.concatenate([before, tokens[:-1]]).astype(np.int64))[None]
    given = torch.from_numpy(np.asarray(prompt, np.int64))[None]
    feeds = {"input_ids": given, "decoder_input_ids": whole} if starts else {"input_ids": whole}
    with quiet_libraries(), torch.inference_mode():
        logits: FloatArray = module(**feeds, use_cache=False).logits[0, -len(tokens) :].numpy()
    return logits


class ModulePen:
    """Fulfils `Pen`: transformers' own forward with its own cache, less than its generate does around it."""

    def __init__(self, opening: Opening) -> None:
        import torch
        import transformers

        if opening.threads is not None:
            torch.set_num_threads(opening.threads)
        kind = getattr(transformers, CLASSES[opening.graphs[_TASK]])
        self._device = opening.variant.device
        with quiet_libraries():
            self._module = kind.from_pretrained(opening.directory, dtype=torch.float32).eval().to(self._device)
        self._has_encoder = self._module.config.is_encoder_decoder

    def read(self, rows: IntArray) -> None:
        import torch

        ids = torch.from_numpy(np.asarray(rows, np.int64)).to(self._device)
        with torch.inference_mode():
            feeds: dict[str, Any] = {"input_ids": ids}
            if self._has_encoder:
                start = torch.full((len(ids), 1), self._module.config.decoder_start_token_id, device=self._device)
                self._encoded = self._module.get_encoder()(input_ids=ids)
                feeds = {"encoder_outputs": self._encoded, "decoder_input_ids": start}
            self._keep(self._module(**feeds, use_cache=True))

    def write(self) -> None:
        import torch

        with torch.inference_mode():
            feeds: dict[str, Any] = {"input_ids": self._next}
            if self._has_encoder:
                feeds = {"encoder_outputs": self._encoded, "decoder_input_ids": self._next}
            self._keep(self._module(**feeds, past_key_values=self._past, use_cache=True))

    def _keep(self, outputs: Any) -> None:
        self._past = outputs.past_key_values
        self._next = outputs.logits[:, -1].argmax(-1)[:, None]
        # Whoever reads along waits for it, and so does a clock.
        self._next.cpu()


if __name__ == "__main__":
    serve(ModulePen, writes=sys.argv[1] == "write")
