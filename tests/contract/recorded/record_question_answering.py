"""Records what transformers 4.57's question-answering pipeline answers: transformers 5 has none to compare with.

    python -m venv /tmp/tf457
    /tmp/tf457/bin/pip install transformers==4.57.6 torch hypothesis
    /tmp/tf457/bin/python tests/contract/recorded/record_question_answering.py
    /tmp/tf457/bin/python tests/contract/recorded/record_question_answering.py MODEL xquad_en.jsonl

The first writes question_answering.json, of tiny models; they are made here from numbers that are the same
everywhere, so that tests make the same ones with whatever transformers they have (`save_model`). The second writes
question_answering_xquad.json, of a real model on rows of real data, which are named by number.
"""

from __future__ import annotations

import json
import re
import string
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
POSITIONS = 64
GENERATED = 240

CORPUS = (
    "Ada Lovelace wrote the first program in London in 1843, and nobody could run it.",
    "The bridge was opened on 3 May 1932 by the mayor; it is 503 metres long and painted grey.",
    "A cat sat on the mat, a dog ran across the green field, and the rain fell on both.",
    "Prices rose by 3.5 percent in the second quarter, which was more than anybody had expected.",
    "She reads old books about ships and the sea, he never reads but listens to the radio.",
)
QUESTIONS = (
    "Who wrote the first program?",
    "When was the bridge opened?",
    "where did the cat sit",
    "How much did prices rise in the second quarter?",
    "Why?",
    "What does she read, and what does he do?",
)
# What tokenizers and offsets stumble over.
ODD = (
    "x",
    "Berlin",
    "...",
    "1843",
    "the The THE the, The. the",
    "Berlin berlin BERLIN Berlin",
    "  spaces   in    front and   between  and behind   ",
    "tabs\tand\nnew lines\r\nand\n\nblank ones",
    "no\u00a0break\u2003em\u2009thin\u3000wide spaces",
    "zero\u200bwidth\u200djoined\ufeffmarks",
    "control\u0007 and \u0000 null",
    "\u0000\u0007",
    "Ein Übergröße-Test für Zürich, 42 €",
    "café naïve façade — cafe\u0301 nai\u0308ve fac\u0327ade",
    "Ångström İstanbul ıssız straße ﬁne ﬂat",
    "東京は日本の首都です。京都ではありません。",
    "서울은 한국의 수도이다",
    "مرحبا بالعالم שלום עולם",
    "हिन्दी में एक वाक्य",
    "the cat 🐈 sat on 🐈🐈 the mat 🙂 in 1843",
    "👩‍👩‍👧‍👦 family and 🇩🇪 flag and 👍🏽 tone",
    "curly “quotes” and ‘these’ … and – dashes —",
    "averyveryverylongwordthatnoneofthevocabularieswillknowasawhole",
    "q" * 120,
    "[CLS] the [MASK] cat [SEP] and [UNK] or[UNK]or [PAD]",
    "<s> the <mask> cat </s> and <unk> or<unk>or <pad>",
    "##the ##cat Ġthe ▁cat",
    "U.S.A. and the U.K., at 3.14 p.m., don't, e-books",
    " ".join(CORPUS * 3),
    " ".join(reversed(CORPUS * 2)),
    "東京は日本の首都です。" * 12,
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3},
    {"handle_impossible_answer": True},
    {"align_to_words": False},
    {"top_k": 5, "handle_impossible_answer": True, "max_answer_len": 4},
    {"top_k": 2, "align_to_words": False, "max_answer_len": 30},
    {"max_seq_len": 40, "doc_stride": 8},
    {"max_seq_len": 48, "doc_stride": 0, "top_k": 4, "handle_impossible_answer": True},
    {"max_answer_len": 1, "top_k": 3, "align_to_words": False},
    {"top_k": 50, "max_answer_len": 100},
)

REAL_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 3, "max_answer_len": 30},
    {"handle_impossible_answer": True},
    {"align_to_words": False, "top_k": 5},
    {"max_seq_len": 96, "doc_stride": 32, "top_k": 2, "handle_impossible_answer": True},
    {"max_seq_len": 512, "doc_stride": 0, "max_answer_len": 5},
)

