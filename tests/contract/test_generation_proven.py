"""A bundle that writes, proven and measured again: `verify`, `bench`, `inspect`, and loading it strictly."""

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
import tiny
import tiny_writers
import writer_bundles
from hasten.backends import BACKENDS, DECODER, ENCODER
from hasten.builder.inspect import inspect, show
from hasten.bundle import Bundle, BundleWriter
from hasten.bundle.read import TOKENIZER
from hasten.cli import main
from hasten.core.errors import AccuracyError, UnsupportedError
from hasten.core.variant import Support
from hasten.generation.generator import Generator

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FP32, INT8 = "onnxruntime-fp32", "onnxruntime-int8"
PROMPT = "the cat sat on"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("llama")
    model = writer_bundles.save(folder / "model")
    # A random model keeps few of its words in int8; what it must keep is not the subject here.
    return writer_bundles.build(
        model, folder / "bundle", variants=[FP32, INT8], keep="all", min_agreement=0.3, batch_size=2, seq_len=8
    )


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("t5")
    return writer_bundles.build(tiny_writers.save("t5", folder / "model"), folder / "bundle")


@pytest.fixture
def changed(llama: Bundle, tmp_path: Path) -> Callable[..., Bundle]:
    """The bundle as if it had been built with another reference, or with other variants."""

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
    file.write_text("".join(json.dumps({"sentence": text}) + "\n" for text in tiny.CORPUS))
    return file


def verified(bundle: Bundle, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["verify", str(bundle.path), "--threads", "1", "--json", "-q", *words]) == code
    # What went wrong comes after what was found.
    found, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    return {candidate["variant"]: candidate for candidate in found}


def wrong_logits(bundle: Bundle, place: int) -> np.ndarray:
    """Other ones for the first token of each answer, or for the second."""
    logits = bundle.reference().outputs["logits"].copy()
    logits[place::2] += 0.5
    return logits


# --- verify


