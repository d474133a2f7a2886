"""A bundle fills masks like transformers' pipeline: every architecture, every field, every option."""

from __future__ import annotations

import json
import logging
import re
import shutil
import string
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hasten
from hasten.backends import BACKENDS, Dialect, RunOptions, Source
from hasten.core.errors import InputError, UnsupportedError
from hasten.core.variant import Variant
from support.int8 import recipe_here

SHARED = ("bert", "roberta", "distilbert", "electra")
# Other tokenizers and heads: Unigram, masks that include the space before them, shared layers.
OTHERS = ("albert", "mpnet", "modernbert", pytest.param("deberta-v2", marks=pytest.mark.slow))
# Like some heads of DeBERTa, this one reaches into the bare model, bypassing wrappers.
REACHING = "deberta-v2 without legacy"
ARCHITECTURES = (*SHARED, *OTHERS)
# {} stands for the mask.
TEXTS = [
    "the cat sat on the {}.",
    "{}",
    "{} cat",
    "a dog ran across the green {} after the red ball , again !",
    "what a{}wonderful film, I would{} watch it",
    "the {} is dull and the {} is worse",
    "{}{}{}",
    "don't {} can't it's \" {} ' s",
    "emoji 🐈 and {} 👩‍👩‍👧‍👦 family",
    "control\u0007 {} \u0000 null\ttab\nline",
    "cafe\u0301 nai\u0308ve {} Übergröße",
    "東京は{}です。서울 हिन्दी",
    "no\u00a0break {} \u200bzero\u200d width\ufeff",
    "special [CLS] {} [SEP] [PAD] <s> <pad> </s> [UNK] <unk>",
    "  spaces   around  {}   it  ",
    "U.S.A. {} 3.14, e-mail@example.org?",
    "##the {} Ġcat ▁dog",
]
LONG = "{} " + "the cat sat on the mat and a dog ran across the green field " * 12
# Includes characters unknown to the tokenizers, and joiners and separators.
parts = st.one_of(
    st.sampled_from(
        ["the", " cat", " dog ", "rain", ", ", ".", " ' ", "##x", "🐈", "é", "e\u0301", "東京", "\n", "\x07"]
    ),
    st.text(max_size=6).filter(lambda text: not re.search("[\ud800-\udfff]", text)),
)
# Masks come early, so that truncation removes only the end.
templates = st.tuples(
    st.lists(parts, max_size=2).map("".join),
    st.lists(parts, max_size=2).map("".join),
    st.integers(1, 3),
    st.lists(parts, max_size=60).map("".join),
).map(lambda drawn: drawn[0] + ("{}" + drawn[1]) * drawn[2] + drawn[3])


@dataclass
class Filler:
    predictor: hasten.Predictor
    pipeline: Any

    def text(self, template: str) -> str:
        return template.replace("{}", self.predictor.spec.mask_token)

    def assert_same(self, templates: list[str], **options: Any) -> int:
        """Compare the answers; return the number of compared tokens."""
        texts = [self.text(template) for template in templates]
        ours = self.predictor(texts, **options)
        truncation = {"tokenizer_kwargs": {"truncation": True}}
        # One by one: for a list of one, the pipeline unwraps the answer.
        return sum(
            compare(our, self.pipeline(text, **truncation, **options)) for our, text in zip(ours, texts, strict=True)
        )


def compare(ours: Any, theirs: Any) -> int:
    assert isinstance(ours, list)
    assert len(ours) == len(theirs)
    if isinstance(theirs[0], list):
        return sum(compare(our, their) for our, their in zip(ours, theirs, strict=True))
    for our, their in zip(ours, theirs, strict=True):
        assert list(our) == list(their)
        assert type(our["score"]) is float
        assert type(our["token"]) is int
        assert our["score"] == pytest.approx(their["score"], abs=1e-4)
        assert {**our, "score": 0} == {**their, "score": 0}
    return len(theirs)


@pytest.fixture(scope="module")
def fillers(
    tiny_model: Any, quick_build: Any, corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Filler]:
    """Return predictor and reference of an architecture, built once."""

    @cache
    def get(architecture: str) -> Filler:
        import transformers

        folder = tmp_path_factory.mktemp("models")
        if architecture in SHARED:
            model = tiny_model(architecture, "ForMaskedLM")
        else:
            model = save_other(architecture, corpus, folder / architecture)
        pipeline = transformers.pipeline("fill-mask", str(model), device="cpu")
        data = folder / "rows.jsonl"
        masked = [" ".join((pipeline.tokenizer.mask_token, *text.split()[1:])) for text in corpus]
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in masked), encoding="utf-8")
        bundle = quick_build(model, variants=["onnxruntime-fp32"], data=data)
        return Filler(hasten.load(bundle.path, threads=1), pipeline)

    return get


