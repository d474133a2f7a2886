"""A bundle that writes, through `hasten.load` and `hasten run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hasten
import writers
from hasten.backends import BACKENDS
from hasten.cli import main
from hasten.core.errors import UnsupportedError
from hasten.core.generation import Sampling
from hasten.core.variant import Support
from hasten.generation.generator import Generator

PROMPT = "the cat sat"
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = writers.whole_characters()
    module = writers.model("llama", writers.vocabulary_of(backend))
    spec = writers.spec_of(module, chat_template=TEMPLATE, defaults=Sampling(max_tokens=6))
    return writers.bundle(module, backend, tmp_path_factory.mktemp("writes"), spec).path


@pytest.fixture(scope="module")
def answer(bundle: Path) -> str:
    with hasten.load(bundle) as write:
        text: str = write(PROMPT, return_full_text=False)[0]["generated_text"]
    assert len(text) > 6
    return text


def test_load_gives_what_writes(bundle: Path, answer: str) -> None:
    with hasten.load(bundle, "onnxruntime-fp32", threads=1) as write:
        assert isinstance(write, Generator)
        assert write(PROMPT) == [{"generated_text": PROMPT + answer}]
        assert "".join(write(PROMPT, stream=True)) == answer
        assert write(PROMPT, max_tokens=2) != write(PROMPT)


def test_where_nothing_runs_there_is_no_graph_to_fall_back_to(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = BACKENDS.get("onnxruntime")
    monkeypatch.setattr(type(runtime), "probe", lambda *_: Support.no("it is Sunday"))
    with pytest.raises(UnsupportedError, match="no variant of the bundle runs here"):
        hasten.load(bundle)


def run(bundle: Path, *words: str) -> int:
    return main(["run", str(bundle), *words])


def test_the_command_writes_one_text_as_it_comes(bundle: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or len(text))
    assert run(bundle, PROMPT) == 0
    assert "".join(written) == answer + "\n"
    assert len(written) > 3


def test_the_command_takes_options(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("--max-tokens", "9", "--temperature", "1.5", "--seed", "4", "-O", "top_k=20")
    assert run(bundle, PROMPT, *drawn) == 0
    first = capsys.readouterr().out
    assert run(bundle, PROMPT, *drawn) == 0
    assert capsys.readouterr().out == first
    with hasten.load(bundle) as write:
        asked: dict[str, Any] = {"max_tokens": 9, "temperature": 1.5, "seed": 4, "top_k": 20}
        expected = write(PROMPT, return_full_text=False, **asked)[0]["generated_text"]
    assert first == expected + "\n"


def test_the_command_stops(bundle: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bundle, PROMPT, "--stop", answer[4:6], "--stop", "never") == 0
    assert capsys.readouterr().out == answer[: answer.index(answer[4:6])] + "\n"


def test_the_command_takes_several_prompts(bundle: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bundle, PROMPT, "a dog") == 0
    out = capsys.readouterr().out
    assert out.startswith(answer.strip() + "\n\n")
    assert run(bundle, PROMPT, "a dog", "--json") == 0
    assert [len(answers) for answers in json.loads(capsys.readouterr().out)] == [1, 1]


def test_the_command_chats(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": PROMPT}]
    assert run(bundle, PROMPT, "--chat", "--json") == 0
    with hasten.load(bundle) as write:
        assert json.loads(capsys.readouterr().out) == [write(chat)]


def test_the_command_answers_a_file(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": PROMPT}, {"prompt": "a dog"}, {"messages": [{"role": "user", "content": "x"}]}, "I"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(bundle, "--input", str(file)) == 0
    with hasten.load(bundle) as write:
        expected = write([PROMPT, "a dog", rows[2]["messages"], "I"])  # type: ignore[index, call-overload]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((PROMPT, "--max-tokens", "0"), "error: max_tokens is 0; it must be a whole number, at least 1"),
        (("the cat " * 60,), "the model reads up to 64"),
        ((PROMPT, "-O", "num_beams=2"), "here it is beams"),
        (("--field", "question=x"), "error: a model that writes goes on from a text"),
    ],
)
def test_bad_input_is_one_clear_line(
    bundle: Path, words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bundle, *words) == 2
    assert complaint in capsys.readouterr().err


def test_options_of_writing_are_refused_by_what_does_not_write(
    tiny_classifier: Any, quick_build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quick_build(tiny_classifier("bert"), variants=["onnxruntime-fp32"])
    assert run(made.path, "a text", "--max-tokens", "5") == 2
    assert "text-classification, which writes no text" in capsys.readouterr().err
