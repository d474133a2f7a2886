"""Chats as the text a model was taught them in: the Jinja templates that come with tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from hasten.core.errors import InputError, missing_package
from hasten.core.generation import GenerationSpec

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]

# What every template may be given; others only where it names them.
_ROLES = ("system", "user", "assistant", "tool")
# Marks the end of a message that is to be continued; a template puts what ends a message behind it.
_HERE = "\ue000hasten\ue000"


def is_chat(payload: object) -> TypeGuard[Sequence[Message]]:
    """Whether it is one chat, and not a list of texts or of chats."""
    return isinstance(payload, list | tuple) and bool(payload) and isinstance(payload[0], Mapping)


def is_continued(messages: Sequence[Message]) -> bool:
    """Whether the answer goes on with the last message: it is the model's own, as in transformers' pipelines."""
    return bool(messages[-1]["role"] == "assistant")


def render(spec: GenerationSpec, messages: Sequence[object], variables: Mapping[str, object] | None = None) -> str:
    """The text of a chat up to where the answer begins. More variables of a template, as tools, are given by name."""
    if not spec.chat_template:
        raise InputError(
            "this model has no chat template: it was not taught chats", hint="give it a text to go on with"
        )
    chat = [_message(place, message, spec.chat_template) for place, message in enumerate(messages, 1)]
    if not chat:
        raise InputError("the chat has no messages", hint='[{"role": "user", "content": "…"}]')
    continued = is_continued(chat)
    if continued:
        chat[-1]["content"] += f"{_HERE} "
    names = {**spec.special_tokens, "tools": None, "documents": None, **(variables or {})}
    text = _rendered(spec.chat_template, names | {"messages": chat, "add_generation_prompt": not continued})
    if not continued:
        return text
    before, mark, after = text.rpartition(_HERE)
    if not mark:
        raise InputError("the chat template changes the last message, so that it cannot be continued")
    # A template that takes off the last space would have taken off the message's own too.
    return before if after.startswith(" ") else before.rstrip()


def _message(place: int, message: object, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"message {place} is {message!r}; a message has a role and a content")
    for name in ("role", "content"):
        if name not in message:
            raise InputError(f"message {place} has no {name}", hint='{"role": "user", "content": "…"}')
    if not isinstance(message["role"], str):
        raise InputError(f"the role of message {place} is {message['role']!r}; it must be a text")
    copied: dict[str, Any] = _plain(message)
    if copied["role"] == "developer" and not _names(template, "developer"):
        # What newer clients of OpenAI call it.
        copied["role"] = "system"
    if copied["role"] not in _ROLES and not _names(template, copied["role"]):
        raise InputError(
            f"message {place} has the role '{copied['role']}', which the model's chat template does not know",
            hint=f"one of {', '.join(_ROLES)}",
        )
    if isinstance(copied["content"], list):
        copied["content"] = _joined(place, copied["content"])
    # An answer that only called tools has none.
    if copied["content"] is None and "tool_calls" in copied and copied["role"] == "assistant":
        copied["content"] = ""
    if not isinstance(copied["content"], str):
        raise InputError(f"the content of message {place} is {message['content']!r}; it must be a text")
    return copied


def _names(template: str, role: str) -> bool:
    """Whether it stands there in quotes, as what a message's role is compared with."""
    return bool(role) and re.search(rf"""(['"]){re.escape(role)}\1""", template) is not None


def _joined(place: int, parts: list[Any]) -> str:
    """OpenAI's clients send a text as a list of parts."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise InputError(f"the content of message {place} holds more than text, which this model does not read")
    return "".join(part["text"] for part in parts)


def _plain(value: Any) -> Any:
    """Rebuilt from what JSON knows: a template is somebody else's program, and must not reach any other object."""
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (bool, int, float, str, type(None)) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)


def _rendered(source: str, names: Mapping[str, object]) -> str:
    template = _compiled(source)
    from jinja2 import TemplateError

    try:
        return template.render(**names)
    except TemplateError as error:
        raise InputError(f"the model's chat template refuses this chat: {_one_line(error)}") from error
    except Exception as error:  # it is a program of whoever made the model, and may fail like any other
        raise InputError(f"the model's chat template fails on this chat: {_one_line(error)}") from error


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise missing_package("jinja2", "a chat template", "generation") from error

    class Answers(Extension):
        """`{% generation %}` marks a model's own words for training; to whoever writes it is nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Answers], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"the model's chat template is not one: {_one_line(error)}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
