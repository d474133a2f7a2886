"""The command line: results on stdout, errors in one line on stderr, and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hasten.cli import console, main
from hasten.core.report import Agreement, Candidate, Interval, Metric, Status, Verdict

QUICK = ["--bench-budget", "0.2s", "-b", "1", "-s", "8", "16", "32"]


@pytest.fixture(scope="module")
def bundle(tiny_classifier: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("cli") / "bundle"
    words = ["build", str(tiny_classifier("bert")), "-o", str(target), "--quiet", "--keep", "all", *QUICK]
    assert main([*words, "--variants", "onnxruntime-fp32", "openvino-fp32"]) == 0
    return target


def test_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hasten", "--help"], capture_output=True, text=True, check=True)
    assert {"build", "run", "verify", "bench"} <= set(re.findall(r"\w+", done.stdout))


def test_help_imports_no_heavy_library() -> None:
    program = (
        "import sys\nfrom hasten.cli import main\n"
        "try: main(['build', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'onnxruntime', 'rich', 'msgspec') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_prints_labels(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(bundle), "the cat sat", "a dog ran"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert re.match(r"(bad|fair|good) 0\.\d{4} the cat sat", lines[0])


def test_run_prints_texts_without_markup_on_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[/foo] [bold]hi[/bold] :smile: " + "long " * 60
    assert main(["run", str(bundle), text, "two\nlines"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert text.strip() in printed[0]


def test_run_rejects_invalid_utf8(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"text": "\xff\xfe"}\n')
    assert main(["run", str(bundle), "--input", str(file)]) == 2
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_run_prints_json_and_takes_task_options(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(bundle), "the cat sat", "--json", "-O", "top_k=2"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [len(answer) for answer in answers] == [2]
    assert set(answers[0][0]) == {"label", "score"}


def test_run_answers_a_file_line_by_line(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "the cat"}\n"a dog"\n\n{"text": "one", "text_pair": "two"}\n', encoding="utf-8")
    assert main(["run", str(bundle), "--input", str(file)]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 3


def test_run_prints_tokens_for_masks(
    tiny_model: Any, quick_build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "the [MASK] sat"}\n', encoding="utf-8")
    built = quick_build(tiny_model("bert", "ForMaskedLM"), variants=["onnxruntime-fp32"], data=file)
    assert main(["run", str(built.path), "the [MASK] sat", "[MASK] [MASK]", "-O", "top_k=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\S+ 0\.\d{4}  \S+ 0\.\d{4} the \[MASK\] sat", lines[0])
    assert re.fullmatch(r"(\S+ 0\.\d{4}  ){3}\S+ 0\.\d{4} \[MASK\] \[MASK\]", lines[1].replace("|  ", ""))
    assert lines[1].count("  |  ") == 1
    assert main(["run", str(built.path), "no mask"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "  hint: write [MASK] where a token is missing"


def test_run_prints_vectors_of_tokens(tiny_model: Any, quick_build: Any, capsys: pytest.CaptureFixture[str]) -> None:
    built = quick_build(tiny_model("bert", "Model"), variants=["onnxruntime-fp32"])
    assert main(["run", str(built.path), "the cat", "rain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.match(r"(\d) tokens × 32 numbers: (-?\d\.\d{4} ){6}…", line)[1] for line in lines] == ["4", "3"]
    assert main(["run", str(built.path), "the cat", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [len(answers), len(answers[0]), len(answers[0][0]), len(answers[0][0][0])] == [1, 1, 4, 32]


def test_run_accepts_fields_of_an_item(
    tiny_model: Any, quick_build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "the cat", "choices": ["sat", "ran"]}\n', encoding="utf-8")
    built = quick_build(tiny_model("bert", "ForMultipleChoice"), variants=["onnxruntime-fp32"], data=file)
    words = ["run", str(built.path), "--field", "prompt=1=[x]", "--field", 'choices=["the mat", "a dog"]']
    assert main(words) == 0
    assert re.fullmatch(r"(the mat|a dog) 0\.\d{4} 1=\[x\] · .*\n", capsys.readouterr().out)
    assert main([*words, "--json", "-O", "top_k=null"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert sorted(chosen["answer"] for chosen in answers[0]) == ["a dog", "the mat"]
    assert main(["run", str(built.path), "--field", "prompt=a", "--field", "choices=[b"]) == 2
    assert '"choices" of item 1 is str' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "printed"),
    [
        ({"score": 0.5, "start": 3, "end": 7, "answer": "[a] dog"}, "[a] dog 0.5000"),
        ({"score": 0.5, "start": 0, "end": 0, "answer": ""}, "– 0.5000"),
        ({"sequence": "x", "labels": ["sea", "sky"], "scores": [0.75, 0.25]}, "sea 0.7500  sky 0.2500"),
        ([{"corpus_id": 2, "score": 0.9}, {"corpus_id": 0, "score": -1.5}], "#2 0.9000  #0 -1.5000"),
        ([{"entity_group": "PER", "score": 1.0, "word": "Ann", "start": 0, "end": 3}], "Ann PER 1.0000"),
        ([], "–"),
        (0.25, "0.2500"),
        ({"something": ["new", 1, None]}, '{"something": ["new", 1, null]}'),
    ],
)
def test_run_prints_every_kind_of_answer_on_one_line(
    answer: Any, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers of other tasks, whose models are tested elsewhere."""

    class Answering:
        tokenizer = None

        def __call__(self, payload: list[object]) -> list[object]:
            return [answer for _ in payload]

    monkeypatch.setattr("hasten.api.load", lambda *_, **__: nullcontext(Answering()))
    assert main(["run", "bundle", "a\ntext", "another"]) == 0
    assert capsys.readouterr().out == f"{printed} a text\n{printed} another\n"


