"""OpenAI's texts and chats, as its own client asks for them: `POST /v1/completions`, `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NotRequired, TypedDict

import msgspec

from hasten.core.errors import HastenError, InputError
from hasten.core.generation import Sampling
from hasten.generation.rows import Piece
from hasten.server.engine import Measured
from hasten.server.events import Events, Texts, reason, whole
from hasten.server.openai import tell
from hasten.server.routes import Call, Route
from hasten.server.served_writer import ServedWriter
from hasten.server.writing import Written

_DONE = b"data: [DONE]\n\n"
# OpenAI's own, where a completion does not say; a chat goes on to its end.
_USUAL_TOKENS = 16


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both take; what changes an answer, and is not done or not known here, is refused rather than left out."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # What OpenAI keeps its books by, and not what it writes by.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Not OpenAI's, but what others who speak its protocol take.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class CompletionRequest(_Asked, kw_only=True):
    # A text, tokens, or a list of either.
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logprobs: int | None = None


class ChatRequest(_Asked, kw_only=True):
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


class TextUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(TypedDict):
    text: str
    index: int
    logprobs: None
    finish_reason: str | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    # In a stream: in the last event alone, where it was asked for.
    usage: NotRequired[TextUsage | None]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: str | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: None
    finish_reason: str | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[TextUsage | None]


def completions(call: Call) -> None:
    request = call.exchange.read_json(CompletionRequest)
    # Zero asks for those of the tokens that were chosen.
    _refuse(request, suffix=request.suffix, logprobs=request.logprobs is not None)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InputError("best_of is not done here: each text that is written is given", hint="n")
    served = call.writer(request.model)
    ways = _ways(served, request, request.max_tokens, _USUAL_TOKENS)
    prompts = _prompts(request.prompt)
    about = _About(call, "cmpl", served.name)
    echoes = [prompt if request.echo else "" for prompt in prompts for _ in ways]
    if request.echo and not all(isinstance(prompt, str) for prompt in prompts):
        raise InputError("echo repeats texts, and a prompt is tokens")

    def choice(place: int, text: str, finish: str | None) -> CompletionChoice:
        return CompletionChoice(text=text, index=place, logprobs=None, finish_reason=finish)

    def form(choices: list[CompletionChoice], **usage: TextUsage | None) -> Completion:
        made = Completion(
            id=about.id, object="text_completion", created=about.created, model=about.model, choices=choices
        )
        return {**made, **usage}  # type: ignore[typeddict-item]

    def present(texts: Texts) -> Completion:
        choices = [
            choice(place, f"{echoes[place]}{text}", reason(one.finish)) for place, (text, one) in enumerate(texts)
        ]
        return form(choices, usage=_usage([one for _, one in texts], len(ways)))

    if request.stream:
        events = _Told(call, request, form, len(ways))

        def on_piece(place: int, piece: Piece) -> None:
            text = f"{echoes[place]}{piece.text}" if events.is_first(place) else piece.text
            events.send([choice(place, text, reason(piece.finish))])

        call.exchange.on_close = served.write(prompts, ways, on_piece, events.done, is_stream=True)
    else:
        collected = whole(call, present)
        call.exchange.on_close = served.write(prompts, ways, collected.on_piece, collected.on_done)


def chat(call: Call) -> None:
    request = call.exchange.read_json(ChatRequest)
    is_text = request.response_format is None or request.response_format.get("type") == "text"
    _refuse(
        request,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        response_format=None if is_text else request.response_format,
        tools=request.tools,
        tool_choice=None if request.tool_choice in ("none", "auto") else request.tool_choice,
        modalities=None if request.modalities == ["text"] else request.modalities,
        functions=request.functions,
    )
    served = call.writer(request.model)
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    ways = _ways(served, request, asked, served.generation.context)
    messages = request.messages
    if not messages:
        raise InputError("messages is empty", hint='[{"role": "user", "content": "…"}]')
    about = _About(call, "chatcmpl", served.name)

    def present(texts: Texts) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=place,
                message=ChatMessage(role="assistant", content=text, refusal=None),
                logprobs=None,
                finish_reason=reason(one.finish),
            )
            for place, (text, one) in enumerate(texts)
        ]
        return ChatCompletion(
            id=about.id,
            object="chat.completion",
            created=about.created,
            model=about.model,
            choices=choices,
            usage=_usage([one for _, one in texts], len(ways)),
        )

    def chunk(place: int, delta: Delta, finish: str | None = None) -> ChunkChoice:
        return ChunkChoice(index=place, delta=delta, logprobs=None, finish_reason=finish)

    def form(choices: list[ChunkChoice], **usage: TextUsage | None) -> ChatChunk:
        made = ChatChunk(
            id=about.id, object="chat.completion.chunk", created=about.created, model=about.model, choices=choices
        )
        return {**made, **usage}  # type: ignore[typeddict-item]

    if request.stream:
        events = _Told(call, request, form, len(ways))

        def on_piece(place: int, piece: Piece) -> None:
            chunks = [chunk(place, {"role": "assistant", "content": ""})] if events.is_first(place) else []
            chunks += [chunk(place, {"content": piece.text})] if piece.text else []
            chunks += [chunk(place, {}, piece.finish.value)] if piece.finish is not None else []
            events.send(*([one] for one in chunks))

        call.exchange.on_close = served.write([messages], ways, on_piece, events.done, is_stream=True)
    else:
        collected = whole(call, present)
        call.exchange.on_close = served.write([messages], ways, collected.on_piece, collected.on_done)


class _About:
    """What every event of an answer repeats."""

    def __init__(self, call: Call, kind: str, model: str) -> None:
        self.id = f"{kind}-{call.exchange.id}"
        self.created = int(time.time())
        self.model = model


class _Told:
    """Events in the form of one of the two, and OpenAI's end of them."""

    def __init__(self, call: Call, request: _Asked, form: Any, ways: int) -> None:
        self._events = Events(call)
        self._form = form
        self._ways = ways
        self._has_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        self._begun: set[int] = set()

    def is_first(self, place: int) -> bool:
        is_first = place not in self._begun
        self._begun.add(place)
        return is_first

    def send(self, *choices: list[Any]) -> None:
        # Where it is asked for, it is there in all of them, and empty but in the last.
        usage = {"usage": None} if self._has_usage else {}
        self._events.send(*(self._form(one, **usage) for one in choices))

    def done(self, outcome: Sequence[Written] | HastenError, measured: Measured | None) -> None:
        if isinstance(outcome, HastenError):
            self._events.fail(outcome)
            return
        if self._has_usage:
            self._events.send(self._form([], usage=_usage(outcome, self._ways)))
        self._events.end(measured, _DONE)


