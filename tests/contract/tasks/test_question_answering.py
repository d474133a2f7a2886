"""A bundle answers questions like transformers 4.57's pipeline, recorded because transformers 5 removed it."""

from __future__ import annotations

import json
import runpy
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.core.errors import InputError
from hasten.core.text.tokenizer import Tokenizer

HERE = Path(__file__).parents[1] / "recorded"
RECORDER = runpy.run_path(str(HERE / "record_question_answering.py"))
RECORDED = json.loads((HERE / "question_answering.json").read_text(encoding="utf-8"))
PADS_LEFT = "bert that pads on the left"
BUILT = [name for name in RECORDER["MODELS"] if name != PADS_LEFT]
TEXT = "Ada Lovelace wrote the first program in London in 1843, and nobody could run it."
ASK = {"question": "Who wrote it?", "context": TEXT}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save the recorded models, once each."""

    @cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / "model"
        folder.mkdir()
        RECORDER["save_model"](name, folder)
        return folder

    return save


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [{"question": question, "context": context} for question, context in RECORDED["inputs"][:30]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def answerers(saved: Any, quick_build: Any, rows_file: Path) -> Callable[[str], hasten.Predictor]:
    """Return a predictor per model, built once; the task is detected."""

    @cache
    def get(name: str) -> hasten.Predictor:
        bundle = quick_build(saved(name), variants=["onnxruntime-fp32"], data=rows_file)
        assert bundle.manifest.task.name == "question-answering"
        return hasten.load(bundle.path, threads=1)

    return get


def as_list(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def compare(ours: Any, theirs: Any, context: str) -> int:
    """Compare answers and their order; return the number of compared answers.

    Asked for more than there is, the pipeline fills up with spans of score 0, some of which end before they start, and
    which of them depends on how NumPy partitions equals on that machine. Those are left out.
    """
    recorded = [theirs] if theirs and not isinstance(theirs[0], list) else theirs
    scored = [span for span in recorded if span[0] > 0]
    actual_answers = [span for span in as_list(ours) if span["score"] > 0]
    if len(scored) == len(recorded) and len(actual_answers) == len(as_list(ours)):
        assert isinstance(ours, list) == (recorded is theirs)
    assert [(span["start"], span["end"]) for span in actual_answers] == [(start, end) for _, start, end in scored]
    for our, (score, start, end) in zip(actual_answers, scored, strict=True):
        assert list(our) == ["score", "start", "end", "answer"]
        assert our["score"] == pytest.approx(score, abs=1e-4)
        assert our["answer"] == context[start:end]
    return len(scored)


@pytest.mark.parametrize("name", BUILT)
def test_answers_equal_those_of_the_pipeline(answerers: Any, name: str) -> None:
    """Questions are sent in batches: other questions of a batch must not change an answer."""
    answer = answerers(name)
    questions, compared, rejected = set(), 0, 0
    batches = defaultdict(list)
    for index, batch_index, theirs in RECORDED["answers"][name]:
        batches[batch_index].append((*RECORDED["inputs"][index], theirs))
    for batch_index, batch in batches.items():
        options = RECORDED["options"][batch_index]
        payload = [{"question": question, "context": context} for question, context, theirs in batch if theirs]
        answers = iter(answer(payload, **options))
        for question, context, theirs in batch:
            if theirs:
                compared += compare(next(answers), theirs, context)
                questions.add((question, context))
            else:  # the pipeline fails, so an InputError is expected
                with pytest.raises(InputError, match=r"leaves \d+ for its context"):
                    answer({"question": question, "context": context}, **options)
                rejected += 1
    assert len(questions) >= 280
    assert compared > 2000
    assert rejected
    # Some are longer than a window, whatever the question.
    assert sum(len(whole) > 64 for whole in answer.tokenizer.encode_whole([context for _, context in questions])) > 20


def test_recording_covers_the_interesting_cases() -> None:
    """Drawn and odd inputs; empty answers that win, alone and before others; failures."""
    answers = [theirs for name in BUILT for _, _, theirs in RECORDED["answers"][name]]
    single = [theirs for theirs in answers if theirs and not isinstance(theirs[0], list)]
    several = [theirs for theirs in answers if theirs and isinstance(theirs[0], list)]
    assert len(RECORDED["inputs"]) - RECORDER["GENERATED"] > 60
    assert sum(theirs[1:] == [0, 0] for theirs in single) > 10
    assert sum(theirs[0][1:] == [0, 0] for theirs in several) > 10
    assert None in answers
    assert RECORDED["recorded with"]["transformers"] == "4.57.6"


def test_left_padded_answers_equal_those_of_the_pipeline(saved: Any, load_tiny: Any, tmp_path: Path) -> None:
    """Without a bundle: BERT has absolute positions, so that padding on the left changes its answers."""
    from hasten.backends import Artifact, RunOptions
    from hasten.backends.torch import ModuleSession
    from hasten.builder.sources.tokenizer import save_tokenizer
    from hasten.core.variant import Variant

    loaded = load_tiny(saved(PADS_LEFT))
    save_tokenizer(loaded.original_tokenizer, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.open(tmp_path / "tokenizer.json", loaded.tokenizer)
    artifact = Artifact(Variant.parse("torch-fp32"), loaded.signature, tmp_path, {})
    predictor = hasten.Predictor(loaded.task, tokenizer, ModuleSession(loaded.module, artifact, RunOptions(1)))
    task, compared = predictor.task, 0
    for index, batch_index, theirs in RECORDED["answers"][PADS_LEFT][::2]:
        question, context = RECORDED["inputs"][index]
        if theirs is None or "[PAD]" in question + context:  # the pipeline mistakes it for padding
            continue
        options = task.options(loaded.task, RECORDED["options"][batch_index])
        encoded = task.encode(task.parse([{"question": question, "context": context}]), tokenizer, options)
        outputs = predictor.outputs(encoded, groups=[np.array([row]) for row in range(len(encoded.batch))])
        [ours] = task.decode(outputs, encoded, options)
        compared += compare(ours, theirs, context)
    assert compared > 800


def test_answer_has_the_shape_of_the_payload(answerers: Any) -> None:
    answer = answerers("bert")
    first, second = answer(ASK), answer({"question": "When?", "context": TEXT})
    assert first.keys() == {"score", "start", "end", "answer"}
    assert first != second
    context = {"context": TEXT}
    for payload, expected in [
        ([ASK], [first]),
        ([ASK, {"question": "When?", **context, "id": "x"}, ASK], [first, second, first]),
        ({"question": ["Who wrote it?", "When?"], **context}, [first, second]),
        ({"question": ["When?"], **context}, [second]),
        ({"question": ["When?", "Who wrote it?"], "context": [TEXT, TEXT]}, [second, first]),
    ]:
        actual_answers = answer(payload)
        assert isinstance(actual_answers, list)
        for our, their in zip(actual_answers, expected, strict=True):
            assert our == {**their, "score": pytest.approx(their["score"], abs=1e-6)}


def test_context_of_a_hundred_thousand_tokens_is_answered(answerers: Any) -> None:
    context = " ".join(["the cat sat on the mat and the dog ran across the green field"] * (100_000 // 13 + 1))
    answer = answerers("bert")
    assert len(answer.tokenizer.encode_whole([context])[0]) >= 100_000
    encoded = answer.encode({"question": "Who?", "context": context})
    assert (encoded.batch.lengths[:-1] == 64).all()
    assert encoded.encodings[-1].offsets[-2][1] == len(context)
    actual_answers = answer({"question": "Who?", "context": context}, top_k=2)
    assert all(span["answer"] == context[span["start"] : span["end"]] for span in actual_answers)


@pytest.mark.parametrize(
    "payload",
    [
        [],
        {},
        "Who wrote it?",
        ["Who wrote it?", TEXT],
        {"question": "Who wrote it?"},
        {"question": "Who wrote it?", "context": None},
        {"question": "", "context": TEXT},
        {"question": "Who?", "context": " \n "},
        {"question": 7, "context": TEXT},
        {"question": "Who?", "context": {"text": TEXT}},
        {"question": "Who\ud83d?", "context": TEXT},
        [ASK, {"question": "Who?", "context": "\ud800"}],
        {"question": ["Who?"], "context": []},
    ],
)
def test_invalid_question_raises_input_error(answerers: Any, payload: object) -> None:
    with pytest.raises(InputError):
        answerers("bert")(payload)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"max_seq_len": 65}, {"doc_stride": 65}, {"max_answer_len": -1}, {"padding": "max_length"}],
)
def test_invalid_option_raises_input_error(answerers: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        answerers("bert")(ASK, **options)


def test_question_is_truncated_only_on_request(answerers: Any) -> None:
    answer = answerers("bert")
    long = {"question": "who wrote the first program " * 20, "context": TEXT}
    with pytest.raises(InputError, match="question 1 has 100 tokens"):
        answer(long)
    short = {"question": "who wrote the first program who wrote", "context": TEXT}
    assert answer(long, max_question_len=7) == answer(short)


words = st.sampled_from(
    [*TEXT.split(), "🐈", "👩‍👩‍👧‍👦", "e\u0301", "İ", "東京は日本の", "\u0000", "\u200d", "[CLS]", "</s>"]
)
texts = (st.lists(words, max_size=60).map(" ".join) | st.text(max_size=120)).filter(str.strip)
queries = st.builds(lambda question, context: {"question": question[:24] + "?", "context": context}, texts, texts)
choices = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.integers(1, 8),
        "max_answer_len": st.integers(1, 40),
        "doc_stride": st.integers(0, 12),
        "max_seq_len": st.integers(60, 64),
        "max_question_len": st.integers(1, 20),
        "handle_impossible_answer": st.booleans(),
        "align_to_words": st.booleans(),
    },
)


@pytest.mark.parametrize("name", BUILT[:3])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(payload=st.lists(queries, min_size=1, max_size=12), options=choices)
def test_any_question_is_answered(
    answerers: Any, name: str, payload: list[dict[str, str]], options: dict[str, Any]
) -> None:
    options = {"doc_stride": 8, "max_question_len": 30, **options}
    answers = answerers(name)(payload, **options)
    assert len(answers) == len(payload)
    for query, answer in zip(payload, answers, strict=True):
        spans = as_list(answer)
        assert 1 <= len(spans) <= options.get("top_k", 1)
        scores = [span["score"] for span in spans]
        assert scores == sorted(scores, reverse=True)
        assert scores[-1] >= 0
        for span in spans:
            assert span["answer"] == query["context"][span["start"] : span["end"]]
        if not options.get("handle_impossible_answer"):
            assert len({span["answer"].lower() for span in spans}) == len(spans)


def test_bundle_is_scored_on_reference_answers(saved: Any, quick_build: Any, tmp_path: Path) -> None:
    from hasten.core.progress import SilentProgress
    from hasten.measure.verify_bundle import verify_bundle

    rows = [
        {"question": question, "context": context, "answers": {"text": [context], "answer_start": [0]}}
        for question, context in RECORDED["inputs"][:12]
    ]
    rows.append({**rows[0], "answers": {"text": [], "answer_start": []}})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    bundle = quick_build(saved("roberta"), variants=["onnxruntime-fp32"], data=file)
    for candidate in verify_bundle(bundle, rows, bundle.manifest.gate, (), 1, SilentProgress()):
        assert candidate.verdict is not None
        assert candidate.verdict.passed
        assert candidate.verdict.agreement.rows == 13
        assert candidate.verdict.agreement.flips == 0
        assert candidate.verdict.metric is not None
        assert candidate.verdict.metric.name == "F1"
        assert 0 < candidate.verdict.metric.value < 1
        assert candidate.verdict.metric == candidate.verdict.reference_metric
