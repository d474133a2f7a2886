"""Generate text for many requests at once, as a whole or as a stream of text deltas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from hasten.backends import Artifact, RunOptions
from hasten.core.errors import HastenError, InputError
from hasten.core.generation_types import GenerationSpec
from hasten.core.system.hardware import usable_cores
from hasten.core.variant import Variant
from hasten.deploy.tritonserver.models.request import ModelConfig, error_response, parse_options, read_strings, server
from hasten.generation.generator import open_decoder
from hasten.generation.options import sampling_params
from hasten.generation.prompts import read_prompt
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta
from hasten.server.scheduling.generation_engine import GenerationEngine, GenerationJob, GenerationRequest
from hasten.server.scheduling.queue import Limits

# The names of the inputs and outputs of tritonserver's vLLM backend.
TEXT, STREAM, SAMPLING, EXCLUDES = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
OUTPUT_TEXT = "text_output"
VARIANT = "variant"


class TritonPythonModel:
    """Runs a generative variant with continuous batching."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the configuration and start the generation engine."""
        config = ModelConfig.read(args)
        values = config.values
        self._spec = msgspec.convert(values["generation"], GenerationSpec)
        self._tokenizer = config.tokenizer
        self._input, self._output = values["input"], values["output"]
        artifact = Artifact(
            Variant.parse(values["variant"]), config.signature, config.folder / VARIANT, values["graphs"]
        )
        threads = values["threads"] or max(1, usable_cores() // values["instances"])
        decoder = open_decoder(artifact, RunOptions(threads), values["slots"])
        # The server limits its queue itself.
        limits = Limits(requests=2**31, wait_s=math.inf)
        self._engine = GenerationEngine([(DecodeScheduler(decoder, self._spec, self._tokenizer), decoder)], limits)

    def execute(self, requests: Sequence[Any]) -> None:
        """Submit the requests and return; responses are sent later, so that the server can pass on more requests."""
        for request in requests:
            response = _Response(request.get_response_sender(), self._output)
            try:
                self._submit(request, response)
            except HastenError as error:
                response.fail(error)

    def finalize(self) -> None:
        """Finish the accepted requests and close the engine."""
        self._engine.drain(math.inf)
        self._engine.close()

    def _submit(self, request: Any, response: _Response) -> None:
        text = _text(request, self._input)
        if text is None:
            raise InputError(f"input '{self._input}' is missing")
        options = parse_options(_text(request, SAMPLING) or "{}", SAMPLING, '{"max_tokens": 64}')
        sampling = sampling_params(self._spec.defaults, options)
        prefix = "" if _flag(request, EXCLUDES, default=True) else text
        generation = GenerationRequest(
            lambda: [GenerationJob(read_prompt(text, self._spec, self._tokenizer), sampling)],
            lambda _, delta: response.add(delta),
            lambda outcome, _: response.fail(outcome) if isinstance(outcome, HastenError) else response.end(),
        )
        is_stream = _flag(request, STREAM, default=False)
        response.begin(prefix, is_stream=is_stream, cancel=lambda: self._engine.cancel(generation))
        self._engine.submit(generation)


class _Response:
    """Sends the text as one response or as a stream of responses; the last is marked as final."""

    def __init__(self, sender: Any, name: str) -> None:
        self._sender = sender
        self._name = name
        self._cancel: Callable[[], object] = lambda: None
        self._is_stream = self._is_finished = False
        self._text = ""

    def begin(self, prefix: str, *, is_stream: bool, cancel: Callable[[], object]) -> None:
        self._text, self._is_stream, self._cancel = prefix, is_stream, cancel

    def add(self, delta: TextDelta) -> None:
        if self._sender.is_cancelled():
            self._cancel()
            self._send(None, is_last=True)
            return
        self._text += delta.text
        # The last delta is sent with the final response.
        if self._is_stream and delta.finish is None:
            self._send(self._text)
            self._text = ""

    def end(self) -> None:
        self._send(self._text, is_last=True)

    def fail(self, error: HastenError) -> None:
        self._send(error_response(error, is_internal=not isinstance(error, InputError)), is_last=True)

    def _send(self, content: Any, *, is_last: bool = False) -> None:
        if self._is_finished:
            return
        self._is_finished = is_last
        if isinstance(content, str):
            tensor = server().Tensor(self._name, np.array([content.encode()], object))
            content = server().InferenceResponse(output_tensors=[tensor])
        flags = {"flags": server().TRITONSERVER_RESPONSE_COMPLETE_FINAL} if is_last else {}
        self._sender.send(*(() if content is None else (content,)), **flags)


def _text(request: Any, name: str) -> str | None:
    values = read_strings(request, name)
    if values is None:
        return None
    if len(values) != 1:
        raise InputError(f"input '{name}' has {len(values)} values, but takes one")
    return values[0]


def _flag(request: Any, name: str, *, default: bool) -> bool:
    tensor = server().get_input_tensor_by_name(request, name)
    return default if tensor is None else bool(tensor.as_numpy().reshape(-1)[0])
