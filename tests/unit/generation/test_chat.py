"""Chat templates of several styles, compared with transformers' apply_chat_template."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import pytest

from hasten.core.errors import InputError, UnsupportedError
from hasten.core.generation_types import GenerationSpec
from hasten.generation.chat import is_chat, render
from support.models import tiny_decoders

SPECIAL = {
    "bos_token": tiny_decoders.BOS,
    "eos_token": tiny_decoders.EOS,
    "pad_token": tiny_decoders.PAD,
    "unk_token": "<unk>",
}

# In the style of published models: they cover the parts of Jinja that those use.
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

INST = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user …') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}
            {{- '[INST] <<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] | trim + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- else %}
        {{- raise_exception('only user, assistant and system are roles: ' + message['role']) }}
    {%- endif %}
{%- endfor %}"""

HEADERS = """{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else 'never' %}
{{- bos_token }}
{%- set state = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- '<|header|>system<|end|>\\n\\nToday: ' + date }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ '\\n' + tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}
    {{- '<|header|>' + message.role + '<|end|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
    {{- message.content | trim }}
    {%- endif %}
    {{- eos_token if loop.index0 != state.last else '<|turn|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|end|>\\n\\n' }}
{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "inst": INST, "headers": HEADERS}
USER = {"role": "user", "content": "  Who wrote “Faust”? <b>&amp;</b>\n"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be short."}, USER],
    "turns": [USER, {"role": "assistant", "content": "Goethe."}, {"role": "user", "content": "When?"}],
    "continued": [USER, {"role": "assistant", "content": "It was"}],
}


def spec(template: str) -> GenerationSpec:
    return GenerationSpec(64, 300, (2,), chat_template=template, special_tokens=SPECIAL)


def expected(template: str, chat: list[dict[str, Any]], **more: Any) -> str:
    tokenizer = tiny_decoders.theirs(tiny_decoders.byte_level(), chat_template=template)
    continued = chat[-1]["role"] == "assistant"
    text: str = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued, **more
    )
    return text


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_rendered_chat_matches_transformers(template: str, chat: str) -> None:
    text = render(spec(TEMPLATES[template]), CHATS[chat])
    assert text == expected(TEMPLATES[template], CHATS[chat])
    assert "Faust" in text


def test_rendered_chat_has_the_messages() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert render(spec(CHATML), chat) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(spec(INST), chat) == f"{tiny_decoders.BOS}[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST]"
    assert datetime.now().strftime("%Y") in render(spec(HEADERS), chat)


def test_continued_message_has_no_end() -> None:
    chat = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "It was "}]
    assert render(spec(CHATML), chat).endswith("<|im_start|>assistant\nIt was ")


@pytest.mark.parametrize("template", TEMPLATES)
def test_trailing_spaces_match_transformers(template: str) -> None:
    chat = [USER, {"role": "assistant", "content": " It was  "}]
    assert render(spec(TEMPLATES[template]), chat) == expected(TEMPLATES[template], chat)


def test_tools_and_other_variables_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "sum", "description": "a < b & ü"}}]
    text = render(spec(HEADERS), [USER], {"tools": tools})
    assert text == expected(HEADERS, [USER], tools=tools)
    assert '"description": "a < b & ü"' in text


def test_messages_are_not_modified() -> None:
    chat = [USER, {"role": "assistant", "content": "It was"}]
    render(spec(CHATML), chat)
    assert chat == CHATS["continued"]


def test_roles_named_by_the_template_are_accepted() -> None:
    named = CHATML + "{# 'ipython' #}"
    assert "<|im_start|>ipython\n3<" in render(spec(named), [USER, {"role": "ipython", "content": "3"}])
    assert render(spec(CHATML), [{"role": "developer", "content": "S"}, USER]) == render(
        spec(CHATML), [{"role": "system", "content": "S"}, USER]
    )


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Who "}, {"type": "text", "text": "are you?"}]
    assert "user\nWho are you?<" in render(spec(CHATML), [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("template", "chat", "complaint"),
    [
        ("", [USER], "this model has no chat template"),
        (CHATML, [USER, {"role": "wizard", "content": "x"}], "message 2 has the role 'wizard', which the model's"),
        # Words of a template that are not roles, parts of words, and an empty role.
        (CHATML, [{"role": "message", "content": "x"}], "message 1 has the role 'message', which the model's"),
        (CHATML, [{"role": "use", "content": "x"}], "message 1 has the role 'use', which"),
        (CHATML, [{"role": "", "content": "x"}], "message 1 has the role '', which"),
        (INST, [USER, USER], "the model's chat template rejects this chat: roles must alternate"),
        (INST, [USER, {"role": "tool", "content": "x"}], "only user, assistant and system are roles: tool"),
        (CHATML, [{"role": "user"}], "message 1 has no content"),
        (CHATML, [USER, {"content": "x"}], "message 2 has no role"),
        (CHATML, [], "the chat has no messages"),
        (CHATML, ["hello"], "message 1 is 'hello'; a message has a role and a content"),
        (CHATML, [{"role": 3, "content": "x"}], "the role of message 1 is 3; it must be a string"),
        (CHATML, [{"role": "user", "content": None}], "the content of message 1 is None; it must be a string"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url"}]}], "has parts other than text"),
        ("{% if %}", [USER], "the model's chat template is invalid"),
        ("{{ messages[0].content + 3 }}", [USER], "the model's chat template fails on this chat"),
        ("{{ nothing.at.all }}", [USER], "the model's chat template rejects this chat"),
        ("{{ ''.__class__.__mro__ }}", [USER], "the model's chat template rejects this chat"),
        ("{{ messages.append(1) }}", [USER], "the model's chat template rejects this chat"),
        ("{{ namespace.__init__.__globals__ }}", [USER], "the model's chat template rejects this chat"),
        ("{% for a in range(999999999) %}{% endfor %}", [USER], "the model's chat template fails on this chat"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", CHATS["continued"], "cannot be continued"),
    ],
)
def test_invalid_chat_is_a_one_line_error(template: str, chat: list[Any], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        render(spec(template), chat)
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message


def test_missing_jinja_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnsupportedError, match="jinja2") as caught:
        render(spec(CHATML + " "), [USER])
    assert caught.value.hint == "pip install 'hasten[generation]'"


def test_is_chat_distinguishes_chats_from_lists() -> None:
    assert is_chat([USER])
    assert not is_chat(["a", "b"])
    assert not is_chat([[USER], [USER]])
    assert not is_chat([])
    assert not is_chat("a")
