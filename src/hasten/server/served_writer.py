"""A bundle that writes, being served: opened, warmed, tested on a few of its own reference answers, and writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np

from hasten.backends import Decoder, RunOptions
from hasten.bundle import Bundle
from hasten.core.errors import AccuracyError, HastenError, InputError, TooLargeError
from hasten.core.generation import GenerationSpec, Sampling
from hasten.core.hardware import usable_cores
from hasten.core.progress import Silent
from hasten.generation.chat import render
from hasten.generation.generator import open_decoder
from hasten.generation.options import sampling_of
from hasten.generation.prompts import read_prompt
from hasten.generation.rows import Piece
from hasten.generation.writing import Writer
from hasten.measure.writing import agreement
from hasten.measure.writing_reference import stored_sample
from hasten.predictor import required, runnable
from hasten.server.engine import Measured
from hasten.server.fairness import Turns
from hasten.server.served import CHARACTERS_PER_TOKEN, ModelSettings, characters
from hasten.server.writing import Asked, WritingEngine, WritingObserver, WritingRequest, Written

# Answers of the bundle's own that are followed before the server says that it is ready.
_TEST_ROWS = 4
# What is broken chooses none of them; among so few there may by chance be so many more that are chosen otherwise.
_TEST_SLACK = 0.2


class ServedWriter:
    def __init__(
        self, name: str, bundle: Bundle, settings: ModelSettings, turns: Turns, observer: WritingObserver
    ) -> None:
        about = bundle.manifest.generation
        assert about is not None
        self.name = name
        self.bundle = bundle
        self.settings = settings
        self.generation: GenerationSpec = about
        self.tokenizer = bundle.tokenizer()
        artifact = required(bundle, bundle.entry(settings.variant)) if settings.variant else runnable(bundle)
        self.variant = artifact.variant
        # One, unless told otherwise: what is written at once takes its steps together.
        self.instances = settings.instances or 1
        threads = settings.threads or max(1, usable_cores() // self.instances)
        with ExitStack() as opened:
            decoders: list[Decoder] = []
            for _ in range(self.instances):
                decoder = open_decoder(artifact, RunOptions(threads), settings.slots)
                opened.callback(decoder.close)
                decoders.append(decoder)
                _warm(decoder)
            with suppress(HastenError):  # whoever asks is told why: no template, none of its packages
                render(about, [{"role": "user", "content": ""}])
            self._test(decoders[0])
            opened.pop_all()  # the engine closes them
        desks = [(Writer(decoder, about, self.tokenizer), decoder) for decoder in decoders]
        encoders = max(1, usable_cores() // 2)
        self.engine = WritingEngine(
            desks, settings.limits, encoders=encoders, seat=turns.join(threads), observer=observer
        )
        self.since = time.time()

    def sampling(self, given: Mapping[str, object], max_tokens: int | None = None) -> Sampling:
        """The model's own way to write, changed by what a request gives; so many tokens where it does not say."""
        most = self.settings.written_tokens
        usual = min(max_tokens or self.generation.defaults.max_tokens, most)
        sampling = sampling_of(replace(self.generation.defaults, max_tokens=usual), given)
        if sampling.max_tokens > most:
            raise InputError(f"max_tokens is {sampling.max_tokens}, and this server writes up to {most}")
        return sampling

    def write(
        self,
        prompts: Sequence[object],
        ways: Sequence[Sampling],
        on_piece: Callable[[int, Piece], None],
        on_done: Callable[[Sequence[Written] | HastenError, Measured | None], None],
        *,
        is_stream: bool = False,
        timeout_s: float | None = None,
    ) -> Callable[[], None]:
        """Each prompt in each way, through the engine; what is called to withdraw it is returned."""
        count = len(prompts) * len(ways)
        if not count:
            raise InputError("there is no prompt")
        if count > self.settings.items:
            raise TooLargeError(f"{count} texts are more than {self.settings.items}")

        def read() -> list[Asked]:
            most = CHARACTERS_PER_TOKEN * self.settings.tokens
            if (size := characters(prompts)) > most:
                raise TooLargeError(f"{size} characters are more than {most}")
            read = [read_prompt(prompt, self.generation, self.tokenizer) for prompt in prompts]
            if (tokens := len(ways) * sum(len(prompt.ids) for prompt in read)) > self.settings.tokens:
                raise TooLargeError(f"{tokens} tokens are more than {self.settings.tokens}")
            return [Asked(prompt, way) for prompt in read for way in ways]

        allowed = timeout_s if timeout_s is not None else self.settings.timeout_s
        deadline = None if allowed is None else time.monotonic() + allowed
        request = WritingRequest(read, on_piece, on_done, deadline, is_stream)
        self.engine.submit(request)
        return lambda: self.engine.cancel(request)

    def close(self, drain_s: float = 0.0) -> bool:
        is_done = self.engine.drain(drain_s)
        self.engine.close()
        return is_done

    def _test(self, decoder: Decoder) -> None:
        """Along the original's own answers: are its words the likeliest here too?"""
        found = agreement(decoder, stored_sample(self.bundle).answers[:_TEST_ROWS], Silent())
        entries = (entry for entry in self.bundle.manifest.variants if entry.name == self.variant.name)
        measured = next((entry.agreement.value for entry in entries), 1.0)
        if found.value < measured - _TEST_SLACK:
            raise AccuracyError(
                f"{self.name} chooses {found.value:.3f} of {found.rows} words of its own answers like the original,"
                f" and {measured:.3f} when it was built"
            )


def writes(bundle: Bundle) -> bool:
    return bundle.manifest.generation is not None


def _warm(decoder: Decoder) -> None:
    """Alone, and with all slots taken: what is made for a size when it first comes is there then."""
    slots = list(range(decoder.slots))
    for count, slot in enumerate(slots, 1):
        decoder.begin(slot, np.zeros(1, np.int32))
        if count in (1, len(slots)):
            decoder.step(slots[:count], np.zeros(count, np.int32))
    for slot in slots:
        decoder.end(slot)