def _refuse(request: _Asked, **others: object) -> None:
    asked = {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        **others,
    }
    for name, value in asked.items():
        # What is asked for at zero, or empty, changes nothing.
        if value:
            raise InputError(f"{name} is not done here", hint="leave it out")


def _ways(served: ServedWriter, request: _Asked, max_tokens: int | None, usual: int) -> list[Sampling]:
    """How each prompt is gone on with: as often as was asked for."""
    count = 1 if request.n is None else request.n
    if not 1 <= count <= served.engine.slots:
        raise InputError(f"n is {count}; it must be from 1 to {served.engine.slots}, as many as are written at once")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    given = {name: getattr(request, name) for name in names} | {"max_tokens": max_tokens, "stop": request.stop or None}
    sampling = served.sampling(given, usual)
    if sampling.seed is None:
        return [sampling] * count
    return [replace(sampling, seed=sampling.seed + place) for place in range(count)]


def _prompts(given: str | list[str | int | list[int]]) -> list[Any]:
    if isinstance(given, str) or (given and all(isinstance(one, int) for one in given)):
        return [given]
    if not given or not all(isinstance(one, type(given[0])) for one in given):
        raise InputError("prompt is neither a text nor tokens, nor a list of either")
    return list(given)


def _usage(written: Sequence[Written], ways: int) -> TextUsage:
    """A prompt that is gone on with in several ways counts once."""
    prompt, completion = sum(one.prompt_tokens for one in written[::ways]), sum(one.tokens for one in written)
    return TextUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        "A text gone on with, as OpenAI gives it",
        CompletionRequest,
        Completion,
        tell=tell,
        streams=True,
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        chat,
        "A chat answered, as OpenAI gives it",
        ChatRequest,
        ChatCompletion,
        tell=tell,
        streams=True,
    ),
)
