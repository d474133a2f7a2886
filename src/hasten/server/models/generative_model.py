"""A generative bundle that is served: opened, warmed up and checked against its reference answers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np

from hasten.backends import Decoder, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, HastenError, InputError
from hasten.core.generation_types import GenerationSpec, SamplingParams
from hasten.core.progress import SilentProgress
from hasten.core.system.hardware import usable_cores
from hasten.generation.chat import render
from hasten.generation.generator import open_decoder
from hasten.generation.options import check_bounds, sampling_params
from hasten.generation.prompts import read_prompt
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta
from hasten.measure.generation_gate import measure_agreement
from hasten.measure.generation_reference import stored_reference
from hasten.server.models.registry import Model, queue_limits
from hasten.server.request_records import RequestStats
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.generation_engine import (
    GenerationEngine,
    GenerationJob,
    GenerationObserver,
    GenerationRequest,
    GenerationResult,
)
from hasten.server.settings import Settings

# Reference texts that are checked before the server reports that it is ready.
_TEST_ROWS = 4
# A broken model chooses none of their tokens; among so few texts this share more may differ by chance.
_TEST_SLACK = 0.2

# Seconds of prefill between two decode steps: running streams wait for as long, and prefill takes most of the time.
_PREFILL_TARGET_S = 0.1

# The text and the result of each sequence.
CompletedTexts = Sequence[tuple[str, GenerationResult]]


class GenerativeModel(Model):
    """A model that generates text."""

    engine: GenerationEngine

    def __init__(
        self, name: str, bundle: Bundle, settings: Settings, scheduler: CoreScheduler, observer: GenerationObserver
    ) -> None:
        super().__init__(name, bundle, settings)
        spec = bundle.manifest.generation
        assert spec is not None
        self.generation: GenerationSpec = spec
        # One by default: sequences that run at once share its decode steps.
        self.instances = settings.instances or 1
        threads = settings.threads or max(1, usable_cores() // self.instances)
        with ExitStack() as opened:
            decoders: list[Decoder] = []
            for _ in range(self.instances):
                options = RunOptions(threads, settings.max_memory)
                decoder = open_decoder(self.artifact, options, settings.slots, self.tokenizer.spec.max_length)
                opened.callback(decoder.close)
                decoders.append(decoder)
                _warm_up(decoder)
            with suppress(HastenError):  # requests report the reason: no template, or a missing package
                render(spec, [{"role": "user", "content": ""}])
            self._test(decoders[0])
            opened.pop_all()  # the engine closes the decoders
        self.engine = GenerationEngine(
            [
                (DecodeScheduler(decoder, spec, self.tokenizer, prefill_target_s=_PREFILL_TARGET_S), decoder)
                for decoder in decoders
            ],
            queue_limits(settings),
            encoders=max(1, usable_cores() // 2),
            share=scheduler.join(threads),
            observer=observer,
        )
        self.since = time.time()

    @property
    def running_sequences(self) -> int:
        """Return the number of sequences being generated."""
        return self.engine.running

    def sampling(self, options: Mapping[str, object], max_tokens: int | None = None) -> SamplingParams:
        """Return the model's defaults changed by the options of a request; `max_tokens` is the protocol's default."""
        limit = self.settings.max_new_tokens
        default = min(max_tokens or self.generation.defaults.max_tokens, limit)
        sampling = sampling_params(replace(self.generation.defaults, max_tokens=default), options)
        check_bounds(sampling, options)
        if sampling.max_tokens > limit:
            raise InputError(f"max_tokens is {sampling.max_tokens}, and this server generates up to {limit}")
        return sampling

    def generate(
        self,
        prompts: Sequence[object],
        samplings: Sequence[SamplingParams],
        on_done: Callable[[CompletedTexts | HastenError, RequestStats | None], None],
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        """Continue each prompt with each of the sampling parameters; return a function that cancels the request."""
        pieces: dict[int, list[str]] = defaultdict(list)

        def done(outcome: Sequence[GenerationResult] | HastenError, stats: RequestStats | None) -> None:
            if isinstance(outcome, HastenError):
                on_done(outcome, stats)
            else:
                on_done([("".join(pieces[index]), result) for index, result in enumerate(outcome)], stats)

        def add(index: int, delta: TextDelta) -> None:
            pieces[index].append(delta.text)

        return self.submit(prompts, samplings, add, done, is_stream=False, timeout_s=timeout_s)

    def submit(
        self,
        prompts: Sequence[object],
        samplings: Sequence[SamplingParams],
        on_text_delta: Callable[[int, TextDelta], None],
        on_done: Callable[[Sequence[GenerationResult] | HastenError, RequestStats | None], None],
        *,
        is_stream: bool = True,
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        """Pass on text deltas of each sequence as they are generated; return a function that cancels the request."""
        count = len(prompts) * len(samplings)
        if not count:
            raise InputError("there is no prompt")
        self.check_items(count)
        # Before the request is queued, with all its prompts.
        self.check_characters(prompts, self.settings.max_request_tokens)

        def read() -> list[GenerationJob]:
            tokenized = [read_prompt(prompt, self.generation, self.tokenizer) for prompt in prompts]
            self.check_tokens(len(samplings) * sum(len(prompt.ids) for prompt in tokenized))
            return [GenerationJob(prompt, sampling) for prompt in tokenized for sampling in samplings]

        request = GenerationRequest(read, on_text_delta, on_done, self.deadline(timeout_s), is_stream)
        self.engine.submit(request)
        return lambda: self.engine.cancel(request)

    def _test(self, decoder: Decoder) -> None:
        """Check that the tokens of the reference texts are the most likely ones here too."""
        agreed = measure_agreement(decoder, stored_reference(self.bundle).answers[:_TEST_ROWS], SilentProgress())
        if agreed.value < self.built_agreement - _TEST_SLACK:
            raise AccuracyError(
                f"{self.name} does not reproduce its reference answers: it chooses {agreed.value:.3f} of {agreed.rows}"
                f" tokens alike, and {self.built_agreement:.3f} when it was built"
            )


def _warm_up(decoder: Decoder) -> None:
    """Decode with one slot and with all, which allocates what the runtime makes for a batch size on first use."""
    slots = list(range(decoder.slots))
    for count, slot in enumerate(slots, 1):
        decoder.prefill(slot, np.zeros(1, np.int32))
        if count in (1, len(slots)):
            decoder.decode(slots[:count], np.zeros(count, np.int32))
    for slot in slots:
        decoder.free(slot)
