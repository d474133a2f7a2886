"""Generate text in-process: tokenizer, decoder and scheduler. `hasten.load` returns a Generator."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hasten.backends import BACKENDS, Artifact, Decoder, RunOptions, SupportsDecoding
from hasten.bundle import Bundle
from hasten.core.errors import HastenError, InputError, PlanError, StageError, UnsupportedError, translate_mismatch
from hasten.core.generation_types import GenerationSpec, SamplingParams
from hasten.core.system.closing import Closing
from hasten.core.system.memory_limit import MemoryLimit, megabytes
from hasten.core.text.tokenizer import Tokenizer
from hasten.core.variant import CPU
from hasten.generation.chat import is_chat, is_continued
from hasten.generation.options import sampling_params, whole_number
from hasten.generation.prompts import Prompt, read_prompt
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta, TextSequence
from hasten.generation.task_presets import GENERATE, TaskPreset, task_preset_for
from hasten.predictor import choose_artifact

# Sequences that are decoded together; others wait.
SLOTS = 8


class Generator(Closing):
    """Generates text when called with a prompt, a chat, or a list of either. Thread-safe: callers share a batch."""

    def __init__(
        self, spec: GenerationSpec, tokenizer: Tokenizer, decoder: Decoder, preset: TaskPreset = GENERATE
    ) -> None:
        self.spec = spec
        self.preset = preset
        self.defaults = sampling_params(spec.defaults, preset.options)
        self.tokenizer = tokenizer
        self.decoder = decoder
        # A caller waits for all of its texts: the sooner all are prefilled, the sooner they share every step.
        self._scheduler = DecodeScheduler(decoder, spec, tokenizer, prefills_per_step=decoder.slots)
        self._lock = threading.Lock()

    def __call__(
        self,
        prompts: object,
        *,
        stream: bool = False,
        num_return_sequences: int = 1,
        return_full_text: bool | None = None,
        **options: object,
    ) -> Any:
        """Return texts in the shape of transformers' pipelines: `[{"generated_text": …}]`, or a list of such.

        Options are those of `SamplingParams` and default to the model's own. The full text includes the prompt, which
        is the default of models that continue it. A stream yields the text deltas of one text, without the prompt.
        """
        sampling = sampling_params(self.defaults, options)
        if stream:
            if num_return_sequences != 1:
                raise InputError("a stream returns one text", hint="use num_return_sequences=1, or stream=False")
            return self.stream(prompts, sampling)
        several = list(prompts) if isinstance(prompts, list | tuple) and not is_chat(prompts) else None
        parsed = [self.parse(prompt) for prompt in ([prompts] if several is None else several)]
        if return_full_text is None:
            return_full_text = not self.spec.decoder_start_token_ids
        texts = self.generate(parsed, params_per_sequence(sampling, num_return_sequences))
        answers = [
            [{self.preset.key: full_text(prompt.source, text) if return_full_text else text} for text in group]
            for prompt, group in zip(parsed, texts, strict=True)
        ]
        return answers[0] if several is None else answers

    def generate(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[list[str]]:
        """Return a text of every prompt for each of the parameters, in as few decode steps as the slots allow."""
        deltas: list[list[list[str]]] = [[[] for _ in params] for _ in prompts]
        sequences: list[TextSequence] = []
        for prompt, group in zip(prompts, deltas, strict=True):
            sequences += [self._sequence(prompt, each, texts) for each, texts in zip(params, group, strict=True)]
        for sequence in sequences:
            self._scheduler.add(sequence)
        try:
            for sequence in sequences:
                while not sequence.is_over:
                    self._step()
                _check_finished(sequence)
        finally:
            self._cancel_unfinished(sequences)
        return [["".join(texts) for texts in group] for group in deltas]

    def stream(self, prompt: object, sampling: SamplingParams) -> Iterator[str]:
        """Yield the text deltas of one prompt; closing the iterator frees the slot."""
        deltas: list[str] = []
        # Here, not in the iterator: an invalid prompt raises at once.
        return self._deltas(self._sequence(self.parse(prompt), sampling, deltas), deltas)

    def parse(self, prompt: object) -> Prompt:
        """Check a prompt and encode it, after the prefix of the task preset."""
        source = self.preset.prefix + prompt if isinstance(prompt, str) else prompt
        return read_prompt(source, self.spec, self.tokenizer)

    def check(self, prompt: Prompt, sampling: SamplingParams) -> None:
        """Raise InputError if the prompt leaves no room for an answer."""
        self._sequence(prompt, sampling, [])

    def _deltas(self, sequence: TextSequence, deltas: list[str]) -> Iterator[str]:
        yielded = 0
        self._scheduler.add(sequence)
        try:
            while yielded < len(deltas) or not sequence.is_over:
                if yielded == len(deltas):
                    self._step()
                    continue
                yield deltas[yielded]
                yielded += 1
            _check_finished(sequence)
        finally:
            self._cancel_unfinished([sequence])

    def _sequence(self, prompt: Prompt, sampling: SamplingParams, deltas: list[str]) -> TextSequence:
        def on_text(delta: TextDelta) -> None:
            if delta.text:
                deltas.append(delta.text)

        return self._scheduler.new_sequence(prompt.ids, sampling, on_text, continues=prompt.continues)

    def _step(self) -> None:
        with self._lock:
            try:
                with translate_mismatch("the model does not fit its bundle"):
                    self._scheduler.step()
            except BaseException:
                # After an interrupted step the content of the slots is unknown.
                self._scheduler.clear()
                raise

    def _cancel_unfinished(self, sequences: Sequence[TextSequence]) -> None:
        if any(sequence.finish is None for sequence in sequences):
            for sequence in sequences:
                sequence.cancel()
            with self._lock:
                self._scheduler.free()

    def close(self) -> None:
        self.decoder.close()


def open_generator(bundle: Bundle, variant: str | None, options: RunOptions, task: str = "") -> Generator:
    """Open a variant for a task preset such as summarization, or for plain generation."""
    return generator_of(bundle, choose_artifact(bundle, variant), options, task)


def generator_of(bundle: Bundle, artifact: Artifact, options: RunOptions, task: str = "") -> Generator:
    """Open a generator on a variant that is known to run here."""
    spec = bundle.manifest.generation
    if spec is None:
        task_name = bundle.manifest.task.name
        raise UnsupportedError(f"{bundle.path} holds a model for {task_name}, which does not generate text")
    tokenizer = bundle.tokenizer()
    decoder = open_decoder(artifact, options, SLOTS, tokenizer.spec.max_length)
    return Generator(spec, tokenizer, decoder, task_preset_for(task, bundle))


def open_decoder(artifact: Artifact, options: RunOptions, slots: int, prompt_tokens: int = 0) -> Decoder:
    """Open the decoder of a variant, with this many slots.

    With a memory limit, `prompt_tokens` is the longest prompt, whose keys and values an encoder may add to the cache.
    """
    backend = BACKENDS.get(artifact.variant.backend)
    if not isinstance(backend, SupportsDecoding):
        raise UnsupportedError(f"the backend '{artifact.variant.backend}' does not support text generation")
    with translate_mismatch(f"{artifact.variant} does not fit its bundle"):
        decoder = backend.open_decoder(artifact, options, slots)
    if options.max_memory is not None and artifact.variant.device == CPU:
        try:
            _reserve_cache(decoder, MemoryLimit(options.max_memory), prompt_tokens)
        except HastenError:
            decoder.close()
            raise
    return decoder


def _reserve_cache(decoder: Decoder, limit: MemoryLimit, prompt_tokens: int) -> None:
    """Reserve memory for the KV cache of all slots, since running sequences cannot be rejected."""
    needed = decoder.max_cache_bytes(prompt_tokens)
    with limit.measuring():
        left = limit.left_bytes()
        if needed > left:
            slots = int(left / needed * (decoder.slots + 1)) - 1
            raise PlanError(
                f"the KV cache of {decoder.slots} slots needs up to {megabytes(needed)}, and the memory limit of"
                f" {megabytes(limit.limit_bytes)} leaves {megabytes(max(0, left))}",
                hint=f"raise the limit, or serve with --slots {slots}" if slots > 0 else "raise the limit",
            )
        limit.add_cache(decoder, prompt_tokens)


def _check_finished(sequence: TextSequence) -> None:
    if sequence.finish is None:
        raise StageError("the text was not finished: the decoder failed in a step of another thread")


def params_per_sequence(sampling: SamplingParams, num_return_sequences: int) -> list[SamplingParams]:
    """Return the parameters of each of several texts of one prompt: a seed is increased from text to text."""
    whole_number(1)("num_return_sequences", num_return_sequences)
    if num_return_sequences > 1 and sampling.temperature == 0:
        raise InputError(
            f"{num_return_sequences} texts of greedy decoding would all be the same", hint="use a temperature above 0"
        )
    if sampling.seed is None:
        return [sampling] * num_return_sequences
    return [replace(sampling, seed=sampling.seed + index) for index in range(num_return_sequences)]


def full_text(prompt: Any, text: str) -> Any:
    """Return the prompt followed by the generated text, joined as in transformers' pipelines."""
    if isinstance(prompt, str):
        return prompt + text
    if not is_chat(prompt):
        return text
    messages: list[Mapping[str, Any]] = list(prompt)
    if is_continued(messages):
        content = messages[-1]["content"]
        addition = text if isinstance(content, str) else [{"type": "text", "text": text}]
        return [*messages[:-1], {**messages[-1], "content": content + addition}]
    return [*messages, {"role": "assistant", "content": text}]
