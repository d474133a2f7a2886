"""Run the PyTorch module as the reference for answers and the baseline for timings.

`python -m hasten.builder.generation.baseline prefill|decode` is its benchmark worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.backends import Artifact
from hasten.builder.generation.load import LoadedGenerator
from hasten.builder.sources.quiet import quiet_libraries
from hasten.core.generation_types import AUTO_CLASSES
from hasten.core.tensors import FloatArray, IntArray
from hasten.core.variant import Precision, Variant
from hasten.measure.bench_worker import OpenRequest, generation_runner, serve
from hasten.measure.generation_gate import GenerationReference, GreedyReference, ScoredText, likelihood, log_likelihoods

BASELINE = Variant("torch", Precision.FP32)
# The key under which an artifact stores the task, which determines the module's class.
_TASK = "task"


def save_baseline(loaded: LoadedGenerator, folder: Path, variant: Variant = BASELINE) -> Artifact:
    """Save the module for its benchmark worker."""
    with quiet_libraries():
        loaded.module.save_pretrained(folder)
    return Artifact(variant, loaded.signature, folder, {_TASK: loaded.task.name})


def generation_reference(
    module: Any, prompts: Sequence[IntArray], texts: Sequence[IntArray], tokens: int, starts: Sequence[int]
) -> GenerationReference:
    """Return the module's greedy answers by transformers' generate, and its log-likelihood of the texts.

    `starts` are the decoder's start tokens of a model with an encoder, which has no likelihood of texts alone.
    """
    answers = []
    for prompt in prompts:
        answer = _generate(module, prompt, tokens, starts)
        answers.append(GreedyReference(prompt, answer, _logits(module, prompt, answer, starts)))
    scored = [] if starts else [ScoredText.of(text) for text in texts]
    likelihoods = [log_likelihoods(_logits(module, text.prompt, text.tokens, ()), text.tokens) for text in scored]
    return GenerationReference(tuple(answers), tuple(scored), likelihood(likelihoods))


def _generate(module: Any, prompt: IntArray, tokens: int, starts: Sequence[int]) -> IntArray:
    """Decode greedily, without the other settings of the model's generation_config."""
    import torch
    from transformers import GenerationConfig

    model_config = module.generation_config
    greedy = GenerationConfig(
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=model_config.eos_token_id,
        bos_token_id=model_config.bos_token_id,
        pad_token_id=model_config.pad_token_id if model_config.pad_token_id is not None else 0,
        decoder_start_token_id=model_config.decoder_start_token_id,
    )
    ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
    inputs = {"decoder_input_ids": torch.tensor([list(starts)])} if starts else {}
    # transformers would merge settings of the model's own configuration into the given one.
    module.generation_config = GenerationConfig()
    try:
        with quiet_libraries(), torch.inference_mode():
            tokens_out = module.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy, **inputs)
    finally:
        module.generation_config = model_config
    return np.asarray(tokens_out[0, len(starts) or len(prompt) :].numpy(), np.int32)


def _logits(module: Any, prompt: IntArray, tokens: IntArray, starts: Sequence[int]) -> FloatArray:
    """Return the logits of each token given all tokens before it, in one forward pass."""
    import torch

    context = np.asarray(starts or prompt, np.int64)
    sequence = torch.from_numpy(np.concatenate([context, tokens[:-1]]).astype(np.int64))[None]
    prompt_ids = torch.from_numpy(np.asarray(prompt, np.int64))[None]
    feeds = {"input_ids": prompt_ids, "decoder_input_ids": sequence} if starts else {"input_ids": sequence}
    with quiet_libraries(), torch.inference_mode():
        logits: FloatArray = module(**feeds, use_cache=False).logits[0, -len(tokens) :].numpy()
    return logits


class ModuleDecoder:
    """A `LockstepDecoder` on transformers' forward pass and KV cache, without the overhead of its `generate`."""

    def __init__(self, request: OpenRequest) -> None:
        import torch
        import transformers

        if request.threads is not None:
            torch.set_num_threads(request.threads)
        kind = getattr(transformers, AUTO_CLASSES[request.graphs[_TASK]])
        self._device = request.variant.device
        with quiet_libraries():
            # Without the option, transformers would ask on stdin, which is the benchmark's.
            module = kind.from_pretrained(request.directory, dtype=torch.float32, trust_remote_code=False)
            self._module = module.eval().to(self._device)
        self._input_name = "input_ids"
        self._encoder_feeds: dict[str, Any] = {}

    def prefill(self, rows: IntArray) -> None:
        import torch

        ids = torch.from_numpy(np.asarray(rows, np.int64)).to(self._device)
        if self._module.config.is_encoder_decoder:
            with torch.inference_mode():
                self._encoder_feeds = {"encoder_outputs": self._module.get_encoder()(input_ids=ids)}
            self._input_name, start = "decoder_input_ids", self._module.config.decoder_start_token_id
            ids = torch.full((len(ids), 1), start, device=self._device)
        self._run(ids, past=None)

    def decode(self) -> None:
        self._run(self._next, self._past)

    def _run(self, ids: Any, past: Any) -> None:
        import torch

        feeds = {self._input_name: ids, **self._encoder_feeds}
        with torch.inference_mode():
            outputs = self._module(**feeds, past_key_values=past, use_cache=True)
            self._past, self._next = outputs.past_key_values, outputs.logits[:, -1].argmax(-1)[:, None]
        # A caller needs the token on the host, so its copy is part of the time.
        self._next.cpu()


if __name__ == "__main__":
    serve(generation_runner(ModuleDecoder, sys.argv[1]))
