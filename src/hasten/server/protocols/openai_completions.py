"""Serve OpenAI's text generation: `POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from hasten.core.errors import HastenError, InputError
from hasten.core.generation_types import Finish, SamplingParams
from hasten.generation.sequences import TextDelta
from hasten.server.models.generative_model import CompletedTexts, GenerativeModel
from hasten.server.protocols.openai_embeddings import Usage, openai_error_body
from hasten.server.protocols.routes import HttpCall, Route
from hasten.server.protocols.sse import EventStream, reply_with_texts
from hasten.server.request_records import RequestStats
from hasten.server.scheduling.generation_engine import GenerationResult

_DONE = b"data: [DONE]\n\n"
# OpenAI's default max_tokens of a completion; a chat has no limit but the context.
_DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(msgspec.Struct):
    """Options of a streamed response."""

    include_usage: bool | None = None


class _GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both routes. Unknown fields, and fields that would change the output, are rejected, never ignored."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accounting fields, which do not affect the output.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Extensions that other servers of this API support.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class CompletionRequest(_GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    # A text, token ids, or a list of either.
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ChatRequest(_GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = None


class TextUsage(Usage):
    """Token counts of a generation request."""

    completion_tokens: int


class _Choice(TypedDict):
    index: int
    logprobs: None
    finish_reason: str | None


class CompletionChoice(_Choice):
    """One completion of a prompt."""

    text: str


class Completion(TypedDict):
    """The response of `POST /v1/completions`, or one event of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    # In a stream: only if requested, and null except in the last event.
    usage: NotRequired[TextUsage | None]


class ChatMessage(TypedDict):
    """A message of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    """One reply to a chat."""

    message: ChatMessage


class ChatCompletion(TypedDict):
    """The response of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage


def completions(call: HttpCall) -> None:
    """Reply with completions of prompts, complete or as events."""
    request = call.exchange.read_json(CompletionRequest)
    # logprobs=0 requests the log probabilities of the sampled tokens.
    _reject_unsupported(request, suffix=request.suffix, logprobs=request.logprobs is not None)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InputError("best_of is not supported: all generated texts are returned", hint="use n")
    model = call.generative_model(request.model)
    samplings = _sampling_params(model, request, request.max_tokens, _DEFAULT_COMPLETION_TOKENS)
    prompts = _prompts(request.prompt)
    echoes = [prompt if request.echo else "" for prompt in prompts for _ in samplings]
    if request.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise InputError("echo is not supported for prompts of token ids")
    generation = _Generation(call, model, prompts, samplings)
    head = generation.head("cmpl", "text_completion")

    def choice(index: int, text: str, finish: str | None) -> CompletionChoice:
        return CompletionChoice(text=text, index=index, logprobs=None, finish_reason=finish)

    def event_choices(index: int, delta: TextDelta, is_first: bool) -> list[CompletionChoice]:
        return [choice(index, f"{echoes[index] if is_first else ''}{delta.text}", delta.finish)]

    if request.stream:
        generation.stream(head, event_choices, request.stream_options)
    else:
        generation.reply(head, lambda index, text, finish: choice(index, f"{echoes[index]}{text}", finish))


def chat(call: HttpCall) -> None:
    """Reply with the next message of a chat, complete or as events."""
    request = call.exchange.read_json(ChatRequest)
    is_text = request.response_format is None or request.response_format.get("type") == "text"
    _reject_unsupported(
        request,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        response_format=None if is_text else request.response_format,
        tools=request.tools,
        tool_choice=None if request.tool_choice in ("none", "auto") else request.tool_choice,
        modalities=None if request.modalities == ["text"] else request.modalities,
        functions=request.functions,
    )
    model = call.generative_model(request.model)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    samplings = _sampling_params(model, request, max_tokens, model.generation.max_context)
    if not request.messages:
        raise InputError("messages is empty", hint='[{"role": "user", "content": "…"}]')
    generation = _Generation(call, model, [request.messages], samplings)

    def choice(index: int, text: str, finish: str) -> ChatChoice:
        message = ChatMessage(role="assistant", content=text, refusal=None)
        return ChatChoice(index=index, message=message, logprobs=None, finish_reason=finish)

    def event_choices(index: int, delta: TextDelta, is_first: bool) -> list[dict[str, object]]:
        parts: list[tuple[dict[str, str], str | None]] = []
        if is_first:
            parts.append(({"role": "assistant", "content": ""}, None))
        if delta.text:
            parts.append(({"content": delta.text}, None))
        if delta.finish is not None:
            parts.append(({}, delta.finish))
        return [{"index": index, "delta": part, "logprobs": None, "finish_reason": finish} for part, finish in parts]

    if request.stream:
        generation.stream(generation.head("chatcmpl", "chat.completion.chunk"), event_choices, request.stream_options)
    else:
        generation.reply(generation.head("chatcmpl", "chat.completion"), choice)


