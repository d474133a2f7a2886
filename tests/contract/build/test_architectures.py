"""Every architecture of the support table answers like transformers, or fails for the reason in the table."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import architecture_support
import hasten
from hasten.core.errors import HastenError, UnsupportedError
from hasten.core.report import Pass
from hasten.core.system.hardware import Gpu, this_machine
from hasten.core.variant import Support
from hasten.tasks import TASKS
from support.models import tiny_encoders

TASK = "text-classification"
VARIANTS = ["onnxruntime-fp32", "openvino-fp32"]
LONG = " ".join(tiny_encoders.CORPUS)
INPUTS: list[Any] = [
    *tiny_encoders.CORPUS,
    "Ein Übergröße-Test, 42 €",
    LONG,
    {"text": "is this the right answer?", "text_pair": "prices rose by three percent"},
]

# Mostly copies of another architecture's code, and one that takes long to fail.
SLOW_ARCHITECTURES = (
    *("electra", "ernie", "megatron-bert", "rembert", "roformer", "squeezebert"),
    *("camembert", "data2vec-text", "ibert", "luke", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"),
    *("deberta", "eurobert", "gte", "jina_embeddings_v3", "longformer", "yoso"),
)

PipelineFactory = Callable[[Path], Any]


def mark_slow(architectures: Iterable[str]) -> list[Any]:
    """Mark copies of other architectures as slow, so that --slow selects them."""
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW_ARCHITECTURES else ()) for name in architectures]


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(architecture_support.FILE.read_bytes())


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A data file without text pairs."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in tiny_encoders.CORPUS), encoding="utf-8")
    return file


@pytest.fixture
def pipeline() -> PipelineFactory:
    def make(model: Path) -> Any:
        import transformers

        return transformers.pipeline(TASK, str(model), device="cpu")

    return make


def assert_same_answers(bundle: Any, original: Any) -> None:
    """Assert that every variant gives the pipeline's answers, and that answers differ between texts."""
    options = {"top_k": None, "function_to_apply": "none"}  # logits: probabilities of random models are zeros and ones
    expected = [original(item, truncation=True, **options) for item in INPUTS]
    for entry in bundle.manifest.variants:
        with hasten.load(bundle.path, entry.name, threads=1) as predictor:
            # In one batch, so that short texts are padded to long ones.
            for answer, expected_answer in zip(predictor(INPUTS, **options), expected, strict=True):
                scores = {label["label"]: label["score"] for label in answer}
                expected_scores = {label["label"]: label["score"] for label in expected_answer}
                assert scores == pytest.approx(expected_scores, abs=2e-3)
    assert np.std([answer[0]["score"] for answer in expected]) > 0.1


@pytest.mark.parametrize(
    "architecture", mark_slow((*tiny_encoders.ARCHITECTURES, *tiny_encoders.EMBEDDING_ARCHITECTURES))
)
def test_architecture_answers_like_the_pipeline(
    architecture: str, table: Any, tiny_model: Any, quick_build: Any, pipeline: PipelineFactory
) -> None:
    model = tiny_model(architecture, "ForSequenceClassification", id2label={0: "bad", 1: "fair", 2: "good"})
    entry = table["tasks"][TASK].get(architecture, {"results": dict.fromkeys(VARIANTS, architecture_support.YES)})
    reasons = entry["results"]
    if all(reasons[variant] == architecture_support.YES for variant in VARIANTS):
        assert_same_answers(quick_build(model, variants=VARIANTS, keep="all"), pipeline(model))
    else:
        with pytest.raises(HastenError) as error:
            quick_build(model, variants=VARIANTS)
        # Equal except for sizes, which differ in the table.
        assert _without_numbers(architecture_support.describe(error.value)) == _without_numbers(reasons[VARIANTS[0]])


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", reason)


# ---- vocabularies