def test_texts_may_follow_options(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(bundle), "a text", "--json"]) == 0
    expected = capsys.readouterr().out
    assert main(["run", "--json", str(bundle), "--strict", "a text"]) == 0
    assert capsys.readouterr().out == expected
    assert main(["run", str(bundle), "--threads", "1", "--", "--json"]) == 0
    assert capsys.readouterr().out.endswith(" --json\n")


def test_names_are_not_truncated_and_truncated_texts_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    name = "onnxruntime-int8+attention+smooth+split+keep12"
    agreement = Agreement("same label", 0.99, 2, 0.5, 0.1, 1.0, flips=1, cosine_mean=0.5, worst=(0,))
    metric, interval = Metric("accuracy", 0.9, 2), Interval(0.1, -0.5, 0.5)
    verdict = Verdict(name, True, "a reason that is long enough to wrap", agreement, metric, metric, interval)
    candidate = Candidate(name, Status.ELIGIBLE, "accuracy drop 0.11 points (−0.57 to 0.80) ≤ 0.2 at batch 32", verdict)
    console.print_verdicts([candidate], [{"text": "long " * 40}, {"text": "short"}])
    printed = capsys.readouterr().out
    assert printed.count(name) == 2
    assert "long…" in printed.replace("\n", "").replace(" ", "")


def test_brackets_in_reasons_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "making it needs the package 'nncf': pip install 'hasten[nncf]'"
    missing = Candidate("openvino-int8", Status.UNAVAILABLE, reason)
    console.print_candidates([missing])
    assert reason in capsys.readouterr().out
    console.print_verdicts([missing], [])
    assert reason in capsys.readouterr().out


