"""Text in, text out, for many requests at once; piece by piece where it is asked for as a stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hasten.backends import Artifact, RunOptions
from hasten.core.errors import HastenError, InputError
from hasten.core.generation import GenerationSpec
from hasten.core.hardware import usable_cores
from hasten.core.variant import Variant
from hasten.deploy.tritonserver.models.request import Told, server
from hasten.generation.generator import open_decoder
from hasten.generation.options import sampling_of
from hasten.generation.prompts import read_prompt
from hasten.generation.rows import Piece
from hasten.generation.writing import Writer
from hasten.server.queue import Limits
from hasten.server.writing import Asked, WritingEngine, WritingRequest

# As the model that comes with tritonserver's vLLM calls them.
TEXT, STREAM, SAMPLING, EXCLUDES = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
WRITTEN = "text_output"
VARIANT = "variant"


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        told = Told.read(args)
        about = told.about
        self._spec = msgspec.convert(about["generation"], GenerationSpec)
        self._tokenizer = told.tokenizer
        self._input, self._output = about["input"], about["output"]
        artifact = Artifact(Variant.parse(about["variant"]), told.signature, told.folder / VARIANT, about["graphs"])
        threads = about["threads"] or max(1, usable_cores() // about["instances"])
        decoder = open_decoder(artifact, RunOptions(threads), about["slots"])
        # How many may wait is the server's own to say.
        limits = Limits(requests=2**31, wait_s=math.inf)
        self._engine = WritingEngine([(Writer(decoder, self._spec, self._tokenizer), decoder)], limits)

    def execute(self, requests: Sequence[Any]) -> None:
        """Answers follow when they are there: the server may hand over more requests meanwhile."""
        for request in requests:
            answers = _Answers(request.get_response_sender(), self._output)
            try:
                self._ask(request, answers)
            except HastenError as error:
                answers.fail(error)

    def finalize(self) -> None:
        self._engine.drain(math.inf)
        self._engine.close()

    def _ask(self, request: Any, answers: _Answers) -> None:
        text = _text(request, self._input)
        if text is None:
            raise InputError(f"input '{self._input}' is missing")
        sampling = sampling_of(self._spec.defaults, _options(_text(request, SAMPLING) or "{}"))
        before = "" if _flag(request, EXCLUDES, default=True) else text
        asked = WritingRequest(
            lambda: [Asked(read_prompt(text, self._spec, self._tokenizer), sampling)],
            lambda _, piece: answers.add(piece),
            lambda outcome, _: answers.fail(outcome) if isinstance(outcome, HastenError) else answers.end(),
        )
        answers.begin(before, is_stream=_flag(request, STREAM, default=False), leave=lambda: self._engine.cancel(asked))
        self._engine.submit(asked)


class _Answers:
    """One response, or as many as there are pieces, the last of them marked."""

    def __init__(self, sender: Any, name: str) -> None:
        self._sender = sender
        self._name = name
        self._leave: Callable[[], None] = _nothing
        self._is_stream = self._is_over = False
        self._text = ""

    def begin(self, before: str, *, is_stream: bool, leave: Callable[[], None]) -> None:
        self._text, self._is_stream, self._leave = before, is_stream, leave

    def add(self, piece: Piece) -> None:
        if self._sender.is_cancelled():
            self._leave()
            self._send(None, is_last=True)
            return
        self._text += piece.text
        # The last goes with the mark.
        if self._is_stream and piece.finish is None:
            self._send(self._text)
            self._text = ""

    def end(self) -> None:
        self._send(self._text, is_last=True)

    def fail(self, error: HastenError) -> None:
        kind = server().TritonError
        code = kind.INVALID_ARG if isinstance(error, InputError) else kind.INTERNAL
        self._send(server().InferenceResponse(error=kind(str(error), code)), is_last=True)

    def _send(self, what: Any, *, is_last: bool = False) -> None:
        if self._is_over:
            return
        self._is_over = is_last
        if isinstance(what, str):
            tensor = server().Tensor(self._name, np.array([what.encode()], object))
            what = server().InferenceResponse(output_tensors=[tensor])
        flags = {"flags": server().TRITONSERVER_RESPONSE_COMPLETE_FINAL} if is_last else {}
        self._sender.send(*(() if what is None else (what,)), **flags)


def _nothing() -> None: ...


def _text(request: Any, name: str) -> str | None:
    tensor = server().get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    if len(values) != 1:
        raise InputError(f"input '{name}' has {len(values)} values, and takes one")
    try:
        return str(values[0], "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"input '{name}' is not UTF-8: {error.reason} at byte {error.start}") from error


def _flag(request: Any, name: str, *, default: bool) -> bool:
    tensor = server().get_input_tensor_by_name(request, name)
    return default if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])


def _options(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f'{SAMPLING} is not a JSON object, as in {{"max_tokens": 64}}: {error}') from error
