"""Encoder classes of hasten.transformers compared with transformers: tensors, pipelines and errors."""

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
from support.fake_bench import fake_benchmark
from support.import_probe import modules_after

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
CONFIGS = {"ForSequenceClassification": LABELS, "ForTokenClassification": TAGS}
# Every class with BERT; then architectures without token types, with a position offset, or with padding on the left.
CASES = [
    *((head, "bert") for head in (*ROWS, "ForMaskedLM")),
    ("ForMaskedLM", "roberta"),
    ("ForQuestionAnswering", "roberta"),
    ("ForSequenceClassification", "distilbert"),
    ("ForTokenClassification", "xlnet"),
]


@dataclass
class Pair:
    """The same model of hasten and of transformers, with their tokenizer."""

    ours: Any
    theirs: Any
    tokenizer: Any
    folder: Path
    rows: Path
    head: str
    extra: dict[str, Any] = field(default_factory=dict)

    def assert_same(self, inputs: Any) -> None:
        """Assert equal outputs at every real position, or at the masks of a masked language model."""
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

    built: dict[tuple[str, str], Pair] = {}

    def make(head: str, architecture: str) -> Pair:
        if (head, architecture) in built:
            return built[head, architecture]
        folder = tiny_model(architecture, head, **CONFIGS.get(head, {}))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        rows = ROWS.get(head) or [
            {"text": f"the cat {tokenizer.mask_token} on the mat"},
            {"text": f"{tokenizer.mask_token} b"},
        ]
        file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        name = f"Auto{head}" if head == "Model" else f"AutoModel{head}"
        with fake_benchmark():
            ours = getattr(hasten.transformers, name).from_pretrained(
                folder, backend="onnxruntime", data=file, threads=1
            )
        theirs = getattr(transformers, name).from_pretrained(folder).eval()
        built[head, architecture] = Pair(ours, theirs, tokenizer, folder, file, head)
        return built[head, architecture]

    yield make
    for models in built.values():
        models.ours.close()


def texts_of(pair: Pair) -> list[Any]:
    if pair.head == "ForMaskedLM":
        mask = pair.tokenizer.mask_token
        return [f"the cat {mask} on the mat", f"{mask} dog", f"what a {mask} film, I would {mask} it again"]
    if pair.head in ("ForQuestionAnswering", "ForSequenceClassification", "Model"):
        return [["is this it?", text] for text in TEXTS]
    return TEXTS


@pytest.mark.parametrize(("head", "architecture"), CASES)
def test_outputs_equal_those_of_transformers(head: str, architecture: str, pair: Callable[..., Pair]) -> None:
    models = pair(head, architecture)
    texts = texts_of(models)
    if head == "ForMultipleChoice":
        inputs = models.tokenizer([[TEXTS[0], text] for text in TEXTS] * 2, padding=True, return_tensors="pt")
        models.assert_same({name: value.reshape(2, 3, -1) for name, value in inputs.items()})
        return
    models.assert_same(models.tokenizer(texts, padding=True, return_tensors="pt"))
    models.assert_same(models.tokenizer(texts[:1], return_tensors="pt"))


