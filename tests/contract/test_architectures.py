"""Every architecture of the support table: it answers like transformers, or fails for the reason the table gives."""

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

import hasten
import support
import tiny
from hasten.core.errors import HastenError, UnsupportedError
from hasten.core.hardware import Gpu, this_machine
from hasten.core.report import Pass
from hasten.core.variant import Support
from hasten.tasks import TASKS

TASK = "text-classification"
VARIANTS = ["onnxruntime-fp32", "openvino-fp32"]
LONG = " ".join(tiny.CORPUS)
ASKED: list[Any] = [
    *tiny.CORPUS,
    "Ein Übergröße-Test, 42 €",
    LONG,
    {"text": "is this the right answer?", "text_pair": "prices rose by three percent"},
]

# Mostly another's code under a name of their own, and one that takes long to fail.
COPIES = (
    *("electra", "ernie", "megatron-bert", "rembert", "roformer", "squeezebert"),
    *("camembert", "data2vec-text", "ibert", "luke", "roberta-prelayernorm", "xlm-roberta-xl", "xmod"),
    *("deberta", "eurobert", "gte", "jina_embeddings_v3", "longformer", "yoso"),
)

Pipelines = Callable[[Path], Any]


def in_kinds(architectures: Iterable[str]) -> list[Any]:
    """One of each kind at once, the others with --slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in COPIES else ()) for name in architectures]


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(support.FILE.read_bytes())


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A data file without pairs."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in tiny.CORPUS), encoding="utf-8")
    return file


@pytest.fixture
def pipeline() -> Pipelines:
    def make(model: Path) -> Any:
        import transformers

        return transformers.pipeline(TASK, str(model), device="cpu")

    return make


def assert_alike(bundle: Any, original: Any) -> None:
    """Every variant gives the pipeline's answers, and gives different texts different ones."""
    how = {"top_k": None, "function_to_apply": "none"}  # logits: probabilities of random models are zeros and ones
    theirs = [original(asked, truncation=True, **how) for asked in ASKED]
    for entry in bundle.manifest.variants:
        with hasten.load(bundle.path, entry.name, threads=1) as predictor:
            # Together, so that short texts run beside long ones and padding has its chance.
            for ours, answer in zip(predictor(ASKED, **how), theirs, strict=True):
                found = {label["label"]: label["score"] for label in ours}
                assert found == pytest.approx({label["label"]: label["score"] for label in answer}, abs=2e-3)
    assert np.std([answer[0]["score"] for answer in theirs]) > 0.1


@pytest.mark.parametrize("architecture", in_kinds(tiny.ARCHITECTURES))
def test_answers_like_the_pipeline(
    architecture: str, table: Any, tiny_model: Any, quick_build: Any, pipeline: Pipelines
) -> None:
    model = tiny_model(architecture, "ForSequenceClassification", id2label={0: "bad", 1: "fair", 2: "good"})
    reasons = table["tasks"][TASK][architecture]["results"]
    if all(reasons[variant] == support.YES for variant in VARIANTS):
        assert_alike(quick_build(model, variants=VARIANTS, keep="all"), pipeline(model))
    else:
        with pytest.raises(HastenError) as error:
            quick_build(model, variants=VARIANTS)
        # The same but for sizes, which are others there.
        assert _words(support.shown(error.value)) == _words(reasons[VARIANTS[0]])


def _words(reason: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", reason)


# ---- vocabularies

# The file's name, and the special tokens that published ones were trained with.
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


@pytest.mark.parametrize("architecture", in_kinds(SENTENCE_PIECE))
def test_a_sentencepiece_file_is_vocabulary_enough(
    architecture: str, tiny_model: Any, quick_build: Any, pipeline: Pipelines, tmp_path: Path
) -> None:
    """As older models are published: no tokenizer.json, transformers makes one."""
    import sentencepiece

    model = shutil.copytree(tiny_model(architecture, "ForSequenceClassification", num_labels=3), tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tiny.POSITIONS}))
    name, special = SENTENCE_PIECE[architecture]
    trained = tmp_path / "trained"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny.CORPUS * 4), model_prefix=str(trained), vocab_size=90, hard_vocab_limit=False,
        minloglevel=2, **special,
    )  # fmt: skip
    shutil.copy(trained.with_suffix(".model"), model / name)
    assert_alike(quick_build(model, variants=VARIANTS, keep="all"), pipeline(model))


def test_a_tokenizer_with_parts_in_python_is_refused(tiny_model: Any, load_tiny: Any, tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    from hasten.builder.tokenizer import save_tokenizer

    class Words:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, piece: piece.split(" ", "removed"))

    loaded = load_tiny(tiny_model("roformer", "ForSequenceClassification"))
    loaded.original_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Words())
    with pytest.raises(UnsupportedError, match="parts written in Python"):
        save_tokenizer(loaded, tmp_path / "tokenizer.json")


# ---- what is not the same in all of them


@pytest.mark.parametrize("architecture", ["convbert", "nystromformer", "yoso"])
def test_padding_that_a_model_sees_is_kept_from_it(architecture: str, tiny_model: Any, load_tiny: Any) -> None:
    loaded = load_tiny(tiny_model(architecture, "ForTokenClassification"))
    assert not loaded.signature.ignores_padding
    assert load_tiny(tiny_model("bert", "ForTokenClassification")).signature.ignores_padding


