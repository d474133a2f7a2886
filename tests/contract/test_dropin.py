"""The classes of hasten.transformers in the place of transformers' own: raw tensors, pipelines, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import hasten.transformers
from hasten.core.errors import BundleError, InputError, PlanError, StageError, UnsupportedError
from imported import modules_after
from untimed import untimed

TEXTS = ["the cat sat on the mat", "a dog ran", "what a wonderful film, I would watch it again tomorrow"]
LABELS = {"id2label": {0: "contradiction", 1: "neutral", 2: "entailment"}} | {
    "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2}
}
TAGS = {"id2label": dict(enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")))}
QUESTIONS = [{"question": "is this it?", "context": text} for text in TEXTS]
ROWS: dict[str, list[dict[str, Any]]] = {
    "Model": [{"text": text} for text in TEXTS] + [{"text": TEXTS[0], "text_pair": TEXTS[1]}],
    "ForSequenceClassification": [{"text": text} for text in TEXTS] + [{"text": TEXTS[0], "text_pair": TEXTS[1]}],
    "ForTokenClassification": [{"text": text} for text in TEXTS],
    "ForQuestionAnswering": QUESTIONS,
    "ForMultipleChoice": [{"prompt": TEXTS[0], "choices": TEXTS[1:]}],
}
ABOUT = {"ForSequenceClassification": LABELS, "ForTokenClassification": TAGS}
# Every class on BERT; then what differs elsewhere: no token types, positions behind padding's, padding on the left.
CASES = [
    *((head, "bert") for head in (*ROWS, "ForMaskedLM")),
    ("ForMaskedLM", "roberta"),
    ("ForQuestionAnswering", "roberta"),
    ("ForSequenceClassification", "distilbert"),
    ("ForTokenClassification", "xlnet"),
]


@dataclass
class Pair:
    """Ours and theirs, with the tokenizer of both."""

    ours: Any
    theirs: Any
    tokenizer: Any
    folder: Path
    rows: Path
    head: str
    extra: dict[str, Any] = field(default_factory=dict)

    def assert_same(self, inputs: Any) -> None:
        """What both give at every real position, in the same class; of a masked language model, at its masks."""
        import torch

        ours = self.ours(**inputs)
        with torch.inference_mode():
            theirs = self.theirs(**inputs)
        assert ours is not None
        mask = inputs["attention_mask"].bool()
        if self.head == "ForMaskedLM":
            mask &= inputs["input_ids"] == self.tokenizer.mask_token_id
        for name, value in ours.items():
            expected = theirs[name]
            assert value.shape == expected.shape
            assert value.dtype == torch.float32
            if value.shape[:2] == mask.shape and self.head != "ForMultipleChoice":
                value, expected = value[mask], expected[mask]
            assert torch.allclose(value, expected, rtol=1e-4, atol=2e-4 * max(1.0, float(expected.abs().max())))


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    import transformers

    made: dict[tuple[str, str], Pair] = {}

    def make(head: str, architecture: str) -> Pair:
        if (head, architecture) in made:
            return made[head, architecture]
        folder = tiny_model(architecture, head, **ABOUT.get(head, {}))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        rows = ROWS.get(head) or [
            {"text": f"the cat {tokenizer.mask_token} on the mat"},
            {"text": f"{tokenizer.mask_token} b"},
        ]
        file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        name = f"Auto{head}" if head == "Model" else f"AutoModel{head}"
        with untimed():
            ours = getattr(hasten.transformers, name).from_pretrained(
                folder, backend="onnxruntime", data=file, threads=1
            )
        theirs = getattr(transformers, name).from_pretrained(folder).eval()
        made[head, architecture] = Pair(ours, theirs, tokenizer, folder, file, head)
        return made[head, architecture]

    yield make
    for one in made.values():
        one.ours.close()


def texts_of(pair: Pair) -> list[Any]:
    if pair.head == "ForMaskedLM":
        mask = pair.tokenizer.mask_token
        return [f"the cat {mask} on the mat", f"{mask} dog", f"what a {mask} film, I would {mask} it again"]
    if pair.head in ("ForQuestionAnswering", "ForSequenceClassification", "Model"):
        return [["is this it?", text] for text in TEXTS]
    return TEXTS


@pytest.mark.parametrize(("head", "architecture"), CASES)
def test_the_same_tensors(head: str, architecture: str, pair: Callable[..., Pair]) -> None:
    one = pair(head, architecture)
    texts = texts_of(one)
    if head == "ForMultipleChoice":
        inputs = one.tokenizer([[TEXTS[0], text] for text in TEXTS] * 2, padding=True, return_tensors="pt")
        one.assert_same({name: value.reshape(2, 3, -1) for name, value in inputs.items()})
        return
    one.assert_same(one.tokenizer(texts, padding=True, return_tensors="pt"))
    one.assert_same(one.tokenizer(texts[:1], return_tensors="pt"))


@pytest.mark.parametrize(("head", "architecture"), CASES)
def test_padding_on_either_side_is_no_part_of_the_answer(
    head: str, architecture: str, pair: Callable[..., Pair]
) -> None:
    """Also where positions are counted from the first column, and the module itself would answer otherwise."""
    if head == "ForMultipleChoice":
        pytest.skip("its rows are choices, padded like all others")
    one = pair(head, architecture)
    texts = texts_of(one)
    for side in ("left", "right"):
        inputs = one.tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        together = one.ours(**inputs)
        for place, text in enumerate(texts):
            alone = one.ours(**one.tokenizer([text], return_tensors="pt"))
            for name, value in alone.items():
                own = together[name][place]
                own = (
                    own[inputs["attention_mask"][place].bool()]
                    if value.dim() > 2 or head == "ForQuestionAnswering"
                    else own
                )
                assert np.allclose(own, value[0], rtol=1e-4, atol=1e-3, equal_nan=True)


PIPELINES = {
    "text-classification": ("ForSequenceClassification", {"top_k": None}),
    "zero-shot-classification": ("ForSequenceClassification", {"candidate_labels": ["rain", "a dog"]}),
    "token-classification": ("ForTokenClassification", {"aggregation_strategy": "simple"}),
    "fill-mask": ("ForMaskedLM", {"top_k": 7}),
    "feature-extraction": ("Model", {}),
}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("task", "architecture"),
    [(task, kind) for task, (head, _) in PIPELINES.items() for known, kind in CASES if known == head],
)
def test_the_same_pipeline(
    task: str, architecture: str, batch_size: int, pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    head, options = PIPELINES[task]
    one = pair(head, architecture)
    texts = texts_of(one) if head == "ForMaskedLM" else TEXTS
    pipelines = [transformers.pipeline(task, model=model, tokenizer=one.tokenizer) for model in (one.ours, one.theirs)]
    ours, theirs = (each(texts, batch_size=batch_size, **options) for each in pipelines)
    if task == "feature-extraction":  # of a batch, the pipeline gives the vectors of padding too: here they are zero
        lengths = [len(ids) for ids in one.tokenizer(texts)["input_ids"]]
        ours, theirs = ([row[0][:n] for row, n in zip(rows, lengths, strict=True)] for rows in (ours, theirs))
    assert_close(ours, theirs)
    assert type(one.ours).__name__ in repr(pipelines[0])
    assert "is not supported" not in caplog.text


def test_unmasked_tokens_have_no_logits_that_could_be_taken_for_some(pair: Callable[..., Pair]) -> None:
    one = pair("ForMaskedLM", "bert")
    inputs = one.tokenizer(texts_of(one), padding=True, return_tensors="pt")
    logits = one.ours(**inputs).logits
    is_mask = inputs["input_ids"] == one.tokenizer.mask_token_id
    assert logits[is_mask].isfinite().all()
    assert logits[~is_mask].isnan().all()


def test_tensors_are_not_copied(pair: Callable[..., Pair]) -> None:
    """What goes in unpadded is read where it lies; what comes out lies where the runtime put it."""
    from hasten.transformers.tensors import padded, unpadded

    one = pair("Model", "bert")
    signature = one.ours._session.spec.signature
    inputs = one.tokenizer(TEXTS[:1], return_tensors="pt")
    rows = unpadded(inputs, signature)
    assert np.shares_memory(rows.batch.values["input_ids"], inputs["input_ids"].numpy())
    found = one.ours._session.run(rows.batch)["last_hidden_state"]
    assert np.shares_memory(padded(found, signature.outputs[0], rows, None).numpy(), found)


def test_the_second_time_it_is_there(pair: Callable[..., Pair], hasten_cache: Path) -> None:
    one = pair("ForQuestionAnswering", "bert")
    load = hasten.transformers.AutoModelForQuestionAnswering.from_pretrained
    kept = sorted((hasten_cache / "on-demand").iterdir())
    again = load(one.folder, backend="onnxruntime", data=one.rows)
    assert again.bundle.path == one.ours.bundle.path
    assert sorted((hasten_cache / "on-demand").iterdir()) == kept


def test_other_weights_options_or_versions_are_another_bundle(
    pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses
    import shutil

    from hasten import on_demand
    from hasten.builder.source import find_model
    from hasten.core.hardware import this_machine
    from hasten.core.plan import Plan

    folder = tmp_path / "model"
    shutil.copytree(pair("ForQuestionAnswering", "bert").folder, folder)
    plan = Plan(model=str(folder), variants=("onnxruntime-fp32",))
    model = find_model(plan, with_weights=False)
    key = on_demand._key(plan, model)
    (folder / "README.md").write_text("not read by a build")
    assert on_demand._key(plan, model) == key
    assert on_demand._key(dataclasses.replace(plan, variants=("onnxruntime-int8",)), model) != key
    newer = dataclasses.replace(this_machine(), libraries={**this_machine().libraries, "onnxruntime": "99"})
    with monkeypatch.context() as patch:
        patch.setattr(on_demand, "this_machine", lambda: newer)
        assert on_demand._key(plan, model) != key
    (folder / "source.spm").write_bytes(b"Marian's words")
    assert on_demand._key(plan, model) != key
    (folder / "source.spm").unlink()
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert on_demand._key(plan, model) != key


def test_the_best_is_what_a_bundle_has_first(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model it is searched for, here among what backends offer by themselves; a bundle knows its own."""
    one = pair("ForSequenceClassification", "bert")
    monkeypatch.setattr("hasten.builder.search.LADDER", {})
    monkeypatch.setattr("hasten.builder.search._LAST", {})
    load = hasten.transformers.AutoModelForSequenceClassification.from_pretrained
    with untimed({"openvino-fp32": 0.1}):
        best = load(one.folder, precision="best", data=one.rows)
    known = best.bundle.manifest.variants
    assert len(known) > 1
    # Who waits for it is not kept waiting for a table.
    assert len({timing.shape for timing in best.bundle.report.bench.timings}) == 1
    inputs = one.tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert best(**inputs).logits.shape == (len(TEXTS), 3)
    again = load(best.bundle.path, precision="best", backend=known[-1].variant.backend)
    assert again(**inputs).logits.shape == (len(TEXTS), 3)
    with pytest.raises(PlanError, match="holds nothing with backend fused"):
        load(best.bundle.path, precision="best", backend="fused")


