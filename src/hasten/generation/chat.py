"""Render chats as text with the Jinja templates of tokenizers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from hasten.core.errors import InputError, missing_package
from hasten.core.generation_types import GenerationSpec

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]

# Roles that every template accepts; others are accepted if the template names them.
_ROLES = ("system", "user", "assistant", "tool")
# Marks the end of a message to continue; a template puts its end-of-message tokens after it.
_CONTINUE = "\ue000hasten\ue000"


def is_chat(payload: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a payload is one chat, and not a list of texts or of chats."""
    return isinstance(payload, list | tuple) and bool(payload) and isinstance(payload[0], Mapping)


def is_continued(messages: Sequence[Message]) -> bool:
    """Return whether the answer continues the last message: it is an assistant's, as in transformers' pipelines."""
    return bool(messages[-1]["role"] == "assistant")


def render(spec: GenerationSpec, messages: Sequence[object], variables: Mapping[str, object] | None = None) -> str:
    """Return the text of a chat up to the answer. `variables` are passed to the template, such as `tools`."""
    if not spec.chat_template:
        raise InputError("this model has no chat template", hint="pass a text to continue")
    chat = [_message(number, message, spec.chat_template) for number, message in enumerate(messages, 1)]
    if not chat:
        raise InputError("the chat has no messages", hint='[{"role": "user", "content": "…"}]')
    continued = is_continued(chat)
    if continued:
        chat[-1]["content"] += f"{_CONTINUE} "
    names = {**spec.special_tokens, "tools": None, "documents": None, **(variables or {})}
    text = _render(spec.chat_template, names | {"messages": chat, "add_generation_prompt": not continued})
    if not continued:
        return text
    before, mark, after = text.rpartition(_CONTINUE)
    if not mark:
        raise InputError("the chat template changes the last message: it cannot be continued")
    # A template that strips the last space would have stripped the message's own too.
    return before if after.startswith(" ") else before.rstrip()


def _message(number: int, message: object, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"message {number} is {message!r}; a message has a role and a content")
    for name in ("role", "content"):
        if name not in message:
            raise InputError(f"message {number} has no {name}", hint='{"role": "user", "content": "…"}')
    if not isinstance(message["role"], str):
        raise InputError(f"the role of message {number} is {message['role']!r}; it must be a string")
    copied: dict[str, Any] = _plain(message)
    if copied["role"] == "developer" and not _has_role(template, "developer"):
        # The name of the system role in newer OpenAI clients.
        copied["role"] = "system"
    if copied["role"] not in _ROLES and not _has_role(template, copied["role"]):
        raise InputError(
            f"message {number} has the role '{copied['role']}', which the model's chat template does not support",
            hint=f"use one of {', '.join(_ROLES)}",
        )
    if isinstance(copied["content"], list):
        copied["content"] = _joined(number, copied["content"])
    # An answer that only called tools has no content.
    if copied["content"] is None and "tool_calls" in copied and copied["role"] == "assistant":
        copied["content"] = ""
    if not isinstance(copied["content"], str):
        raise InputError(f"the content of message {number} is {message['content']!r}; it must be a string")
    return copied


def _has_role(template: str, role: str) -> bool:
    """Return whether the template has the role in quotes, as in a comparison with a message's role."""
    return bool(role) and re.search(rf"""(['"]){re.escape(role)}\1""", template) is not None


def _joined(number: int, parts: list[Any]) -> str:
    """Join the parts of a text, as OpenAI's clients send them."""
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise InputError(f"the content of message {number} has parts other than text, which are not supported")
    return "".join(part["text"] for part in parts)


def _plain(value: Any) -> Any:
    """Copy into plain JSON types: a template is third-party code and must not reach any other object."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)


def _render(source: str, names: Mapping[str, object]) -> str:
    template = _compile(source)
    from jinja2 import TemplateError

    try:
        return template.render(**names)
    except TemplateError as error:
        raise InputError(f"the model's chat template rejects this chat: {_one_line(error)}") from error
    except Exception as error:  # third-party code may raise anything
        raise InputError(f"the model's chat template fails on this chat: {_one_line(error)}") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise missing_package("jinja2", "a chat template", "generation") from error

    class GenerationTag(Extension):
        """Ignores `{% generation %}`, which marks the answers of a model for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise InputError(f"the model's chat template is invalid: {_one_line(error)}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