# The file name, and the special tokens of published models.
SENTENCE_PIECE: dict[str, tuple[str, dict[str, Any]]] = {
    "xlm-roberta": ("sentencepiece.bpe.model", {}),
    "camembert": ("sentencepiece.bpe.model", {}),
    "albert": (
        "spiece.model",
        {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
    ),
    "xlnet": ("spiece.model", {"control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]}),
    "deberta-v2": (
        "spm.model",
        {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]"}
        | {"eos_piece": "[SEP]", "unk_piece": "[UNK]"},
    ),
}


@pytest.mark.parametrize("architecture", mark_slow(SENTENCE_PIECE))
def test_sentencepiece_file_suffices_as_vocabulary(
    architecture: str, tiny_model: Any, quick_build: Any, pipeline: PipelineFactory, tmp_path: Path
) -> None:
    """Older models are published without tokenizer.json; transformers creates one."""
    import sentencepiece

    model = shutil.copytree(tiny_model(architecture, "ForSequenceClassification", num_labels=3), tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tiny_encoders.POSITIONS}))
    name, special = SENTENCE_PIECE[architecture]
    trained = tmp_path / "trained"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_encoders.CORPUS * 4), model_prefix=str(trained), vocab_size=90,
        hard_vocab_limit=False, minloglevel=2, **special,
    )  # fmt: skip
    shutil.copy(trained.with_suffix(".model"), model / name)
    assert_same_answers(quick_build(model, variants=VARIANTS, keep="all"), pipeline(model))


def test_tokenizer_with_python_parts_is_rejected(tiny_model: Any, load_tiny: Any, tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    from hasten.builder.sources.tokenizer import save_tokenizer

    class PythonPreTokenizer:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, piece: piece.split(" ", "removed"))

    loaded = load_tiny(tiny_model("roformer", "ForSequenceClassification"))
    loaded.original_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(PythonPreTokenizer())
    with pytest.raises(UnsupportedError, match="parts written in Python"):
        save_tokenizer(loaded.original_tokenizer, tmp_path / "tokenizer.json")


# ---- differences between architectures


@pytest.mark.parametrize("architecture", ["convbert", "nystromformer", "yoso"])
def test_model_that_attends_to_padding_is_detected(architecture: str, tiny_model: Any, load_tiny: Any) -> None:
    loaded = load_tiny(tiny_model(architecture, "ForTokenClassification"))
    assert not loaded.signature.ignores_padding
    assert load_tiny(tiny_model("bert", "ForTokenClassification")).signature.ignores_padding