def test_padding_on_the_left_is_masked_on_the_left(
    tiny_model: Any, quick_build: Any, texts: Path, tmp_path: Path
) -> None:
    """ONNX Runtime's fused attention takes the mask as a length by default, counted from the first position.

    RoBERTa's positions follow its tokens, so that padding before them changes nothing else.
    """
    import transformers

    model = shutil.copytree(tiny_model("roberta", "ForTokenClassification"), tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(model, padding_side="left").save_pretrained(model)
    bundle = quick_build(model, variants=VARIANTS, keep="all", data=texts)
    assert bundle.manifest.signature.pads_left
    assert bundle.manifest.signature.ignores_padding
    assert _fused(bundle) == 2
    for name in VARIANTS:
        with hasten.load(bundle.path, name, threads=1) as predictor:
            together, alone = (
                predictor.outputs(predictor.encode(list(tiny.CORPUS)), groups=groups)["logits"]
                for groups in ([np.arange(8)], [np.array([row]) for row in range(8)])
            )
            np.testing.assert_allclose(together, alone, atol=1e-4)


def test_sparse_attention_can_be_made_full(tiny_model: Any, quick_build: Any, pipeline: Pipelines) -> None:
    about = {"num_labels": 3, "attention_type": "original_full"}
    model = tiny_model("big_bird", "ForSequenceClassification", **about)
    assert_alike(quick_build(model, variants=VARIANTS, keep="all"), pipeline(model))


def test_two_outputs_stay_apart(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    """OpenVINO numbers the outputs of a node, not of the model: both were the first."""
    rows = [{"question": "what sat?", "context": line} for line in tiny.CORPUS]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bundle = quick_build(tiny_model("bert", "ForQuestionAnswering"), variants=VARIANTS, keep="all", data=data)
    for name in VARIANTS:
        with hasten.load(bundle.path, name, threads=1) as predictor:
            outputs = predictor.outputs(predictor.encode(rows))
            assert not np.allclose(outputs["start_logits"], outputs["end_logits"], atol=0.1)


def test_positions_may_start_elsewhere(tiny_model: Any, quick_build: Any, texts: Path) -> None:
    """YOSO's start at two, in a constant that ONNX Runtime's fusion takes for one that starts at zero."""
    quick_build(tiny_model("yoso", "ForTokenClassification"), variants=VARIANTS[:1], data=texts)


def test_the_farthest_tokens_are_in_the_last_bucket(tiny_model: Any, quick_build: Any) -> None:
    """A length at which ONNX Runtime's logarithm and PyTorch's differ in the last digit, and DeBERTa rounds up."""
    sizes = {"positions": 192, "tokenizer_max_length": 192}
    quick_build(tiny_model("deberta-v2", "ForSequenceClassification", **sizes), variants=VARIANTS)


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_quantized_embeddings_keep_their_positions(architecture: str, tiny_model: Any, quick_build: Any) -> None:
    """ONNX Runtime's quantized embedding operator takes no positions, and RoBERTa's do not start at zero."""
    model = tiny_model(architecture, "ForSequenceClassification", num_labels=3, initializer_range=support.CALM)
    variants = ["onnxruntime-fp32", "onnxruntime-int8"]
    bundle = quick_build(model, variants=variants, keep="all", min_agreement=0.0)
    found = []
    for name in variants:
        with hasten.load(bundle.path, name, threads=1) as predictor:
            found.append(predictor.outputs(predictor.encode(list(tiny.CORPUS)))["logits"])
    assert np.linalg.norm(found[0] - found[1]) < 0.1 * np.linalg.norm(found[0])


def test_the_first_layer_is_fused_like_the_others(tiny_model: Any, quick_build: Any) -> None:
    for architecture in ("albert", "megatron-bert"):
        model = tiny_model(architecture, "ForSequenceClassification", num_hidden_layers=3)
        assert _fused(quick_build(model, variants=VARIANTS[:1])) == 3


def _fused(bundle: Any) -> int:
    done: Pass = next(done for done in bundle.report.passes if done.name == "fuse")
    return done.operators_after.get("Attention", 0)


def test_what_a_backend_is_not_made_from_is_refused_before_it_is_run(
    tiny_classifier: Any, no_leftovers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu("NVIDIA H200", 2**37, "9.0", "580")
    monkeypatch.setattr("hasten.builder.outline.this_machine", lambda: replace(this_machine(), gpus=(gpu,)))
    monkeypatch.setattr("hasten.backends.fused.probe_torch_gpu", lambda _: Support.yes())
    monkeypatch.setattr("hasten.builder.build.expect", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(UnsupportedError, match="'xlnet' is no architecture of the fused backend") as caught:
        hasten.build(tiny_classifier("xlnet"), no_leftovers, variants=["fused-fp16@cuda"], threads=1)
    assert "roberta" in (caught.value.hint or "")


# ---- the table


def test_the_table_is_whole(table: Any) -> None:
    assert set(table["tasks"]) == set(TASKS.names())
    for entries in table["tasks"].values():
        assert list(entries) == list(tiny.ARCHITECTURES)
        for entry in entries.values():
            assert list(entry["results"]) == table["variants"]
            assert all(isinstance(reason, str) and reason.strip() for reason in entry["results"].values())
            assert not any("\n" in reason for reason in entry["results"].values())


def test_most_of_the_table_says_yes(table: Any) -> None:
    """So that a study gone wrong is not taken for a finding."""
    classified = table["tasks"][TASK]
    working = [name for name, entry in classified.items() if set(entry["results"].values()) == {support.YES}]
    assert len(working) >= 30