@pytest.mark.parametrize(("head", "architecture"), CASES)
def test_padding_on_either_side_does_not_change_outputs(
    head: str, architecture: str, pair: Callable[..., Pair]
) -> None:
    """Also for models that count positions from the first column, whose modules depend on the padding."""
    if head == "ForMultipleChoice":
        pytest.skip("choices are padded like rows")
    models = pair(head, architecture)
    texts = texts_of(models)
    for side in ("left", "right"):
        inputs = models.tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        together = models.ours(**inputs)
        for row, text in enumerate(texts):
            alone = models.ours(**models.tokenizer([text], return_tensors="pt"))
            for name, value in alone.items():
                output = together[name][row]
                if value.dim() > 2 or head == "ForQuestionAnswering":
                    output = output[inputs["attention_mask"][row].bool()]
                assert np.allclose(output, value[0], rtol=1e-4, atol=1e-3, equal_nan=True)


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
def test_pipeline_answers_equal_those_of_transformers(
    task: str, architecture: str, batch_size: int, pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    head, options = PIPELINES[task]
    models = pair(head, architecture)
    texts = texts_of(models) if head == "ForMaskedLM" else TEXTS
    pipelines = [
        transformers.pipeline(task, model=model, tokenizer=models.tokenizer) for model in (models.ours, models.theirs)
    ]
    ours, theirs = (each(texts, batch_size=batch_size, **options) for each in pipelines)
    if task == "feature-extraction":  # in a batch the pipeline also returns vectors of padding, which are zero here
        lengths = [len(ids) for ids in models.tokenizer(texts)["input_ids"]]
        ours, theirs = ([row[0][:n] for row, n in zip(rows, lengths, strict=True)] for rows in (ours, theirs))
    assert_close(ours, theirs)
    assert type(models.ours).__name__ in repr(pipelines[0])
    assert "is not supported" not in caplog.text


def test_logits_of_unmasked_tokens_are_nan(pair: Callable[..., Pair]) -> None:
    models = pair("ForMaskedLM", "bert")
    inputs = models.tokenizer(texts_of(models), padding=True, return_tensors="pt")
    logits = models.ours(**inputs).logits
    is_mask = inputs["input_ids"] == models.tokenizer.mask_token_id
    assert logits[is_mask].isfinite().all()
    assert logits[~is_mask].isnan().all()


def test_tensors_are_not_copied(pair: Callable[..., Pair]) -> None:
    """Unpadded inputs and the outputs of the runtime are used in place."""
    from hasten.transformers.tensors import padded, unpadded

    models = pair("Model", "bert")
    signature = models.ours._session.spec.signature
    inputs = models.tokenizer(TEXTS[:1], return_tensors="pt")
    rows = unpadded(inputs, signature)
    assert np.shares_memory(rows.batch.values["input_ids"], inputs["input_ids"].numpy())
    output = models.ours._session.run(rows.batch)["last_hidden_state"]
    assert np.shares_memory(padded(output, signature.outputs[0], rows, None).numpy(), output)


def test_second_load_finds_the_bundle_in_the_cache(pair: Callable[..., Pair], hasten_cache: Path) -> None:
    models = pair("ForQuestionAnswering", "bert")
    load = hasten.transformers.AutoModelForQuestionAnswering.from_pretrained
    cached = sorted((hasten_cache / "on-demand").iterdir())
    again = load(models.folder, backend="onnxruntime", data=models.rows)
    assert again.bundle.path == models.ours.bundle.path
    assert sorted((hasten_cache / "on-demand").iterdir()) == cached


def test_cache_key_depends_on_weights_options_and_versions(
    pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses
    import shutil

    from hasten import auto_build
    from hasten.builder.sources.locate import find_model
    from hasten.core.plan import Plan
    from hasten.core.system.hardware import this_machine

    folder = tmp_path / "model"
    shutil.copytree(pair("ForQuestionAnswering", "bert").folder, folder)
    plan = Plan(model=str(folder), variants=("onnxruntime-fp32",))
    model = find_model(plan, with_weights=False)
    key = auto_build._key(plan, model)
    (folder / "README.md").write_text("not read by a build")
    assert auto_build._key(plan, model) == key
    assert auto_build._key(dataclasses.replace(plan, variants=("onnxruntime-int8",)), model) != key
    newer = dataclasses.replace(this_machine(), libraries={**this_machine().libraries, "onnxruntime": "99"})
    with monkeypatch.context() as patch:
        patch.setattr(auto_build, "this_machine", lambda: newer)
        assert auto_build._key(plan, model) != key
    (folder / "source.spm").write_bytes(b"vocabulary of Marian")
    assert auto_build._key(plan, model) != key
    (folder / "source.spm").unlink()
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert auto_build._key(plan, model) != key


def test_best_precision_is_searched_once_and_read_from_a_bundle(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is searched, here among the variants that backends offer; a bundle has its order of variants."""
    models = pair("ForSequenceClassification", "bert")
    monkeypatch.setattr("hasten.builder.search.search.SEARCH_ORDER", {})
    load = hasten.transformers.AutoModelForSequenceClassification.from_pretrained
    with fake_benchmark({"openvino-fp32": 0.1}):
        best = load(models.folder, precision="best", data=models.rows)
    known = best.bundle.manifest.variants
    assert len(known) > 1
    # The caller waits for this build, so other shapes are not timed.
    assert len({timing.shape for timing in best.bundle.report.bench.timings}) == 1
    inputs = models.tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert best(**inputs).logits.shape == (len(TEXTS), 3)
    again = load(best.bundle.path, precision="best", backend=known[-1].variant.backend)
    assert again(**inputs).logits.shape == (len(TEXTS), 3)
    with pytest.raises(PlanError, match="has no variant with backend fused"):
        load(best.bundle.path, precision="best", backend="fused")


def test_concurrent_loads_build_once(
    pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from hasten.builder import build

    models = pair("ForQuestionAnswering", "bert")
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    built: list[Path] = []
    real = build.build

    def counted(plan: Any, target: Path, **options: Any) -> Any:
        built.append(target)
        return real(plan, target, **options)

    def ask(_: int) -> Any:
        return hasten.pipeline("question-answering", models.folder, backend="onnxruntime", data=models.rows)

    monkeypatch.setattr(build, "build", counted)
    with fake_benchmark(), ThreadPoolExecutor(2) as threads:
        first, second = threads.map(ask, range(2))
    assert len(built) == 1
    assert "Another process is building" in caplog.text
    assert first(QUESTIONS[0]) == second(QUESTIONS[0])


def test_cache_that_is_not_writable_is_reported(
    pair: Callable[..., Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(StageError, match=r"the cache .*file cannot be written: .*set HASTEN_CACHE to another"):
        hasten.pipeline("question-answering", pair("ForQuestionAnswering", "bert").folder)


def test_model_object_instead_of_a_name_is_rejected(pair: Callable[..., Pair]) -> None:
    one = pair("ForSequenceClassification", "bert")
    with pytest.raises(PlanError, match=r"and this is a BertForSequenceClassification \(hasten.build"):
        hasten.transformers.AutoModelForSequenceClassification.from_pretrained(one.theirs)
    with pytest.raises(PlanError, match="and this is a NoneType"):
        hasten.pipeline("text-classification", None)  # type: ignore[arg-type]


def test_saved_model_is_a_bundle_and_readable_by_transformers(pair: Callable[..., Pair], tmp_path: Path) -> None:
    import transformers

    models = pair("ForTokenClassification", "bert")
    models.ours.save_pretrained(tmp_path / "saved")
    again = hasten.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert {name: value.tolist() for name, value in inputs.items()} == {
        name: value.tolist() for name, value in models.tokenizer(TEXTS, padding=True, return_tensors="pt").items()
    }
    assert (again(**inputs).logits == models.ours(**inputs).logits).all()
    assert again.config.id2label == models.theirs.config.id2label
    hasten.load(tmp_path / "saved").close()
    hasten.Bundle(tmp_path / "saved", models.ours.bundle.manifest).check()
    with pytest.raises(PlanError, match="is a bundle"):
        hasten.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved", revision="main")
    with pytest.raises(PlanError, match=r"has no variant with precision int4 .*onnxruntime-fp32"):
        hasten.transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "saved", precision="int4")


def test_pushing_offline_fails_in_one_line(pair: Callable[..., Pair]) -> None:
    with pytest.raises(StageError, match="me/mine could not be pushed to the hub"):
        pair("ForTokenClassification", "bert").ours.push_to_hub("me/mine")


def test_bundle_of_another_task_is_rejected(pair: Callable[..., Pair]) -> None:
    bundle = pair("ForTokenClassification", "bert").ours.bundle.path
    with pytest.raises(PlanError, match=r"is for token-classification.*use AutoModelForTokenClassification"):
        hasten.transformers.AutoModelForQuestionAnswering.from_pretrained(bundle)
    with pytest.raises(PlanError, match="has no head for question-answering"):
        hasten.transformers.AutoModelForQuestionAnswering.from_pretrained(pair("ForTokenClassification", "bert").folder)


def test_bundle_without_config_is_rejected(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.bundle.Bundle.configuration", lambda *_: None)
    with pytest.raises(BundleError, match=r"has no config\.json.*build it again"):
        hasten.transformers.AutoModelForTokenClassification.from_pretrained(
            pair("ForTokenClassification", "bert").ours.bundle.path
        )


def test_device_dtype_and_mode_are_fixed(pair: Callable[..., Pair]) -> None:
    import torch

    model = pair("ForSequenceClassification", "bert").ours
    assert model.eval() is model.to("cpu") is model.cpu() is model.float() is model.to(torch.device("cpu")) is model
    assert model.train(False) is model
    assert (model.device, model.dtype, model.training) == (torch.device("cpu"), torch.float32, False)
    for unsupported in (
        lambda: model.to("cuda"),
        model.half,
        model.train,
        lambda: model.to(dtype=torch.bfloat16),
        model.cuda,
    ):
        with pytest.raises(UnsupportedError, match="BertForSequenceClassification of hasten: "):
            unsupported()


BAD_INPUTS = {
    "no tensors": (lambda _: {}, "input_ids are missing"),
    "lists": (lambda ids: {"input_ids": ids.tolist()}, "is list, not a tensor"),
    "floats": (lambda ids: {"input_ids": ids.float()}, "not integers"),
    "one row": (lambda ids: {"input_ids": ids[0]}, "1 axes"),
    "another mask": (lambda ids: {"input_ids": ids, "attention_mask": ids[:, 1:]}, r"attention_mask is 1×\d+, and"),
    "no token": (lambda ids: {"input_ids": ids, "attention_mask": ids * 0}, "row 1 contains only padding"),
    "empty": (lambda ids: {"input_ids": ids[:, :0]}, "is empty"),
    "below all tokens": (lambda ids: {"input_ids": ids * 0 - 1}, "token id -1 is out of range: the vocabulary size"),
    "past all tokens": (lambda ids: {"input_ids": ids + 10**6}, r"token id 10\d+ is out of range: the vocabulary size"),
    "too long": (lambda ids: {"input_ids": ids.repeat(1, 40)}, "and the model's limit is 64"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_invalid_tensors_are_rejected(name: str, pair: Callable[..., Pair]) -> None:
    models = pair("ForSequenceClassification", "bert")
    make_inputs, reason = BAD_INPUTS[name]
    with pytest.raises(InputError, match=reason):
        models.ours(**make_inputs(models.tokenizer(TEXTS[:1], return_tensors="pt")["input_ids"]))


def test_inner_padding_and_unsupported_outputs_are_rejected(pair: Callable[..., Pair]) -> None:
    models = pair("ForTokenClassification", "bert")
    inputs = models.tokenizer(TEXTS[:1], return_tensors="pt")
    mask = inputs["attention_mask"].clone()
    mask[0, 2] = 0
    with pytest.raises(InputError, match="masks tokens inside a row"):
        models.ours(inputs["input_ids"], mask)
    with pytest.raises(InputError, match="token_type_ids must be zero"):
        models.ours(inputs["input_ids"], token_type_ids=inputs["input_ids"] * 0 + 1)
    with pytest.raises(UnsupportedError, match="'output_attentions' is not supported"):
        models.ours(**inputs, output_attentions=True)
    assert isinstance(models.ours(**inputs, output_attentions=False, return_dict=False), tuple)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"dtype": "auto"}, r"does not support 'dtype' \(instead: precision="),
        ({"colour": 1}, "does not support 'colour'"),
    ],
)
def test_options_of_transformers_are_rejected_with_an_alternative(
    option: dict[str, Any], reason: str, tmp_path: Path
) -> None:
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
def test_unsupported_device_or_precision_is_rejected(
    option: dict[str, Any], reason: str, pair: Callable[..., Pair]
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        hasten.transformers.AutoModelForQuestionAnswering.from_pretrained(
            pair("ForQuestionAnswering", "bert").folder, **option
        )


def test_onnx_checkpoint_is_loaded(pair: Callable[..., Pair], tmp_path: Path) -> None:
    """A checkpoint of Optimum: the graph beside config and tokenizer."""
    import shutil

    models = pair("ForSequenceClassification", "bert")
    folder = tmp_path / "exported"
    shutil.copytree(models.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(models.ours.bundle.graph().path(), folder / "model.onnx")
    with fake_benchmark():
        model = hasten.transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, file_name="model.onnx", backend="onnxruntime", data=models.rows
        )
    assert model.bundle.manifest.model.file == "model.onnx"
    Pair(model, models.theirs, models.tokenizer, folder, models.rows, models.head).assert_same(
        models.tokenizer(texts_of(models), padding=True, return_tensors="pt")
    )


def test_import_loads_neither_torch_nor_transformers() -> None:
    modules = modules_after("from hasten.transformers import AutoModelForQuestionAnswering")
    assert modules - set(sys.stdlib_module_names) == {"hasten"}


def test_pipeline_runs_without_transformers(pair: Callable[..., Pair]) -> None:
    """Question answering, whose pipeline transformers 5 removed, with a bundle from the cache."""
    models = pair("ForQuestionAnswering", "bert")
    code = (
        "import hasten\n"
        "ask = hasten.pipeline('question-answering', sys.argv[1], backend='onnxruntime', data=sys.argv[2])\n"
        "assert ask(question='is this it?', context='the cat sat on the mat')['answer']"
    )
    modules = modules_after(code, str(models.folder), str(models.rows))
    assert not modules & {"torch", "transformers"}


def test_pipeline_rejects_unsuitable_tasks_and_models(pair: Callable[..., Pair], tmp_path: Path) -> None:
    models = pair("ForQuestionAnswering", "bert")
    with pytest.raises(PlanError, match=r"no task 'question-answer'.*question-answering.*sentiment-analysis"):
        hasten.pipeline("question-answer", models.folder)
    with pytest.raises(PlanError, match="has no head for token-classification; it fits question-answering"):
        hasten.pipeline("ner", models.folder)
    with pytest.raises(PlanError, match="is a bundle for question-answering, not for fill-mask"):
        hasten.pipeline("fill-mask", models.ours.bundle.path)
    with pytest.raises(PlanError, match="no model at"):
        hasten.pipeline("fill-mask", tmp_path / "nothing")


def assert_close(ours: Any, theirs: Any) -> None:
    """Assert the same structure and strings, and numbers that are close."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert_close(ours[name], value)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for our_item, their_item in zip(ours, theirs, strict=True):
            assert_close(our_item, their_item)
    elif isinstance(theirs, float | np.floating):
        assert ours == pytest.approx(theirs, abs=1e-3, rel=1e-3)
    else:
        assert ours == theirs