# By name: the architecture, what its tokenizer's configuration says beyond the usual.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {}),
    "bert that cuts on the left": ("bert", {"truncation_side": "left"}),
    "bert that pads on the left": ("bert", {"padding_side": "left"}),
}


def save_model(name: str, folder: Path) -> None:
    """Return a tiny model and its tokenizer; nothing in them is trained or drawn, so that versions cannot differ."""
    import torch
    import transformers

    architecture, fields = MODELS[name]
    tokenizer = {"bert": _word_pieces, "roberta": _bytes, "xlm-roberta": _unigrams}[architecture]()
    reserved = 0 if architecture == "bert" else 2
    special = (
        ("[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]") if reserved == 0 else ("<s>", "</s>", "<pad>", "<unk>", "<mask>")
    )
    prefix = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}[architecture]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=tokenizer.get_vocab_size(),
        pad_token_id=tokenizer.token_to_id(special[2]),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=POSITIONS + reserved,
        type_vocab_size=1 if reserved else 2,
    )
    model = getattr(transformers, f"{prefix}ForQuestionAnswering")(config).eval()
    numbers = np.random.RandomState(7)  # the one generator whose numbers NumPy promises never to change
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            # Wide, so that different texts get clearly different answers.
            drawn = numbers.standard_normal(parameter.shape) * (1.0 if parameter_name.startswith("qa_outputs") else 0.3)
            is_scale = parameter_name.endswith("LayerNorm.weight")
            parameter.copy_(torch.from_numpy(np.abs(1 + drawn) if is_scale else drawn))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": f"{prefix}Tokenizer",
        "model_max_length": POSITIONS,
        **dict(zip(("cls_token", "sep_token", "pad_token", "unk_token", "mask_token"), special, strict=True)),
        **({"bos_token": "<s>", "eos_token": "</s>"} if reserved else {"do_lower_case": True}),
        **fields,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _words() -> list[str]:
    return sorted({word for line in (*CORPUS, *QUESTIONS) for word in re.findall(r"[a-z]{2,}", line.lower())})