def test_two_who_ask_at_once_build_it_once(
    pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from hasten.builder import build

    one = pair("ForQuestionAnswering", "bert")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    made: list[Path] = []
    real = build.build

    def counted(plan: Any, place: Path, **options: Any) -> Any:
        made.append(place)
        return real(plan, place, **options)

    def ask(_: int) -> Any:
        return hasten.pipeline("question-answering", one.folder, backend="onnxruntime", data=one.rows)

    monkeypatch.setattr(build, "build", counted)
    with untimed(), ThreadPoolExecutor(2) as threads:
        first, second = threads.map(ask, range(2))
    assert len(made) == 1
    assert "is being built by somebody else" in caplog.text
    assert first(QUESTIONS[0]) == second(QUESTIONS[0])


def test_a_cache_that_cannot_be_written_is_named(
    pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(StageError, match=r"the cache .*file cannot be written: .*HASTEN_CACHE names another"):
        hasten.pipeline("question-answering", pair("ForQuestionAnswering", "bert").folder)


def test_an_object_is_built_and_not_named(pair: Callable[..., Pair]) -> None:
    one = pair("ForSequenceClassification", "bert")
    with pytest.raises(PlanError, match=r"not given as a BertForSequenceClassification \(hasten.build"):
        hasten.transformers.AutoModelForSequenceClassification.from_pretrained(one.theirs)
    with pytest.raises(PlanError, match="not given as a NoneType"):
        hasten.pipeline("text-classification", None)  # type: ignore[arg-type]


def test_what_is_saved_is_a_bundle_and_a_model(pair: Callable[..., Pair], tmp_path: Path) -> None:
    import transformers

    one = pair("ForTokenClassification", "bert")
    one.ours.save_pretrained(tmp_path / "saved")
    again = hasten.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert {name: value.tolist() for name, value in inputs.items()} == {
        name: value.tolist() for name, value in one.tokenizer(TEXTS, padding=True, return_tensors="pt").items()
    }
    assert (again(**inputs).logits == one.ours(**inputs).logits).all()
    assert again.config.id2label == one.theirs.config.id2label
    hasten.load(tmp_path / "saved").close()
    hasten.Bundle(tmp_path / "saved", one.ours.bundle.manifest).check()
    with pytest.raises(PlanError, match="is a bundle"):
        hasten.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved", revision="main")
    with pytest.raises(PlanError, match=r"holds nothing with precision int4 .*onnxruntime-fp32"):
        hasten.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved", precision="int4")


def test_pushing_offline_fails_in_one_line(pair: Callable[..., Pair]) -> None:
    with pytest.raises(StageError, match="me/mine was not pushed to the hub"):
        pair("ForTokenClassification", "bert").ours.push_to_hub("me/mine")


def test_a_bundle_is_opened_by_its_own_class_alone(pair: Callable[..., Pair]) -> None:
    bundle = pair("ForTokenClassification", "bert").ours.bundle.path
    with pytest.raises(PlanError, match=r"is for token-classification.*AutoModelForTokenClassification takes it"):
        hasten.transformers.AutoModelForQuestionAnswering.from_pretrained(bundle)
    with pytest.raises(PlanError, match="has no head for question-answering"):
        hasten.transformers.AutoModelForQuestionAnswering.from_pretrained(pair("ForTokenClassification", "bert").folder)


def test_a_bundle_from_before_configurations_were_stored_says_so(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.bundle.Bundle.configuration", lambda *_: None)
    with pytest.raises(BundleError, match=r"holds no config\.json.*build it again"):
        hasten.transformers.AutoModelForTokenClassification.from_pretrained(
            pair("ForTokenClassification", "bert").ours.bundle.path
        )


def test_it_stays_where_it_is(pair: Callable[..., Pair]) -> None:
    import torch

    model = pair("ForSequenceClassification", "bert").ours
    assert model.eval() is model.to("cpu") is model.cpu() is model.float() is model.to(torch.device("cpu")) is model
    assert model.train(False) is model
    assert (model.device, model.dtype, model.training) == (torch.device("cpu"), torch.float32, False)
    for refused in (
        lambda: model.to("cuda"),
        model.half,
        model.train,
        lambda: model.to(dtype=torch.bfloat16),
        model.cuda,
    ):
        with pytest.raises(UnsupportedError, match="BertForSequenceClassification of hasten: it"):
            refused()


BAD = {
    "no tensors": (lambda _: {}, "no input_ids given"),
    "lists": (lambda ids: {"input_ids": ids.tolist()}, "is list, not a tensor"),
    "floats": (lambda ids: {"input_ids": ids.float()}, "not integers"),
    "one row": (lambda ids: {"input_ids": ids[0]}, "1 axes"),
    "another mask": (lambda ids: {"input_ids": ids, "attention_mask": ids[:, 1:]}, r"attention_mask is 1×\d+, and"),
    "no token": (lambda ids: {"input_ids": ids, "attention_mask": ids * 0}, "row 1 is nothing but padding"),
    "empty": (lambda ids: {"input_ids": ids[:, :0]}, "is empty"),
    "below all tokens": (lambda ids: {"input_ids": ids * 0 - 1}, "there is no token -1: the model knows"),
    "past all tokens": (lambda ids: {"input_ids": ids + 10**6}, r"there is no token 10\d+: the model knows"),
    "too long": (lambda ids: {"input_ids": ids.repeat(1, 40)}, "and the model takes 64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_refused_in_one_line(name: str, pair: Callable[..., Pair]) -> None:
    one = pair("ForSequenceClassification", "bert")
    made, reason = BAD[name]
    with pytest.raises(InputError, match=reason):
        one.ours(**made(one.tokenizer(TEXTS[:1], return_tensors="pt")["input_ids"]))


def test_holes_and_what_a_graph_does_not_give_are_refused(pair: Callable[..., Pair]) -> None:
    one = pair("ForTokenClassification", "bert")
    inputs = one.tokenizer(TEXTS[:1], return_tensors="pt")
    holed = inputs["attention_mask"].clone()
    holed[0, 2] = 0
    with pytest.raises(InputError, match="hides tokens between others"):
        one.ours(inputs["input_ids"], holed)
    with pytest.raises(InputError, match="token_type_ids other than zero"):
        one.ours(inputs["input_ids"], token_type_ids=inputs["input_ids"] * 0 + 1)
    with pytest.raises(UnsupportedError, match="'output_attentions' is not taken"):
        one.ours(**inputs, output_attentions=True)
    assert isinstance(one.ours(**inputs, output_attentions=False, return_dict=False), tuple)


@pytest.mark.parametrize(
    ("option", "reason"),
    [({"dtype": "auto"}, r"no 'dtype' here \(instead: precision="), ({"colour": 1}, "no 'colour' here")],
)
def test_options_of_others_are_refused_with_ours(option: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=reason):
        hasten.transformers.AutoModel.from_pretrained(tmp_path, **option)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"device": "cuda:1"}, "not on 'cuda:1'"),
        ({"device": "mps"}, "not on 'mps'"),
        ({"precision": "fp8", "device": "cpu"}, "no backend computes in fp8 on cpu here"),
        ({"precision": "int4", "backend": "openvino"}, "openvino does not compute in int4 here"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(
    option: dict[str, Any], reason: str, pair: Callable[..., Pair]
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        hasten.transformers.AutoModelForQuestionAnswering.from_pretrained(
            pair("ForQuestionAnswering", "bert").folder, **option
        )


def test_an_onnx_checkpoint_is_taken_as_it_is(pair: Callable[..., Pair], tmp_path: Path) -> None:
    """As Optimum leaves them: the graph beside config and tokenizer."""
    import shutil

    one = pair("ForSequenceClassification", "bert")
    folder = tmp_path / "exported"
    shutil.copytree(one.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(one.ours.bundle.graph().path(), folder / "model.onnx")
    with untimed():
        model = hasten.transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, file_name="model.onnx", backend="onnxruntime", data=one.rows
        )
    assert model.bundle.manifest.model.file == "model.onnx"
    Pair(model, one.theirs, one.tokenizer, folder, one.rows, one.head).assert_same(
        one.tokenizer(texts_of(one), padding=True, return_tensors="pt")
    )


def test_importing_it_imports_neither_library() -> None:
    found = modules_after("from hasten.transformers import AutoModelForQuestionAnswering")
    assert found - set(sys.stdlib_module_names) == {"hasten"}


def test_the_pipeline_without_transformers(pair: Callable[..., Pair]) -> None:
    """Question answering, which transformers 5 has no pipeline for any more; the bundle is there already."""
    one = pair("ForQuestionAnswering", "bert")
    code = (
        "import hasten\n"
        "ask = hasten.pipeline('question-answering', sys.argv[1], backend='onnxruntime', data=sys.argv[2])\n"
        "assert ask(question='is this it?', context='the cat sat on the mat')['answer']"
    )
    found = modules_after(code, str(one.folder), str(one.rows))
    assert not found & {"torch", "transformers"}


def test_the_pipeline_refuses_what_does_not_fit(pair: Callable[..., Pair], tmp_path: Path) -> None:
    one = pair("ForQuestionAnswering", "bert")
    with pytest.raises(PlanError, match=r"no task 'question-answer'.*question-answering.*sentiment-analysis"):
        hasten.pipeline("question-answer", one.folder)
    with pytest.raises(PlanError, match="has no head for token-classification; it fits question-answering"):
        hasten.pipeline("ner", one.folder)
    with pytest.raises(PlanError, match="is a bundle for question-answering, not for fill-mask"):
        hasten.pipeline("fill-mask", one.ours.bundle.path)
    with pytest.raises(PlanError, match="no model at"):
        hasten.pipeline("fill-mask", tmp_path / "nothing")


def assert_close(ours: Any, theirs: Any) -> None:
    """The same structure, words and places; numbers near each other."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert_close(ours[name], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
    elif isinstance(theirs, float | np.floating):
        assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-3)
    else:
        assert ours == theirs