@dataclass(frozen=True, slots=True)
class _Generation:
    """A request of either route that was checked."""

    call: HttpCall
    model: GenerativeModel
    prompts: Sequence[object]
    # One for each of the texts that continue a prompt.
    samplings: Sequence[SamplingParams]

    def head(self, kind: str, name: str) -> dict[str, object]:
        """Return the fields that every event of a response repeats."""
        created = int(time.time())
        return {"id": f"{kind}-{self.call.exchange.id}", "object": name, "created": created, "model": self.model.name}

    def reply(self, head: Mapping[str, object], choice: Callable[[int, str, Finish], object]) -> None:
        """Reply with the complete texts."""

        def present(texts: CompletedTexts) -> object:
            choices = [choice(index, text, result.finish) for index, (text, result) in enumerate(texts)]
            return {**head, "choices": choices, "usage": self._usage([result for _, result in texts])}

        reply_with_texts(self.call, self.model, self.prompts, self.samplings, present)

    def stream(
        self,
        head: Mapping[str, object],
        choices: Callable[[int, TextDelta, bool], Sequence[object]],
        options: StreamOptions | None,
    ) -> None:
        """Reply with an event for each choice of a text delta, and with OpenAI's end marker."""
        events, begun = EventStream(self.call), set[int]()
        has_usage = options is not None and bool(options.include_usage)
        # If requested, usage is present in all events, and null except in the last.
        usage = {"usage": None} if has_usage else {}

        def on_text_delta(index: int, delta: TextDelta) -> None:
            is_first = index not in begun
            begun.add(index)
            events.send(*({**head, "choices": [choice], **usage} for choice in choices(index, delta, is_first)))

        def on_done(outcome: Sequence[GenerationResult] | HastenError, stats: RequestStats | None) -> None:
            if isinstance(outcome, HastenError):
                events.fail(outcome)
                return
            if has_usage:
                events.send({**head, "choices": [], "usage": self._usage(outcome)})
            events.end(stats, _DONE)

        self.call.exchange.on_close = self.model.submit(self.prompts, self.samplings, on_text_delta, on_done)

    def _usage(self, results: Sequence[GenerationResult]) -> TextUsage:
        """Count the tokens; a prompt that several texts continue counts once."""
        prompt = sum(result.prompt_tokens for result in results[:: len(self.samplings)])
        completion = sum(result.tokens for result in results)
        return TextUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def _reject_unsupported(request: _GenerationRequest, **others: object) -> None:
    penalties = {name: getattr(request, name) for name in ("presence_penalty", "frequency_penalty", "logit_bias")}
    for name, value in (penalties | others).items():
        # Zero and empty values change nothing.
        if value:
            raise InputError(f"{name} is not supported", hint="leave it out")


def _sampling_params(
    model: GenerativeModel, request: _GenerationRequest, max_tokens: int | None, default_tokens: int
) -> list[SamplingParams]:
    """Return the parameters of each of the `n` texts that continue a prompt."""
    count = 1 if request.n is None else request.n
    if not 1 <= count <= model.engine.slots:
        raise InputError(f"n is {count}: it must be from 1 to {model.engine.slots}, the number of slots of the model")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    options = {name: getattr(request, name) for name in names}
    sampling = model.sampling(options | {"max_tokens": max_tokens, "stop": request.stop or None}, default_tokens)
    if sampling.seed is None:
        return [sampling] * count
    return [replace(sampling, seed=sampling.seed + index) for index in range(count)]


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Any]:
    if isinstance(prompt, str) or (prompt and all(isinstance(entry, int) for entry in prompt)):
        return [prompt]
    if not prompt or not all(isinstance(entry, type(prompt[0])) for entry in prompt):
        raise InputError("invalid prompt: it must be a text, token ids, or a list of either")
    return list(prompt)


_route = partial(Route, error_body=openai_error_body, streams=True)


ROUTES = (
    _route("POST", "/v1/completions", completions, "Complete a text (OpenAI)", CompletionRequest, Completion),
    _route("POST", "/v1/chat/completions", chat, "Reply to a chat (OpenAI)", ChatRequest, ChatCompletion),
)