def _word_pieces() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = sorted({*string.ascii_lowercase, *string.digits, *".,?!:;-'"})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    pieces += [f"##{letter}" for letter in (*string.ascii_lowercase, *string.digits)] + _words() + ["東", "京", "日"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in _words():
        for end in range(1, len(word) + 1):
            left, right = f"Ġ{word}"[:end], f"Ġ{word}"[end]
            if left + right not in pieces:
                pieces.append(left + right)
                merges.append((left, right))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    return tokenizer


def _unigrams() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted({*string.ascii_letters, *string.digits, *".,?!:;-'", *"éüß東京日"})
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(letter, -6.0) for letter in letters] + [(f"▁{word}", -5.0) for word in _words()]
    pieces += [(word, -5.5) for word in _words()[::3]] + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 3, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def inputs() -> list[tuple[str, str]]:
    """Return questions and contexts: odd ones, and many random ones."""
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st

    words = st.sampled_from([word for line in CORPUS for word in line.split()])
    odd = st.sampled_from(
        [
            "🐈",
            "👩‍👩‍👧‍👦",
            "e\u0301",
            "İ",
            "ﬁ",
            "東京",
            "서울",
            "\u0000",
            "\u200d",
            "\t",
            "\n",
            "[CLS]",
            "<s>",
            "½",
            "—",
        ]
    )
    pieces = words | words | odd
    sentences = st.lists(pieces, min_size=1, max_size=40).map(" ".join)
    # The second kind is longer than a window of 64 tokens.
    several = st.lists(pieces, min_size=70, max_size=120).map(" ".join)
    texts = (sentences | several | st.text(max_size=80)).filter(str.strip)
    questions = (
        st.sampled_from(QUESTIONS) | st.text(max_size=20) | st.lists(words | odd, max_size=8).map(" ".join)
    ).filter(str.strip)
    drawn: dict[tuple[str, str], None] = {}

    @seed(2026)
    @settings(max_examples=3 * GENERATED, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(questions, texts)
    def draw(question: str, context: str) -> None:
        drawn[question, context] = None

    draw()
    plain = [(question, context) for question in QUESTIONS for context in CORPUS]
    odd_inputs = [(QUESTIONS[index % len(QUESTIONS)], context) for index, context in enumerate(ODD)]
    requests = [(question, CORPUS[0]) for question in ODD[:-3] if len(question) < 100]
    return [*plain, *odd_inputs, *requests, *list(drawn)[-GENERATED:]]


def ask(pipeline: Any, question: str, context: str, options: dict[str, Any]) -> Any:
    """Return the answer, [score, start, end] each, a list of those for a list; None where the pipeline fails."""
    try:
        answer = pipeline(question=question, context=context, **options)
    except BaseException as error:  # what fails in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return None
    for span in answer if isinstance(answer, list) else [answer]:
        assert span["answer"] == context[span["start"] : span["end"]]
    return [_brief(span) for span in answer] if isinstance(answer, list) else _brief(answer)


def _brief(span: dict[str, Any]) -> list[Any]:
    return [float(f"{span['score']:.7g}"), span["start"], span["end"]]


def squad_scores(count: int) -> list[list[Any]]:
    """Answer, right answer, exact match and F1, as transformers' copy of the official script has them."""
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

    words = [
        "the",
        "The",
        "a",
        "an",
        "bridge",
        "Bridge,",
        "1932",
        "3.5",
        "U.S.",
        "(grey)",
        "“grey”",
        "Zürich",
        "ﬁne",
        "-",
    ]
    numbers = np.random.RandomState(11)
    texts = [" ".join(numbers.choice(words, size=numbers.randint(0, 4))) for _ in range(2 * count)]
    return [
        [ours, right, float(compute_exact(right, ours)), float(compute_f1(right, ours))]
        for ours, right in zip(texts[::2], texts[1::2], strict=True)
    ]


def record_tiny() -> tuple[Path, dict[str, Any]]:
    import tempfile

    import transformers

    requests = inputs()
    answers: dict[str, Any] = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            save_model(name, Path(folder))
            pipeline = transformers.pipeline("question-answering", folder, device="cpu")
        shift = len(answers)  # so that over the models an input meets more of the options
        answers[name] = [
            [index, option_index, ask(pipeline, *requests[index], OPTIONS[option_index])]
            for index in range(len(requests))
            for option_index in ((index + shift) % len(OPTIONS), (index * 3 + shift + 5) % len(OPTIONS))
        ]
    fields = {"options": OPTIONS, "inputs": requests, "answers": answers, "squad": squad_scores(300)}
    return HERE / "question_answering.json", fields


def record_real(model: str, data: str) -> tuple[Path, dict[str, Any]]:
    """Return every 13th row, and those with the longest contexts."""
    import transformers

    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").split("\n") if line]
    longest = sorted(range(len(rows)), key=lambda index: -len(rows[index]["context"]))[:12]
    pipeline = transformers.pipeline("question-answering", model, device="cpu")
    answers = [
        [
            index,
            option_index,
            ask(pipeline, rows[index]["question"], rows[index]["context"], REAL_OPTIONS[option_index]),
        ]
        for number, index in enumerate(sorted({*range(0, len(rows), 13), *longest}))
        for option_index in (number % len(REAL_OPTIONS), (number + 2 + number // 6 % 3) % len(REAL_OPTIONS))
    ]
    return HERE / "question_answering_xquad.json", {"options": REAL_OPTIONS, "answers": answers}


def main() -> None:
    import tokenizers
    import torch
    import transformers

    file, record = record_real(*sys.argv[1:]) if len(sys.argv) > 1 else record_tiny()
    versions = {
        "recorded with": {library.__name__: library.__version__ for library in (transformers, tokenizers, torch)}
    }
    lines = [f"{json.dumps(key)}: {_compact(value)}" for key, value in {**versions, **record}.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