def save_other(architecture: str, corpus: tuple[str, ...], folder: Path) -> Path:
    """Save a seeded random model with the tokenizer type of its architecture."""
    import torch
    import transformers

    words = sorted({word for line in corpus for word in re.findall(r"\w+", line.lower())})
    letters = [*string.ascii_letters, *string.digits, *".,?!:'"]
    unigrams = [*((f"▁{word}", -2.0 - index % 7) for index, word in enumerate(words)), *((x, -9.0) for x in letters)]
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    tokenizer: Any
    if architecture == "albert":
        special = [(name, 0.0) for name in ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")]
        # As in files of older versions, whose decoding removes spaces.
        tidied = {"clean_up_tokenization_spaces": True}
        tokenizer = transformers.AlbertTokenizer(vocab=[*special, *unigrams], model_max_length=64, **tidied)
        prefix, more = "Albert", {"embedding_size": 16}
    elif architecture == "mpnet":
        pieces = [*letters, *(f"##{letter}" for letter in letters), *(word for word in words if len(word) > 1)]
        names = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", *pieces]
        tokenizer = transformers.MPNetTokenizer(vocab={x: i for i, x in enumerate(names)}, model_max_length=64)
        prefix, more = "MPNet", {"max_position_embeddings": 66}
    elif architecture == "modernbert":
        tokenizer, prefix = byte_level(corpus), "ModernBert"
        # A vocabulary larger than the tokenizer's, as in published models.
        more = {"vocab_size": len(tokenizer) + 5, "local_attention": 16}
        more |= {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    else:
        special = [(name, 0.0) for name in ("[PAD]", "[CLS]", "[SEP]", "[UNK]")]
        tokenizer = transformers.DebertaV2Tokenizer(vocab=[*special, *unigrams, ("[MASK]", 0.0)], model_max_length=64)
        prefix, more = "DebertaV2", {"legacy": architecture == "deberta-v2", "relative_attention": True}
        more |= {"position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}
        more |= {"share_att_key": True, "position_biased_input": False, "type_vocab_size": 0}
    config_values = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.5}
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # DeBERTa's code, on import
        config = getattr(transformers, f"{prefix}Config")(**(sizes | config_values | more))
        getattr(transformers, f"{prefix}ForMaskedLM")(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_level(corpus: tuple[str, ...]) -> Any:
    import tokenizers
    import transformers

    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token=transformers.AddedToken("[MASK]", lstrip=True),
        model_max_length=64,
        # As in the published one, although transformers ignores it for BPE.
        clean_up_tokenization_spaces=True,
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fills_like_the_pipeline(fillers: Any, architecture: str) -> None:
    filler = fillers(architecture)
    assert filler.assert_same(TEXTS) > 5 * len(TEXTS)
    filler.assert_same(TEXTS, top_k=1)
    filler.assert_same(TEXTS[:3], top_k=40)


@pytest.mark.parametrize("architecture", SHARED)
def test_generated_texts_are_filled_like_the_pipeline(fillers: Any, architecture: str) -> None:
    filler = fillers(architecture)
    compared = 0

    @settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(templates, min_size=8, max_size=8, unique=True))
    def check(drawn: list[str]) -> None:
        nonlocal compared
        compared += filler.assert_same(drawn)

    check()
    assert compared >= 5 * 8 * 8


@pytest.mark.parametrize(
    "targets",
    ["cat", ["cat", "dog", "cat"], ["[UNK]", "##x", "Ġcat"], ["the cat sat", "rain", "Zürich"], ["\n", "mat"]],
)
@pytest.mark.parametrize("architecture", ["bert", "roberta", "albert"])
def test_targets_are_handled_like_the_pipeline(
    fillers: Any, architecture: str, targets: Any, caplog: pytest.LogCaptureFixture
) -> None:
    filler = fillers(architecture)
    with caplog.at_level(logging.WARNING):
        filler.assert_same(TEXTS[:6], targets=targets)
        filler.assert_same(TEXTS[:2], targets=targets, top_k=1)
    names = [record.name for record in caplog.records]
    assert ("hasten" in names) == any("transformers" in name for name in names)


def test_target_that_is_not_a_token_is_logged(fillers: Any, caplog: pytest.LogCaptureFixture) -> None:
    filler = fillers("bert")
    with caplog.at_level(logging.WARNING, "hasten"):
        answer = filler.predictor(filler.text("a {}"), targets=["cats", "\u200b", "dog"])
    assert {filled["token_str"] for filled in answer} == {"cat", "dog"}
    assert "'cats' is not a token of the model: using its first piece 'cat'" in caplog.text
    assert "'\\u200b' is skipped: the tokenizer returns no tokens for it" in caplog.text


@pytest.mark.parametrize("architecture", SHARED)
def test_answer_has_the_shape_of_the_payload(fillers: Any, architecture: str) -> None:
    filler = fillers(architecture)
    single, double = filler.text("the {} sat"), filler.text("the {} sat on {}")
    for text in (single, double):
        alone = filler.predictor(text)
        assert compare(alone, filler.pipeline(text)) >= 5
        assert filler.predictor([text]) == [alone]
        assert filler.predictor({"text": text, "id": 7}) == alone
    ours = filler.predictor([single, double, {"text": single}])
    for our, their in zip(ours, filler.pipeline([single, double, single]), strict=True):
        compare(our, their)


@pytest.mark.parametrize("architecture", SHARED)
def test_long_text_is_truncated(fillers: Any, architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    filler = fillers(architecture)
    with caplog.at_level(logging.WARNING, "hasten"):
        assert filler.assert_same(["a {}", LONG]) == 10
    assert "text 2 was truncated to the model's limit of 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("no mask at all", r"text 1 has no mask \(write \[MASK\] where"),
        (["a [MASK]", "not <mask> nor [mask]"], "text 2 has no mask"),
        (["a [MASK]", "cat " * 100 + "[MASK]"], "text 2 has a mask beyond the model's limit of 64 tokens"),
        ("[MASK] " + "cat " * 100 + "[MASK]", "text 1 has a mask beyond"),
        ([], "empty"),
        ("", "empty"),
        (["[MASK]", " \n"], "text 2 is empty"),
        ("[MASK] \ud800", "lone surrogate"),
        ({"text": "[MASK]", "text_pair": "b"}, "item 1 has a"),
        ([["[MASK]"]], "list, not a string"),
        (None, "NoneType"),
    ],
)
def test_text_without_mask_raises_input_error(fillers: Any, payload: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fillers("bert").predictor(payload)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": "two"},
        {"targets": []},
        {"targets": ["", "\u200b"]},
        {"targets": [3]},
        {"targets": ["\udc00"]},
        {"tokenizer_kwargs": {}},
    ],
)
def test_invalid_option_raises_input_error(fillers: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        fillers("bert").predictor("[MASK]", **options)


def test_top_k_is_bounded_by_the_vocabulary(fillers: Any) -> None:
    answer = fillers("bert").predictor("the [MASK]", top_k=10**6)
    assert (
        len({filled["token"] for filled in answer}) == len(answer) == fillers("bert").pipeline.model.config.vocab_size
    )
    assert sum(filled["score"] for filled in answer) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "name",
    [
        "onnxruntime-fp32",
        "onnxruntime-int8",
        "openvino-fp32",
        "torch-fp32",
        pytest.param("inductor-fp32", marks=(pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit"))),
    ],
)
@pytest.mark.parametrize("architecture", ["bert", "mpnet"])
def test_every_backend_returns_logits_of_masks_only(
    fillers: Any, load_tiny: Any, make_graphs: Any, tmp_path: Path, architecture: str, name: str
) -> None:
    """A batch without masks returns no rows and is not an error in any runtime."""
    from hasten.quantize.methods.dynamic import quantize_dynamic

    if (architecture, name) == ("mpnet", "inductor-fp32"):
        pytest.skip("a second compilation takes another minute")
    filler, variant = fillers(architecture), Variant.parse(name)
    loaded = load_tiny(Path(filler.pipeline.model.name_or_path))
    backend = BACKENDS.get(variant.backend)
    source = Source(loaded.signature, {}, loaded.module)
    if backend.dialect is not Dialect.MODULE:
        graph = make_graphs(loaded, tmp_path)[backend.dialect]
        if variant.precision.is_reduced:
            recipe = recipe_here("onnxruntime-int8", attention=True)
            quantize_dynamic(graph, graph.with_name("int8.onnx"), recipe, external_data=False)
            graph = graph.with_name("int8.onnx")
        source = Source(loaded.signature, {"model": graph})
    (tmp_path / "out").mkdir()
    texts = [filler.text(text) for text in ("the {} sat", "{} cat {} {} on the mat and the rain", "a {}")]
    batch = filler.predictor.encode(texts).batch
    expected = filler.predictor.session.run(batch)["logits"]
    with backend.open(backend.make(source, variant, tmp_path / "out"), RunOptions(1)) as session:
        ours = session.run(batch)["logits"]
        assert ours.shape == expected.shape == (5, loaded.config.vocab_size)
        tolerance = 0.3 * np.abs(expected).max() if variant.precision.is_reduced else 1e-3
        np.testing.assert_allclose(ours, expected, atol=tolerance)
        without = filler.predictor.tokenizer.encode(["the cat", "a dog ran"]).batch
        assert session.run(without)["logits"].shape == (0, loaded.config.vocab_size)
        both = filler.predictor.tokenizer.encode(["the cat", texts[0]]).batch
        assert session.run(both)["logits"].shape == (1, loaded.config.vocab_size)


def test_head_that_reads_the_bare_model_is_exported_correctly(
    load_tiny: Any, corpus: tuple[str, ...], tmp_path: Path
) -> None:
    import torch
    import transformers

    model = save_other(REACHING, corpus, tmp_path / "model")
    loaded = load_tiny(model)
    whole = transformers.AutoModelForMaskedLM.from_pretrained(model).eval()
    ids = torch.tensor([[1, 9, loaded.signature.mask_id, 12, 2], [1, loaded.signature.mask_id, 2, 0, 0]])
    feeds = {"input_ids": ids, "attention_mask": (ids != 0).int()}
    with torch.inference_mode():
        (ours,), theirs = loaded.module(**feeds), whole(**feeds).logits
    torch.testing.assert_close(ours, theirs[ids == loaded.signature.mask_id])


def test_head_that_mixes_tokens_is_rejected(tiny_model: Any, monkeypatch: pytest.MonkeyPatch, load_tiny: Any) -> None:
    """Its logits computed for masks only would differ from those of the model."""
    import transformers

    head = transformers.models.bert.modeling_bert.BertOnlyMLMHead
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda self, states: forward(self, states.cumsum(dim=1)))
    with pytest.raises(UnsupportedError, match="does not take each token by itself"):
        load_tiny(tiny_model("bert", "ForMaskedLM"))


def test_embedder_with_the_class_of_its_pretraining_is_detected(
    tiny_embedder: Any, load_tiny: Any, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_embedder(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert load_tiny(model).task.name == "sentence-similarity"


def test_bundle_is_scored_on_labelled_masks(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    from hasten.core.progress import SilentProgress
    from hasten.measure.verify_bundle import verify_bundle

    rows = [
        {"text": "the [MASK] sat", "label": "cat"},
        {"text": "a [MASK] ran after [MASK]", "label": ["dog", "rain"]},
        {"text": "[MASK]", "label": "no token of the model"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    variants = ["onnxruntime-fp32", "openvino-fp32"]
    bundle = quick_build(tiny_model("bert", "ForMaskedLM"), variants=variants, data=file, keep="all")
    candidates = verify_bundle(bundle, rows, bundle.manifest.gate, (), 1, SilentProgress())
    assert len(candidates) == 3
    for candidate in candidates:
        assert candidate.verdict is not None
        assert candidate.verdict.passed
        assert candidate.verdict.agreement.rows == 4
        assert candidate.verdict.metric is not None
        assert candidate.verdict.metric.name == "accuracy"
        assert candidate.verdict.metric == candidate.verdict.reference_metric


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_bundle_is_built_on_the_built_in_sample(fillers: Any, quick_build: Any, architecture: str) -> None:
    """No mask is truncated at a limit of 64 tokens, even if every byte is a token."""
    model = fillers(architecture).pipeline.model.name_or_path
    bundle = quick_build(model, variants=["onnxruntime-fp32"], data=None)
    assert 120 <= bundle.chosen.agreement.rows <= 150
    assert bundle.chosen.agreement.value == 1.0


@pytest.mark.parametrize(
    "text",
    ["a . b , c ! d ?", "I do n't , we 've", "it 's ' so ' they 're , I 'm", " . . ' ' n't", "a .b 'sun 'm", "plain"],
)
def test_spaces_are_removed_as_in_transformers(text: str) -> None:
    """Compare with transformers' function, on text that is encoded letter by letter."""
    import transformers
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models

    from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec

    letters = sorted(set(text))
    backend = FastTokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    ids = [letters.index(letter) for letter in text]
    tidy = Tokenizer(backend, TokenizerSpec(("input_ids",), 16, tidies_spaces=True)).decode(ids)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    assert tidy == theirs.decode(ids)
    assert Tokenizer(backend, TokenizerSpec(("input_ids",), 16)).decode(ids) == text