def test_dry_run_shows_how_to_install_a_missing_package(
    tiny_classifier: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hasten.builder.search.search.find_spec", lambda _: None)
    assert main(["build", str(tiny_classifier("bert")), "--dry-run"]) == 0
    assert "pip install 'hasten[nncf]'" in capsys.readouterr().out


@pytest.mark.slow
def test_verify_and_bench_run_on_a_bundle(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle), "--quiet"]) == 0
    assert "onnxruntime-fp32" in capsys.readouterr().out
    assert main(["bench", str(bundle), "--quiet", "--bench-budget", "0.2s", "-b", "1", "-s", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bench"]["baseline"] == "torch-fp32"


@pytest.mark.slow
def test_build_prints_json(
    tiny_classifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["build", str(tiny_classifier("bert")), "-o", str(tmp_path / "bundle"), "--variants", "onnxruntime-fp32"]
    assert main([*words, "--json", "--quiet", *QUICK]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "bundle")
    assert document["report"]["chosen"] == "onnxruntime-fp32"
    assert main([*words, "--json", "--dry-run", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["outline"]["target"] == str(tmp_path / "bundle")


def test_dry_run_writes_nothing(
    tiny_classifier: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bundle[v2]"
    assert main(["build", str(tiny_classifier("bert")), "-o", str(target), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "onnxruntime-fp32" in printed
    assert f"write{target}" in "".join(printed.split())  # lines may be wrapped
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["build", "no/such/place/at/all"], 2, "no such directory"),
        (["build", "./nowhere"], 2, "no such directory"),
        (["build", "some-org/no-such-model"], 4, "hub cannot be reached"),
        (["build", "{empty}"], 2, "no config.json"),
        (["build", "{bundle}"], 2, "already a bundle"),
        (["build", "{model}", "--task", "text-clasification"], 2, "did you mean 'text-classification'"),
        (["build", "{model}", "--seq-len", "64", "32", "16"], 2, "out of order"),
        (["build", "{model}", "--seq-len", "16", "32"], 2, "one number or three"),
        (["build", "{model}", "--batch-size", "0"], 2, "out of order"),
        (["build", "{model}", "--max-drop", "1"], 2, "needs labelled data"),
        (["build", "{model}", "--min-agreement", "7"], 2, "between 0 and 1"),
        (["build", "{model}", "--data", "/nowhere.jsonl"], 2, "no data file"),
        (["build", "{model}", "--variants", "onx-fp32"], 2, "did you mean 'onnxruntime'"),
        (["build", "{model}", "--variants", "onnxruntime-fp99"], 2, "not the name of a variant"),
        (["build", "{model}", "--variants", "onnxruntime-fp16"], 3, "does not run here"),
        (["build", "{model}", "--bench-budget", "soon"], 2, "not a duration"),
        (["build", "{model}", "-o", "{bundle}"], 2, "already holds a bundle"),
        (["build", "{model}", "-o", "{model}"], 2, "is not empty"),
        (["build", "{model}", "--revision", "main"], 2, "local directory"),
        (["run", "{empty}", "text"], 6, "is not a bundle"),
        (["run", "/nowhere", "text"], 6, "no such directory"),
        (["run", "{bundle}", ""], 2, "text 1 is empty"),
        (["run", "{bundle}", "fine", "   "], 2, "text 2 is empty"),
        (["run", "{bundle}"], 2, "pass either texts"),
        (["run", "{bundle}", "a text", "--field", "text=b"], 2, "pass either texts"),
        (["run", "{bundle}", "--field", "text"], 2, "'text' is not NAME=VALUE"),
        (["run", "{bundle}", "--field", "text=a", "--field", "text=b"], 2, "'text' was passed twice"),
        (["run", "{bundle}", "--field", "txt=a"], 2, 'item 1 has no "text"'),
        (["run", "{bundle}", "x", "--variant", "onnxruntime-fp23"], 2, "did you mean 'onnxruntime-fp32'"),
        (["run", "{bundle}", "x", "-O", "topk=2"], 2, "did you mean 'top_k'"),
        (["run", "{bundle}", "x", "-O", "top_k=many"], 2, "invalid option"),
        (["verify", "{bundle}", "--data", "/nowhere.jsonl"], 2, "no data file"),
        (
            ["verify", "{bundle}", "--data", "{bundle}/reference/inputs.jsonl", "--columns", "text_pair=text"],
            2,
            'inputs.jsonl: item 1 has no "text"; its fields are: text_pair',
        ),
        (["bench", "/nowhere"], 6, "no such directory"),
        (["bench", "{bundle}", "--bench-budget", "0"], 2, "is not a positive duration"),
        (["run", "{bundle}", "x", "--threads", "-1"], 2, "at least 1"),
        (["verify", "{bundle}", "--max-drop", "0.1", "--quiet"], 2, "needs labels"),
    ],
)
def test_user_error_is_printed_in_one_line(
    words: list[str],
    code: int,
    message: str,
    bundle: Path,
    tiny_classifier: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = {"bundle": bundle, "model": tiny_classifier("bert"), "empty": tmp_path}
    assert main([word.format(**paths) for word in words]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0].startswith("error: ")
    assert message in printed.err
    assert all(line.startswith("  hint: ") for line in lines[1:])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["biuld"], "did you mean 'build'"),
        (["build", "model", "--seqlen", "16"], "did you mean '--seq-len'"),
        (["build"], "required: model"),
        (["--nonsense"], "unknown option"),
    ],
)
def test_mistyped_word_gets_a_suggestion(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_truncated_text_is_reported(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(bundle), "cat " * 500]) == 0
    assert "truncated to the model's limit of 64 tokens" in " ".join(capsys.readouterr().err.split())


def test_error_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path), "text", "--json"]) == 6
    document = json.loads(capsys.readouterr().out)
    assert (document["error"], document["exit_code"]) == ("BundleError", 6)


def test_build_without_eligible_variant_prints_candidates(
    tiny_embedder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_embedder())
    words = ["build", model, "-o", str(tmp_path / "bundle"), "--variants", "onnxruntime-int8", "--min-agreement", "1"]
    assert main([*words, "--quiet", *QUICK]) == 5
    printed = capsys.readouterr()
    assert "mean cosine" in printed.out
    assert "no variant" in printed.err
    assert list(tmp_path.iterdir()) == []
