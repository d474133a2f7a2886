"""A generation bundle through `hasten.load` and `hasten run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.backends import BACKENDS
from hasten.cli import main
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.generation_types import SamplingParams
from hasten.core.system.hardware import resident_memory_bytes
from hasten.core.variant import Support
from hasten.generation.generator import Generator
from support.models import tiny_decoders

PROMPT = "the cat sat"
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = tiny_decoders.whole_characters()
    module = tiny_decoders.model("llama", tiny_decoders.vocabulary_of(backend))
    spec = tiny_decoders.spec_of(module, chat_template=TEMPLATE, defaults=SamplingParams(max_tokens=6))
    return tiny_decoders.bundle(module, backend, tmp_path_factory.mktemp("writes"), spec).path


@pytest.fixture(scope="module")
def answer(bundle: Path) -> str:
    with hasten.load(bundle) as generate:
        text: str = generate(PROMPT, return_full_text=False)[0]["generated_text"]
    assert len(text) > 6
    return text


def test_load_returns_a_generator(bundle: Path, answer: str) -> None:
    with hasten.load(bundle, "onnxruntime-fp32", threads=1) as generate:
        assert isinstance(generate, Generator)
        assert generate(PROMPT) == [{"generated_text": PROMPT + answer}]
        assert "".join(generate(PROMPT, stream=True)) == answer
        assert generate(PROMPT, max_tokens=2) != generate(PROMPT)


@pytest.mark.skipif(resident_memory_bytes() is None, reason="only Linux reports resident memory")
def test_kv_cache_beyond_the_memory_limit_is_an_error(bundle: Path, answer: str) -> None:
    resident = resident_memory_bytes() or 0
    with hasten.load(bundle, max_memory=resident + 2**30) as generate:
        assert generate(PROMPT) == [{"generated_text": PROMPT + answer}]
    with pytest.raises(PlanError, match="the KV cache of 8 slots needs up to"):
        hasten.load(bundle, max_memory=max(1, resident - 2**20))
    assert generate.decoder.max_cache_bytes(0) == generate.decoder.cache_bytes == 0  # nothing stays reserved


def test_generation_bundle_has_no_graph_to_fall_back_to(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = BACKENDS.get("onnxruntime")
    monkeypatch.setattr(type(runtime), "probe", lambda *_: Support.no("it is Sunday"))
    with pytest.raises(UnsupportedError, match="no variant of the bundle runs here"):
        hasten.load(bundle)


def run(bundle: Path, *words: str) -> int:
    return main(["run", str(bundle), *words])


def test_run_streams_one_text(bundle: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", lambda text: emitted.append(text) or len(text))
    assert run(bundle, PROMPT) == 0
    assert "".join(emitted) == answer + "\n"
    assert len(emitted) > 3


def test_run_accepts_options(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("--max-tokens", "9", "--temperature", "1.5", "--seed", "4", "-O", "top_k=20")
    assert run(bundle, PROMPT, *drawn) == 0
    first = capsys.readouterr().out
    assert run(bundle, PROMPT, *drawn) == 0
    assert capsys.readouterr().out == first
    with hasten.load(bundle) as generate:
        options: dict[str, Any] = {"max_tokens": 9, "temperature": 1.5, "seed": 4, "top_k": 20}
        expected = generate(PROMPT, return_full_text=False, **options)[0]["generated_text"]
    assert first == expected + "\n"


def test_run_accepts_stop_strings(bundle: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bundle, PROMPT, "--stop", answer[4:6], "--stop", "never") == 0
    assert capsys.readouterr().out == answer[: answer.index(answer[4:6])] + "\n"


def test_run_accepts_several_prompts(bundle: Path, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(bundle, PROMPT, "a dog") == 0
    out = capsys.readouterr().out
    assert out.startswith(answer.strip() + "\n\n")
    assert run(bundle, PROMPT, "a dog", "--json") == 0
    assert [len(answers) for answers in json.loads(capsys.readouterr().out)] == [1, 1]


def test_run_chat_renders_the_template(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": PROMPT}]
    assert run(bundle, PROMPT, "--chat", "--json") == 0
    with hasten.load(bundle) as generate:
        assert json.loads(capsys.readouterr().out) == [generate(chat)]


def test_run_processes_a_file(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": PROMPT}, {"prompt": "a dog"}, {"messages": [{"role": "user", "content": "x"}]}, "I"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(bundle, "--input", str(file)) == 0
    with hasten.load(bundle) as generate:
        expected = generate([PROMPT, "a dog", rows[2]["messages"], "I"])  # type: ignore[index, call-overload]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((PROMPT, "--max-tokens", "0"), "error: max_tokens is 0; it must be a whole number, at least 1"),
        (("the cat " * 60,), "the model reads up to 64"),
        ((PROMPT, "-O", "max_new_tokens=2"), "use max_tokens"),
        (("--field", "question=x"), "error: text generation takes a text"),
    ],
)
def test_bad_input_is_a_one_line_error(
    bundle: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bundle, *words) == 2
    assert message in capsys.readouterr().err


def test_generation_options_are_rejected_for_other_tasks(
    tiny_classifier: Any, quick_build: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder_bundle = quick_build(tiny_classifier("bert"), variants=["onnxruntime-fp32"])
    assert run(encoder_bundle.path, "a text", "--max-tokens", "5") == 2
    assert "text-classification, which does not generate text" in capsys.readouterr().err
