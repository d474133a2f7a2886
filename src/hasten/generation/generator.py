"""A model ready to write: tokenizer, decoder and the loop over it. What `hasten.load` returns for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hasten.backends import BACKENDS, Artifact, Decoder, Decodes, RunOptions
from hasten.bundle import Bundle
from hasten.core.closing import Closing
from hasten.core.errors import InputError, StageError, UnsupportedError
from hasten.core.generation import GenerationSpec, Sampling
from hasten.core.tokenizer import Tokenizer
from hasten.generation.chat import is_chat, is_continued
from hasten.generation.options import sampling_of
from hasten.generation.prompts import Prompt, read_prompt
from hasten.generation.purpose import WRITE, Purpose, purpose_of
from hasten.generation.rows import Piece, Row
from hasten.generation.writing import Writer
from hasten.predictor import required, runnable, tell_other_machine

# Texts that are written together; more of them wait.
SLOTS = 8


class Generator(Closing):
    """Call it with a prompt, a chat, or a list of either. Safe to share between threads: they write together."""

    def __init__(self, spec: GenerationSpec, tokenizer: Tokenizer, decoder: Decoder, purpose: Purpose = WRITE) -> None:
        self.spec = spec
        self.purpose = purpose
        self._defaults = purpose.sampling(spec.defaults)
        self.tokenizer = tokenizer
        self.decoder = decoder
        # Whoever calls waits for all of its texts: the sooner all are begun, the sooner they share every step.
        self._writer = Writer(decoder, spec, tokenizer, prompts_a_step=decoder.slots)
        self._lock = threading.Lock()

    def __call__(
        self,
        prompts: object,
        *,
        stream: bool = False,
        num_return: int = 1,
        return_full_text: bool | None = None,
        **given: object,
    ) -> Any:
        """Texts in the shape of transformers' pipelines: `[{"generated_text": …}]` for a prompt, a list of it for many.

        Options are those of `Sampling`; without them the model's own. The full text is the prompt and what was written
        after it, which is the default where the model goes on with a prompt. A stream gives pieces of one text, as
        they are written, the prompt never among them.
        """
        sampling = sampling_of(self._defaults, given)
        if stream:
            if num_return != 1:
                raise InputError("a stream is one text", hint="num_return=1, or stream=False")
            return self.stream(prompts, sampling)
        many = list(prompts) if isinstance(prompts, list | tuple) and not is_chat(prompts) else None
        given_ones = [prompts] if many is None else many
        read = [self._read(prompt) for prompt in given_ones]
        if return_full_text is None:
            return_full_text = not self.spec.start_ids
        texts = self.write(read, ways_of(sampling, num_return))
        answers = [
            [{self.purpose.key: full_text(prompt.given, text) if return_full_text else text} for text in group]
            for prompt, group in zip(read, texts, strict=True)
        ]
        return answers[0] if many is None else answers

    def write(self, prompts: Sequence[Prompt], ways: Sequence[Sampling]) -> list[list[str]]:
        """All texts of all prompts, each in every way, in as few steps as the slots allow."""
        texts: list[list[list[str]]] = [[[] for _ in ways] for _ in prompts]
        rows: list[Row] = []
        for prompt, group in zip(prompts, texts, strict=True):
            rows += [self._row(prompt, way, pieces) for way, pieces in zip(ways, group, strict=True)]
        for row in rows:
            self._writer.add(row)
        try:
            for row in rows:
                while not row.is_over:
                    self._step()
                _check_finished(row)
        finally:
            self._forget(rows)
        return [["".join(pieces) for pieces in group] for group in texts]

    def stream(self, prompt: object, sampling: Sampling) -> Iterator[str]:
        """Its pieces as they come; whoever stops asking for more frees the slot."""
        pieces: list[str] = []
        # Here, not when the first piece is asked for: what is wrong with a prompt is said at once.
        row = self._row(self._read(prompt), sampling, pieces)
        return self._pieces(row, pieces)

    def _read(self, prompt: object) -> Prompt:
        given = self.purpose.prefix + prompt if isinstance(prompt, str) else prompt
        return read_prompt(given, self.spec, self.tokenizer)

    def _pieces(self, row: Row, pieces: list[str]) -> Iterator[str]:
        told = 0
        self._writer.add(row)
        try:
            while told < len(pieces) or not row.is_over:
                if told == len(pieces):
                    self._step()
                    continue
                yield pieces[told]
                told += 1
            _check_finished(row)
        finally:
            self._forget([row])

    def _row(self, prompt: Prompt, sampling: Sampling, pieces: list[str]) -> Row:
        def told(piece: Piece) -> None:
            if piece.text:
                pieces.append(piece.text)

        return self._writer.row(prompt.ids, sampling, told, continues=prompt.continues)

    def _step(self) -> None:
        with self._lock:
            try:
                self._writer.step()
            except BaseException:
                # Of what was half done nobody knows what is in its slot.
                self._writer.clear()
                raise

    def _forget(self, rows: Sequence[Row]) -> None:
        """Free the slots of those that are not finished."""
        if all(row.finish is not None for row in rows):
            return
        for row in rows:
            row.cancel()
        with self._lock:
            self._writer.free()

    def close(self) -> None:
        self.decoder.close()


def open_generator(bundle: Bundle, variant: str | None, options: RunOptions, task: str = "") -> Generator:
    """For a task of its own, such as summarization, or just to write."""
    artifact = required(bundle, bundle.entry(variant)) if variant else runnable(bundle)
    tell_other_machine(bundle, artifact)
    return generator_of(bundle, artifact, options, task)


def generator_of(bundle: Bundle, artifact: Artifact, options: RunOptions, task: str = "") -> Generator:
    spec = bundle.manifest.generation
    if spec is None:
        raise UnsupportedError(f"{bundle.path} holds a model for {bundle.manifest.task.name}, which writes nothing")
    return Generator(spec, bundle.tokenizer(), open_decoder(artifact, options, SLOTS), purpose_of(task, bundle))


def open_decoder(artifact: Artifact, options: RunOptions, slots: int) -> Decoder:
    backend = BACKENDS.get(artifact.variant.backend)
    if not isinstance(backend, Decodes):
        raise UnsupportedError(f"the backend '{artifact.variant.backend}' runs no models that write")
    return backend.open_decoder(artifact, options, slots)


def _check_finished(row: Row) -> None:
    if row.finish is None:
        raise StageError("the text was given up: the decoder failed on it in a step of another thread's")


def ways_of(sampling: Sampling, num_return: int) -> list[Sampling]:
    """As many different texts of one prompt as were asked for."""
    if isinstance(num_return, bool) or not isinstance(num_return, int) or num_return < 1:
        raise InputError(f"num_return is {num_return!r}; it must be a whole number, at least 1")
    if num_return > 1 and sampling.temperature == 0:
        raise InputError(
            f"{num_return} texts of the likeliest tokens would all be the same", hint="a temperature above 0"
        )
    if sampling.seed is None:
        return [sampling] * num_return
    return [replace(sampling, seed=sampling.seed + place) for place in range(num_return)]


def full_text(given: Any, text: str) -> Any:
    """The prompt and what was written after it, as transformers' pipelines put them together."""
    if isinstance(given, str):
        return given + text
    if not is_chat(given):
        return text
    messages: list[Mapping[str, Any]] = list(given)
    if is_continued(messages):
        content = messages[-1]["content"]
        more = text if isinstance(content, str) else [{"type": "text", "text": text}]
        return [*messages[:-1], {**messages[-1], "content": content + more}]
    return [*messages, {"role": "assistant", "content": text}]
