"""A generation bundle in `hasten verify`, `bench` and `inspect`, and loaded with `strict`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, DECODER, ENCODER
from hasten.builder.inspect import inspect, open_viewer
from hasten.bundle import Bundle, BundleWriter
from hasten.bundle.read import TOKENIZER
from hasten.cli import main
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.variant import Support
from hasten.generation.generator import Generator
from support.models import generation_bundles, tiny_encoders, tiny_generators

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FP32, INT8 = "onnxruntime-fp32", "onnxruntime-int8"
PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("llama")
    model = generation_bundles.save(folder / "model")
    # A random model keeps few of its words in int8; what it must keep is not the subject here.
    return generation_bundles.build(
        model, folder / "bundle", variants=[FP32, INT8], keep="all", min_agreement=0.3, batch_size=2, seq_len=8
    )


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("t5")
    return generation_bundles.build(tiny_generators.save("t5", folder / "model"), folder / "bundle")


@pytest.fixture
def changed(llama: Bundle, tmp_path: Path) -> Callable[..., Bundle]:
    """Return a function that writes the bundle with another reference or other variants."""

    def change(
        rows: Sequence[Any] | None = None, logits: np.ndarray | None = None, variants: Sequence[str] = (FP32, INT8)
    ) -> Bundle:
        stored = llama.reference()
        entries = [llama.entry(name) for name in variants]
        with BundleWriter(tmp_path / "bundle") as writer:
            for entry in entries:
                writer.add_variant(llama.artifact(entry))
            writer.add_tokenizer(llama.path / TOKENIZER)
            writer.add_reference(
                stored.rows if rows is None else rows,
                {"logits": stored.outputs["logits"] if logits is None else logits},
            )
            writer.add_report(llama.report)
            return writer.commit(replace(llama.manifest, variants=tuple(entries)))

    return change


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"sentence": text}) + "\n" for text in tiny_encoders.CORPUS))
    return file


def verified(bundle: Bundle, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["verify", str(bundle.path), "--threads", "1", "--json", "-q", *words]) == code
    # What went wrong comes after what was found.
    result, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    return {candidate["variant"]: candidate for candidate in result}


def wrong_logits(bundle: Bundle, position: int) -> np.ndarray:
    """Return the stored logits with an error at the first or second token of each answer."""
    logits = bundle.reference().outputs["logits"].copy()
    logits[position::2] += 0.5
    return logits


# --- verify


def test_verify_reproduces_the_verdicts_of_the_build(llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    result = verified(llama, capsys)
    assert list(result) == [entry.name for entry in llama.manifest.variants]
    for entry in llama.manifest.variants:
        verdict = result[entry.name]["verdict"]
        assert verdict["passed"]
        assert verdict["agreement"]["flips"] == entry.agreement.flips
        assert entry.metric is not None
        assert verdict["metric"]["other_metrics"]["perplexity"] == pytest.approx(
            entry.metric.other_metrics["perplexity"], rel=1e-6
        )
    built = [candidate.verdict for candidate in llama.report.candidates if candidate.verdict]
    assert result[INT8]["verdict"]["reference_metric"]["value"] == built[0].reference_metric.value  # type: ignore[union-attr]
    assert main(["verify", str(llama.path), "--threads", "1", "--variant", INT8]) == 0
    printed = capsys.readouterr().out
    assert "8 rows" in printed
    assert "metrics on 16 rows" in printed
    assert FP32 not in printed


@pytest.mark.parametrize("position", [0, 1])
def test_wrong_prefill_or_decode_logits_are_rejected(
    changed: Any, llama: Bundle, position: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = changed(logits=wrong_logits(llama, position))
    result = verified(bundle, capsys, code=5)
    assert result[FP32]["reason"].startswith("largest error 5.0e-01 >")
    # Which words are chosen is what counts for it, and those are the same.
    assert result[INT8]["verdict"]["passed"]


def test_different_tokens_are_rejected(changed: Any, llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "tokens": [*row["tokens"][:-1], 5]} if "tokens" in row else row for row in llama.reference().rows]  # type: ignore[misc]
    result = verified(changed(rows), capsys, "--variant", FP32, code=5)
    assert list(result) == [FP32]
    assert result[FP32]["reason"] == "same next token 0.9687 < 1 for fp32"
    assert main(["verify", str(llama.path), "--variant", FP32, "--min-agreement", "2", "-q"]) == 2


def test_user_texts_have_the_reference_perplexity(
    llama: Bundle, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = verified(llama, capsys, "--data", str(texts), "--columns", "text=sentence")
    expected = perplexity_by_transformers(llama)
    for candidate in result.values():
        assert candidate["verdict"]["reference_metric"]["other_metrics"]["perplexity"] == pytest.approx(
            expected, rel=1e-4
        )
    assert result[FP32]["verdict"]["metric"]["other_metrics"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    own, metric = result[INT8]["verdict"], llama.entry(INT8).metric
    assert own["metric"]["other_metrics"]["perplexity"] == pytest.approx(expected, rel=0.5)
    assert own["metric"]["value"] != own["reference_metric"]["value"]
    assert metric is not None
    assert own["notes"] == [f"perplexity {metric.other_metrics['perplexity']:.3f} on the texts it was built with"]
    # By what is lost, too: so much may be.
    lost = 100 * (own["reference_metric"]["value"] - own["metric"]["value"])
    words = ("--data", str(texts), "--columns", "text=sentence", "--variant", INT8, "--max-drop")
    verified(llama, capsys, *words, str(max(0.0, lost) + 1e-6))


def perplexity_by_transformers(bundle: Bundle) -> float:
    import transformers

    module: Any = transformers.AutoModelForCausalLM.from_pretrained(bundle.path.parent / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundle.path.parent / "model")
    losses, tokens = 0.0, 0
    for text in tiny_encoders.CORPUS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            losses += float(module(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return float(np.exp(losses / tokens))


def test_user_texts_without_fp32_have_no_reference(
    changed: Any, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, words = changed(variants=[INT8]), ("--data", str(texts), "--columns", "text=sentence")
    verdict = verified(bundle, capsys, *words)[INT8]["verdict"]
    assert verdict["metric"]["rows"] == len(tiny_encoders.CORPUS)
    assert verdict["reference_metric"] is None
    assert main(["verify", str(bundle.path), *words, "--max-drop", "1", "-q"]) == 2
    assert "no fp32 variant of this bundle reproduces the reference here" in capsys.readouterr().err


def test_older_bundle_is_judged_by_its_stored_logits(
    changed: Any, llama: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = llama.reference()
    rows = [row for row in stored.rows if "tokens" in row]
    bundle = changed(rows, stored.outputs["logits"][::2])
    result = verified(bundle, capsys)
    assert result[INT8]["verdict"]["agreement"]["flips"] == llama.entry(INT8).agreement.flips
    assert result[INT8]["verdict"]["metric"] is None
    assert main(["verify", str(bundle.path), "--max-drop", "1", "-q"]) == 2
    assert "--max-drop needs texts to score, and this bundle stores none" in capsys.readouterr().err


def test_inconsistent_reference_is_rejected(changed: Any, llama: Bundle, capsys: Any) -> None:
    bundle = changed(logits=llama.reference().outputs["logits"][:-1])
    assert main(["verify", str(bundle.path), "-q"]) == 6
    assert "15 rows of logits for 8 answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--metric", "perplexity", "--max-drop", "1"), "--max-drop bounds the likelihood per token"),
        (("--metric", "F1"), "there is no metric 'F1' here"),
        (("--data", "{texts}"), "no row has a text (--columns text=COLUMN names the column of the data)"),
        (("--data", "{texts}", "--columns", "label=sentence"), "--columns names 'label'"),
    ],
)
def test_unsupported_gate_is_a_one_line_error(
    llama: Bundle, texts: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [word.format(texts=texts) for word in words]
    assert main(["verify", str(llama.path), *arguments, "-q"]) == 2
    printed_error = " ".join(capsys.readouterr().err.split())
    assert message.replace(" (", " hint: ").removesuffix(")") in printed_error


def test_encoder_decoder_is_judged_by_answers_only(t5: Bundle, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = verified(t5, capsys)
    assert result[FP32]["verdict"]["agreement"]["flips"] == 0
    assert result[FP32]["verdict"]["metric"] is None
    for words in (["--data", str(texts), "--columns", "text=sentence"], ["--max-drop", "1"]):
        assert main(["verify", str(t5.path), *words, "-q"]) == 2
        assert "text2text-generation does not" in capsys.readouterr().err
    with pytest.raises(hasten.PlanError, match="text2text-generation does not"):
        hasten.build(t5.path.parent / "model", t5.path.parent / "other", data=texts, max_drop=1.0)


def test_verify_fails_if_no_variant_runs(
    llama: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(BACKENDS.get("onnxruntime")), "probe", lambda *_: Support.no("it is Sunday"))
    result = verified(llama, capsys, code=3)
    assert {candidate["reason"] for candidate in result.values()} == {"it is Sunday"}
    with pytest.raises(UnsupportedError, match="runs here: it is Sunday"):
        hasten.load(llama.path, strict=True)


# --- strict


def test_strict_load_verifies_the_variant(llama: Bundle, t5: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    for bundle in (llama, t5):
        with (
            hasten.load(bundle.path, FP32, threads=1, strict=True) as proven,
            hasten.load(bundle.path, FP32, threads=1) as plain,
        ):
            assert isinstance(proven, Generator)
            assert proven([PROMPT, "a dog"], max_tokens=8) == plain([PROMPT, "a dog"], max_tokens=8)
    assert caplog.text.count(f"{FP32} reproduces the reference answers here: largest error") == 2


def test_strict_load_skips_an_inaccurate_variant(changed: Any, llama: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    bundle = changed(logits=wrong_logits(llama, 1), variants=[FP32, INT8])
    expected = hasten.load(llama.path, INT8, threads=1)(PROMPT, max_tokens=8)
    with hasten.load(bundle.path, threads=1, strict=True) as write:
        assert write(PROMPT, max_tokens=8) == expected
    assert f"skipping {FP32}, which does not reproduce the reference answers here: largest error 5.0e-01" in caplog.text
    with pytest.raises(AccuracyError, match=f"{FP32} does not reproduce the reference answers here"):
        hasten.load(bundle.path, FP32, threads=1, strict=True)
    assert main(["run", str(bundle.path), PROMPT, "--variant", FP32, "--strict", "-q"]) == 5


def test_other_cpu_is_logged_at_info_level(
    llama: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = replace(llama.manifest.machine, instructions=("avx2",), cpu="An old CPU")
    monkeypatch.setattr("hasten.predictor.this_machine", lambda: machine)
    caplog.set_level(logging.INFO, "hasten")
    hasten.load(llama.path, FP32, threads=1).close()
    assert "and this is An old CPU: --strict, or hasten verify, verifies it here" in caplog.text


# --- bench


def test_bench_times_prefill_and_decode(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A real benchmark, without the original: starting PyTorch takes another ten seconds."""
    bundle = without_original(changed())
    words = ["bench", str(bundle.path), "-b", "1", "2", "2", "-s", "8", "--bench-budget", "200ms"]
    words += ["--threads", "1", "-q"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for phase, shapes in (("prefill", [(1, 8)]), ("bench", [(2, 8), (1, 8)])):
        timed = {(t["variant"], t["shape"]["batch"], t["shape"]["sequence"]): t for t in result[phase]["timings"]}
        assert set(timed) == {(name, *shape) for name in (FP32, INT8) for shape in shapes}
        assert all(timing["p50_ms"] > 0 for timing in timed.values())
        assert result[phase]["baseline"] == FP32
    assert result["rejected"][0]["reason"].endswith(f"is no longer there — compared with {FP32} instead")


def without_original(bundle: Bundle) -> Bundle:
    manifest = replace(bundle.manifest, model=replace(bundle.manifest.model, id="acme/gone")).sealed()
    (bundle.path / "manifest.json").write_bytes(manifest.to_json())
    return replace(bundle, manifest=manifest)


def test_bench_includes_the_original_if_available(llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    with generation_bundles.fake_generation_bench():
        assert main(["bench", str(llama.path), "-b", "3", "-s", "5000", "--threads", "1", "-q"]) == 0
    printed = capsys.readouterr().out
    # Half of the context is for what is written. Every run takes a millisecond.
    assert "prefill (batch × tokens), vs torch-fp32" in printed
    assert "decode (batch × tokens), vs torch-fp32" in printed
    reading, writing = (next(line for line in printed.splitlines() if shape in line) for shape in ("1×1024", "3×1024"))
    assert reading.split()[-1] == "1024000"
    assert writing.split()[-1] == "1000"
    assert main(["bench", str(llama.path), "-b", "65", "-q"]) == 2
    assert "at most 64 prompts are timed together" in capsys.readouterr().err


# --- inspect


def test_inspect_describes_a_generation_bundle(llama: Bundle, t5: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    result = inspect(llama)
    assert [(view.name, view.graph, view.weights) for view in result.graphs] == [
        (entry.name, DECODER, entry.precision) for entry in llama.manifest.variants
    ]
    assert all(view.operators["GroupQueryAttention"] == 2 for view in result.graphs)
    # Two layers with keys and values of two heads, 16 wide, in four bytes.
    assert result.cache is not None
    assert (result.cache.bytes_per_token, result.cache.bytes_per_prompt_token) == (512, 0)
    assert result.cache.full_bytes == 512 * generation_bundles.CONTEXT
    assert main(["inspect", str(llama.path)]) == 0
    printed = capsys.readouterr().out
    assert "KV cache   0.5 kB per token, 1.0 MB per sequence of 2048" in printed
    assert "with a chat template" in printed
    assert f"{INT8} decoder" in printed
    other = inspect(t5)
    assert {(view.name, view.graph) for view in other.graphs} == {(FP32, ENCODER), (FP32, DECODER)}
    assert other.cache is not None
    assert other.cache.bytes_per_prompt_token == other.cache.bytes_per_token == 2 * 2 * 4 * 16 * 4
    assert [step.notes for step in other.passes] == [("the decoder",), ("the encoder",)]


def test_inspect_reports_operator_placement(llama: Bundle, t5: Bundle) -> None:
    for bundle, name, operator in ((llama, INT8, "MatMulNBits"), (t5, FP32, "MatMul")):
        views = inspect(bundle, name).graphs
        (executed,) = [view.executed for view in views if view.executed]
        counted = sum(view.operators.get(operator, 0) for view in views)
        ran = sum(execution.count for execution in executed if execution.operator == operator)
        assert 0 < ran <= counted
        assert {execution.on for execution in executed} == {"CPUExecutionProvider"}


def test_inspect_uses_the_report_without_onnx(t5: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with_onnx = {view.graph: view.operators for view in inspect(t5).graphs}
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    result = inspect(t5)
    assert {view.graph: view.operators for view in result.graphs} == with_onnx
    assert result.cache is None


def test_viewer_opens_the_decoder(llama: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    netron = pytest.importorskip("netron")
    shown: list[str] = []
    monkeypatch.setattr(netron, "start", lambda file, address: shown.append(file) or address)
    for variant in (None, INT8):
        open_viewer(llama, variant, 0)
    names = (llama.chosen.name, INT8)
    assert shown == [str(llama.path / "variants" / name / "decoder.onnx") for name in names]