def test_every_variant_is_judged_as_it_was_built(llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    found = verified(llama, capsys)
    assert list(found) == [entry.name for entry in llama.manifest.variants]
    for entry in llama.manifest.variants:
        verdict = found[entry.name]["verdict"]
        assert verdict["passed"]
        assert verdict["agreement"]["flips"] == entry.agreement.flips
        assert entry.metric is not None
        assert verdict["metric"]["also"]["perplexity"] == pytest.approx(entry.metric.also["perplexity"], rel=1e-6)
    built = [candidate.verdict for candidate in llama.report.candidates if candidate.verdict]
    assert found[INT8]["verdict"]["reference_metric"]["value"] == built[0].reference_metric.value  # type: ignore[union-attr]
    assert main(["verify", str(llama.path), "--threads", "1", "--variant", INT8]) == 0
    printed = capsys.readouterr().out
    assert "8 rows" in printed
    assert "metrics on 16 rows" in printed
    assert FP32 not in printed


@pytest.mark.parametrize("place", [0, 1])
def test_another_error_in_reading_or_in_a_step_is_seen(
    changed: Any, llama: Bundle, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = changed(logits=wrong_logits(llama, place))
    found = verified(bundle, capsys, code=5)
    assert found[FP32]["reason"].startswith("largest error 5.0e-01 >")
    # Which words are chosen is what counts for it, and those are the same.
    assert found[INT8]["verdict"]["passed"]


def test_other_words_are_seen(changed: Any, llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "tokens": [*row["tokens"][:-1], 5]} if "tokens" in row else row for row in llama.reference().rows]  # type: ignore[misc]
    found = verified(changed(rows), capsys, "--variant", FP32, code=5)
    assert list(found) == [FP32]
    assert found[FP32]["reason"] == "same next token 0.9688: in fp32 each must be"
    assert main(["verify", str(llama.path), "--variant", FP32, "--min-agreement", "2", "-q"]) == 2


def test_texts_of_ones_own_are_read_as_the_original_reads_them(
    llama: Bundle, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verified(llama, capsys, "--data", str(texts), "--columns", "text=sentence")
    expected = perplexity_by_transformers(llama)
    for candidate in found.values():
        assert candidate["verdict"]["reference_metric"]["also"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert found[FP32]["verdict"]["metric"]["also"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    own, metric = found[INT8]["verdict"], llama.entry(INT8).metric
    assert own["metric"]["also"]["perplexity"] == pytest.approx(expected, rel=0.5)
    assert own["metric"]["value"] != own["reference_metric"]["value"]
    assert metric is not None
    assert own["notes"] == [f"perplexity {metric.also['perplexity']:.3f} on the texts it was built with"]
    # By what is lost, too: so much may be.
    lost = 100 * (own["reference_metric"]["value"] - own["metric"]["value"])
    words = ("--data", str(texts), "--columns", "text=sentence", "--variant", INT8, "--max-drop")
    verified(llama, capsys, *words, str(max(0.0, lost) + 1e-6))


def perplexity_by_transformers(bundle: Bundle) -> float:
    import transformers

    module: Any = transformers.AutoModelForCausalLM.from_pretrained(bundle.path.parent / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundle.path.parent / "model")
    losses, tokens = 0.0, 0
    for text in tiny.CORPUS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            losses += float(module(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return float(np.exp(losses / tokens))


def test_without_fp32_texts_are_read_and_compared_with_nothing(
    changed: Any, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, words = changed(variants=[INT8]), ("--data", str(texts), "--columns", "text=sentence")
    verdict = verified(bundle, capsys, *words)[INT8]["verdict"]
    assert verdict["metric"]["rows"] == len(tiny.CORPUS)
    assert verdict["reference_metric"] is None
    assert main(["verify", str(bundle.path), *words, "--max-drop", "1", "-q"]) == 2
    assert "of this bundle no fp32 variant proves itself here" in capsys.readouterr().err


def test_a_bundle_from_before_is_judged_by_what_it_has(
    changed: Any, llama: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = llama.reference()
    rows = [row for row in stored.rows if "tokens" in row]
    bundle = changed(rows, stored.outputs["logits"][::2])
    found = verified(bundle, capsys)
    assert found[INT8]["verdict"]["agreement"]["flips"] == llama.entry(INT8).agreement.flips
    assert found[INT8]["verdict"]["metric"] is None
    assert main(["verify", str(bundle.path), "--max-drop", "1", "-q"]) == 2
    assert "--max-drop needs texts to read, and this bundle keeps none" in capsys.readouterr().err


def test_a_reference_that_does_not_fit_is_damaged(changed: Any, llama: Bundle, capsys: Any) -> None:
    bundle = changed(logits=llama.reference().outputs["logits"][:-1])
    assert main(["verify", str(bundle.path), "-q"]) == 6
    assert "15 rows of logits for 8 answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--metric", "perplexity", "--max-drop", "1"), "--max-drop goes by the likelihood per token"),
        (("--metric", "F1"), "there is no metric 'F1' here"),
        (("--data", "{texts}"), "no row has a text (--columns text=COLUMN says what the data calls it)"),
        (("--data", "{texts}", "--columns", "label=sentence"), "--columns names 'label'"),
    ],
)
def test_what_cannot_be_judged_by_is_one_line(
    llama: Bundle, texts: Path, words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [word.format(texts=texts) for word in words]
    assert main(["verify", str(llama.path), *asked, "-q"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert complaint.replace(" (", " hint: ").removesuffix(")") in told


def test_one_with_an_encoder_is_judged_by_its_answers_alone(
    t5: Bundle, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verified(t5, capsys)
    assert found[FP32]["verdict"]["agreement"]["flips"] == 0
    assert found[FP32]["verdict"]["metric"] is None
    for words in (["--data", str(texts), "--columns", "text=sentence"], ["--max-drop", "1"]):
        assert main(["verify", str(t5.path), *words, "-q"]) == 2
        assert "text2text-generation reads none by itself" in capsys.readouterr().err
    with pytest.raises(hasten.PlanError, match="text2text-generation reads none by itself"):
        hasten.build(t5.path.parent / "model", t5.path.parent / "other", data=texts, max_drop=1.0)


def test_where_nothing_runs_nothing_is_proven(
    llama: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type(BACKENDS.get("onnxruntime")), "probe", lambda *_: Support.no("it is Sunday"))
    found = verified(llama, capsys, code=3)
    assert {candidate["reason"] for candidate in found.values()} == {"it is Sunday"}
    with pytest.raises(UnsupportedError, match="runs here: it is Sunday"):
        hasten.load(llama.path, strict=True)


# --- strict


def test_it_proves_itself_when_it_is_loaded(llama: Bundle, t5: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hasten")
    for bundle in (llama, t5):
        with (
            hasten.load(bundle.path, FP32, threads=1, strict=True) as proven,
            hasten.load(bundle.path, FP32, threads=1) as plain,
        ):
            assert isinstance(proven, Generator)
            assert proven([PROMPT, "a dog"], max_tokens=8) == plain([PROMPT, "a dog"], max_tokens=8)
    assert caplog.text.count(f"{FP32} answers like the original here: largest error") == 2


def test_the_next_is_used_where_one_no_longer_writes_the_same(
    changed: Any, llama: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = changed(logits=wrong_logits(llama, 1), variants=[FP32, INT8])
    expected = hasten.load(llama.path, INT8, threads=1)(PROMPT, max_tokens=8)
    with hasten.load(bundle.path, threads=1, strict=True) as write:
        assert write(PROMPT, max_tokens=8) == expected
    assert f"passing over {FP32}, which does not answer like the original here: largest error 5.0e-01" in caplog.text
    with pytest.raises(AccuracyError, match=f"{FP32} does not answer like the original here"):
        hasten.load(bundle.path, FP32, threads=1, strict=True)
    assert main(["run", str(bundle.path), PROMPT, "--variant", FP32, "--strict", "-q"]) == 5


def test_another_processor_is_told_quietly(
    llama: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = replace(llama.manifest.machine, instructions=("avx2",), cpu="An old CPU")
    monkeypatch.setattr("hasten.predictor.this_machine", lambda: machine)
    caplog.set_level(logging.INFO, "hasten")
    hasten.load(llama.path, FP32, threads=1).close()
    assert "and this is An old CPU: --strict, or hasten verify, proves it here" in caplog.text


# --- bench


def test_reading_and_writing_are_timed(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """For real; without the original, which is another ten seconds of starting PyTorch."""
    bundle = without_original(changed())
    words = ["bench", str(bundle.path), "-b", "1", "2", "2", "-s", "8", "--budget", "200ms", "--threads", "1", "-q"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for what, shapes in (("reading", [(1, 8)]), ("bench", [(2, 8), (1, 8)])):
        timed = {(t["variant"], t["shape"]["batch"], t["shape"]["sequence"]): t for t in found[what]["timings"]}
        assert set(timed) == {(name, *shape) for name in (FP32, INT8) for shape in shapes}
        assert all(timing["p50_ms"] > 0 for timing in timed.values())
        assert found[what]["baseline"] == FP32
    assert found["refused"][0]["reason"].endswith(f"is no longer there — compared with {FP32} instead")


def without_original(bundle: Bundle) -> Bundle:
    manifest = replace(bundle.manifest, model=replace(bundle.manifest.model, id="acme/gone")).sealed()
    (bundle.path / "manifest.json").write_bytes(manifest.to_json())
    return replace(bundle, manifest=manifest)


def test_the_original_takes_part_where_it_is_there(llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    with writer_bundles.timed_at_once():
        assert main(["bench", str(llama.path), "-b", "3", "-s", "5000", "--threads", "1", "-q"]) == 0
    printed = capsys.readouterr().out
    # Half of the context is for what is written. Every run takes a millisecond.
    assert "reading (batch × tokens), vs torch-fp32" in printed
    assert "writing (batch × tokens), vs torch-fp32" in printed
    reading, writing = (next(line for line in printed.splitlines() if shape in line) for shape in ("1×1024", "3×1024"))
    assert reading.split()[-1] == "1024000"
    assert writing.split()[-1] == "1000"
    assert main(["bench", str(llama.path), "-b", "65", "-q"]) == 2
    assert "at most 64 prompts are timed together" in capsys.readouterr().err


# --- inspect


def test_what_a_bundle_holds(llama: Bundle, t5: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(llama)
    assert [(view.name, view.graph, view.weights) for view in found.graphs] == [
        (entry.name, DECODER, entry.precision) for entry in llama.manifest.variants
    ]
    assert all(view.operators["GroupQueryAttention"] == 2 for view in found.graphs)
    # Two layers with keys and values of two heads, 16 wide, in four bytes.
    assert found.cache is not None
    assert (found.cache.bytes_per_token, found.cache.bytes_per_prompt_token) == (512, 0)
    assert found.cache.full_bytes == 512 * writer_bundles.CONTEXT
    assert main(["inspect", str(llama.path)]) == 0
    printed = capsys.readouterr().out
    assert "cache   0.5 kB a token, 1.0 MB a text of 2048" in printed
    assert "with a chat template" in printed
    assert f"{INT8} decoder" in printed
    other = inspect(t5)
    assert {(view.name, view.graph) for view in other.graphs} == {(FP32, ENCODER), (FP32, DECODER)}
    assert other.cache is not None
    assert other.cache.bytes_per_prompt_token == other.cache.bytes_per_token == 2 * 2 * 4 * 16 * 4
    assert [step.notes for step in other.passes] == [("the decoder",), ("the encoder",)]


def test_a_variant_is_loaded_to_see_what_it_executes(llama: Bundle, t5: Bundle) -> None:
    for bundle, name, operator in ((llama, INT8, "MatMulNBits"), (t5, FP32, "MatMul")):
        views = inspect(bundle, name).graphs
        (executed,) = [view.executed for view in views if view.executed]
        counted = sum(view.operators.get(operator, 0) for view in views)
        ran = sum(execution.count for execution in executed if execution.operator == operator)
        assert 0 < ran <= counted
        assert {execution.on for execution in executed} == {"CPUExecutionProvider"}


def test_without_the_onnx_package_the_record_tells(t5: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    with_onnx = {view.graph: view.operators for view in inspect(t5).graphs}
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    found = inspect(t5)
    assert {view.graph: view.operators for view in found.graphs} == with_onnx
    assert found.cache is None


def test_the_viewer_shows_the_decoder(llama: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    netron = pytest.importorskip("netron")
    shown: list[str] = []
    monkeypatch.setattr(netron, "start", lambda file, address: shown.append(file) or address)
    for variant in (None, INT8):
        show(llama, variant, 0)
    names = (llama.chosen.name, INT8)
    assert shown == [str(llama.path / "variants" / name / "decoder.onnx") for name in names]