def test_left_padding_is_masked_on_the_left(tiny_model: Any, quick_build: Any, texts: Path, tmp_path: Path) -> None:
    """By default ONNX Runtime's fused attention turns the mask into a length, counted from the first position.

    RoBERTa derives positions from its tokens, so that padding before them changes nothing else.
    """
    import transformers

    model = shutil.copytree(tiny_model("roberta", "ForTokenClassification"), tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(model, padding_side="left").save_pretrained(model)
    bundle = quick_build(model, variants=VARIANTS, keep="all", data=texts)
    assert bundle.manifest.signature.pads_left
    assert bundle.manifest.signature.ignores_padding
    assert _fused_attention_count(bundle) == 2
    for name in VARIANTS:
        with hasten.load(bundle.path, name, threads=1) as predictor:
            together, alone = (
                predictor.outputs(predictor.encode(list(tiny_encoders.CORPUS)), groups=groups)["logits"]
                for groups in ([np.arange(8)], [np.array([row]) for row in range(8)])
            )
            # 1e-5 on x86-64 with AVX-512 (2026-11), for logits up to 5.
            np.testing.assert_allclose(together, alone, atol=3e-5)


def test_sparse_attention_can_be_configured_as_full(
    tiny_model: Any, quick_build: Any, pipeline: PipelineFactory
) -> None:
    config = {"num_labels": 3, "attention_type": "original_full"}
    model = tiny_model("big_bird", "ForSequenceClassification", **config)
    assert_same_answers(quick_build(model, variants=VARIANTS, keep="all"), pipeline(model))


def test_two_outputs_are_not_confused(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    """OpenVINO numbers the outputs of a node, not of the model: both had index zero."""
    rows = [{"question": "what sat?", "context": line} for line in tiny_encoders.CORPUS]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bundle = quick_build(tiny_model("bert", "ForQuestionAnswering"), variants=VARIANTS, keep="all", data=data)
    for name in VARIANTS:
        with hasten.load(bundle.path, name, threads=1) as predictor:
            outputs = predictor.outputs(predictor.encode(rows))
            assert not np.allclose(outputs["start_logits"], outputs["end_logits"], atol=0.1)


def test_positions_may_start_above_zero(tiny_model: Any, quick_build: Any, texts: Path) -> None:
    """YOSO's positions start at two, in a constant that ONNX Runtime's fusion assumes to start at zero."""
    quick_build(tiny_model("yoso", "ForTokenClassification"), variants=VARIANTS[:1], data=texts)


def test_farthest_tokens_are_in_the_last_position_bucket(tiny_model: Any, quick_build: Any) -> None:
    """At this length, ONNX Runtime's logarithm and PyTorch's differ in the last digit, and DeBERTa rounds up."""
    sizes = {"positions": 192, "tokenizer_max_length": 192}
    quick_build(tiny_model("deberta-v2", "ForSequenceClassification", **sizes), variants=VARIANTS)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_quantized_embeddings_keep_their_positions(architecture: str, tiny_model: Any, quick_build: Any) -> None:
    """ONNX Runtime's quantized embedding operator has no positions input, and RoBERTa's do not start at zero."""
    model = tiny_model(
        architecture,
        "ForSequenceClassification",
        num_labels=3,
        initializer_range=architecture_support.INITIALIZER_RANGE,
    )
    variants = ["onnxruntime-fp32", "onnxruntime-int8"]
    bundle = quick_build(model, variants=variants, keep="all", min_agreement=0.0)
    logits = []
    for name in variants:
        with hasten.load(bundle.path, name, threads=1) as predictor:
            logits.append(predictor.outputs(predictor.encode(list(tiny_encoders.CORPUS)))["logits"])
    assert np.linalg.norm(logits[0] - logits[1]) < 0.1 * np.linalg.norm(logits[0])


def test_first_layer_is_fused_like_the_others(tiny_model: Any, quick_build: Any) -> None:
    for architecture in ("albert", "megatron-bert"):
        model = tiny_model(architecture, "ForSequenceClassification", num_hidden_layers=3)
        assert _fused_attention_count(quick_build(model, variants=VARIANTS[:1])) == 3


def _fused_attention_count(bundle: Any) -> int:
    fuse: Pass = next(step for step in bundle.report.passes if step.name == "fuse")
    return fuse.operators_after.get("Attention", 0)


def test_unsupported_architecture_is_rejected_before_it_is_run(
    tiny_classifier: Any, no_leftovers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("NVIDIA H200", 2**37, "9.0", "580")
    monkeypatch.setattr("hasten.builder.preflight.this_machine", lambda: replace(this_machine(), gpus=(gpu,)))
    monkeypatch.setattr("hasten.backends.fused.probe_torch_gpu", lambda _: Support.yes())
    monkeypatch.setattr("hasten.builder.encoder_build.expect", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(UnsupportedError, match="fused backend does not support 'xlnet'") as caught:
        hasten.build(tiny_classifier("xlnet"), no_leftovers, variants=["fused-fp16@cuda"], threads=1)
    assert "roberta" in (caught.value.hint or "")


# ---- the table


def test_support_table_is_complete(table: Any) -> None:
    assert set(table["tasks"]) == set(TASKS.names())
    for entries in table["tasks"].values():
        assert list(entries) == list(tiny_encoders.ARCHITECTURES)
        for entry in entries.values():
            assert list(entry["results"]) == table["variants"]
            assert all(isinstance(reason, str) and reason.strip() for reason in entry["results"].values())
            assert not any("\n" in reason for reason in entry["results"].values())


def test_most_architectures_are_supported(table: Any) -> None:
    """A failed study must not be mistaken for a result."""
    classified = table["tasks"][TASK]
    working = [
        name for name, entry in classified.items() if set(entry["results"].values()) == {architecture_support.YES}
    ]
    assert len(working) >= 30
