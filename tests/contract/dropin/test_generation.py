"""AutoModelForCausalLM of hasten.transformers compared with transformers: `generate` and the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import hasten.transformers
from hasten.core.errors import InputError, PlanError, UnsupportedError
from support.dropin import Pair, load_pair
from support.models import tiny_decoders

PROMPTS = ["the cat sat on", "a dog", "prices rose by three percent in the second", "I"]
KINDS = {"gpt2": tiny_decoders.byte_level, "llama": tiny_decoders.whole_characters}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> Pair:
    folder = tmp_path_factory.mktemp("generator") / request.param
    backend = KINDS[request.param]()
    tiny_decoders.model(request.param, tiny_decoders.vocabulary_of(backend)).save_pretrained(folder)
    tiny_decoders.theirs(backend, model_max_length=tiny_decoders.CONTEXT).save_pretrained(folder)
    return load_pair("AutoModelForCausalLM", folder, texts_file)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "max length": {"max_length": 40},
    "repetition penalty": {"max_new_tokens": 12, "repetition_penalty": 1.5},
    "beams": {"max_new_tokens": 10, "num_beams": 3},
    "beams with length penalty": {"max_new_tokens": 10, "num_beams": 2, "length_penalty": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_greedy_and_beam_search_tokens_equal_those_of_transformers(options: dict[str, Any], pair: Pair) -> None:
    # transformers applies the penalty to padding too, which is not part of the sequence here.
    batches = [[prompt] for prompt in PROMPTS] if "repetition_penalty" in options else [PROMPTS]
    for prompts in batches:
        inputs = pair.inputs(prompts)
        expected = pair.theirs.generate(**inputs, do_sample=False, **options)
        output = pair.ours.generate(**inputs, do_sample=False, **options)
        assert output.dtype == expected.dtype
        assert output.tolist() == expected.tolist()


class RecordingStreamer:
    """A streamer that records its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def put(self, tokens: Any) -> None:
        self.calls.append(tokens.tolist())

    def end(self) -> None:
        self.calls.append("end")


def test_sequences_that_end_early_are_padded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are random: the third token of one sequence serves as end-of-sequence token."""
    inputs = pair.inputs(PROMPTS)
    width = inputs["input_ids"].shape[1]
    end = int(pair.theirs.generate(**inputs, do_sample=False, max_new_tokens=6)[0, width + 2])
    from dataclasses import replace

    # The token that ended the sequence is returned, even if it is not the first of the end-of-sequence tokens.
    for ends in ((end,), (0, end)):
        monkeypatch.setattr(pair.ours._scheduler, "spec", replace(pair.ours._spec, eos_token_ids=ends))
        monkeypatch.setattr(pair.ours, "_spec", replace(pair.ours._spec, eos_token_ids=ends))
        options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": list(ends), "pad_token_id": 1}
        for beams in (1, 3):
            beam_options = {**options, "num_beams": beams}
            ours, theirs = (model.generate(**inputs, **beam_options) for model in (pair.ours, pair.theirs))
            assert ours.tolist() == theirs.tolist()
    calls: dict[str, list[Any]] = {"ours": [], "theirs": []}
    for name, model in (("ours", pair.ours), ("theirs", pair.theirs)):
        model.generate(**pair.inputs(PROMPTS[:1]), **options, streamer=RecordingStreamer(calls[name]))
    assert calls["ours"] == calls["theirs"]
    assert calls["ours"][-2] == [end]


def test_pipeline_answers_equal_those_of_transformers(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    pipelines = [
        transformers.pipeline("text-generation", model=model, tokenizer=pair.tokenizer)
        for model in (pair.ours, pair.theirs)
    ]
    ours, theirs = (each(PROMPTS, max_new_tokens=8, do_sample=False) for each in pipelines)
    assert ours == theirs
    assert "is not supported" not in caplog.text


def test_samples_follow_the_seed_of_torch(pair: Pair) -> None:
    import torch

    inputs = pair.inputs(PROMPTS[:1])
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(pair.ours.generate(**inputs, do_sample=True, temperature=3.0, max_new_tokens=12).tolist())
    assert samples[0] == samples[1] != samples[2]
    several = pair.ours.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=4)
    assert len(several) == 3


def test_streamer_receives_every_token(pair: Pair) -> None:
    from transformers import TextIteratorStreamer

    inputs = pair.inputs(PROMPTS[:1])
    streamer = TextIteratorStreamer(pair.tokenizer, skip_prompt=True)
    output = pair.ours.generate(**inputs, do_sample=False, max_new_tokens=8, streamer=streamer)
    new = output[0, inputs["input_ids"].shape[1] :]
    assert "".join(streamer) == pair.tokenizer.decode(new)


def test_stop_strings_end_sequences_as_in_transformers(pair: Pair) -> None:
    inputs = pair.inputs(PROMPTS[:1])
    width = inputs["input_ids"].shape[1]
    whole = pair.ours.generate(**inputs, do_sample=False, max_new_tokens=10)[0, width:]
    texts = [pair.tokenizer.decode(whole[index : index + 1]).strip() for index in range(2, 8)]
    # Bytes that form no character cannot be a stop string.
    stop = next((text for text in texts if text.isascii() and text), None)
    if stop is None:
        pytest.skip("the model generates no ASCII text here")
    options = {"do_sample": False, "max_new_tokens": 10, "stop_strings": [stop], "tokenizer": pair.tokenizer}
    assert pair.ours.generate(**inputs, **options).tolist() == pair.theirs.generate(**inputs, **options).tolist()


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"typical_p": 0.5}, UnsupportedError, "does not support 'typical_p'"),
        ({"num_return_sequences": 2}, UnsupportedError, "2 sequences per prompt without sampling"),
        ({"num_beams": 2, "do_sample": True}, UnsupportedError, "beam search with sampling"),
        ({"eos_token_id": 0}, UnsupportedError, "its end-of-sequence tokens are"),
        ({"max_length": 2}, InputError, "leaves no room for new tokens"),
        ({"max_new_tokens": 0}, InputError, "max_new_tokens is 0; it must be a whole number, at least 1"),
        ({"max_new_tokens": "5"}, InputError, "max_new_tokens is '5'"),
        ({"num_return_sequences": 0}, InputError, "num_return_sequences is 0"),
        ({"num_beams": 0}, InputError, "num_beams is 0"),
        ({"do_sample": True, "temperature": -1.0}, InputError, "temperature is -1.0"),
        ({"do_sample": True, "top_p": 2.0}, InputError, "top_p is 2.0"),
        ({"do_sample": True, "top_k": -3}, InputError, "top_k is -3"),
        ({"do_sample": True, "min_p": 7.0}, InputError, "min_p is 7.0"),
        ({"repetition_penalty": 0.0}, InputError, "repetition_penalty is 0.0"),
        ({"token_type_ids": np.zeros((4, 9))}, UnsupportedError, "does not support 'token_type_ids'"),
        ({"output_scores": True}, UnsupportedError, "does not support 'output_scores'"),
    ],
)
def test_unsupported_and_invalid_options_are_rejected(
    options: dict[str, Any], error: type[Exception], reason: str, pair: Pair
) -> None:
    with pytest.raises(error, match=reason):
        pair.ours.generate(**pair.inputs(PROMPTS), **options)


@pytest.mark.parametrize("token", [-1, 10**7])
def test_token_outside_the_vocabulary_is_rejected(token: int, pair: Pair) -> None:
    import torch

    with pytest.raises(InputError, match=f"token id {token} is out of range"):
        pair.ours.generate(torch.tensor([[4, token]]), max_new_tokens=2)


def test_padding_is_inferred_and_empty_stopping_criteria_are_ignored(pair: Pair) -> None:
    from transformers import StoppingCriteriaList

    ids = pair.inputs(PROMPTS)["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": pair.tokenizer.pad_token_id}
    expected = pair.theirs.generate(ids, **options)
    assert pair.ours.generate(ids, **options, stopping_criteria=StoppingCriteriaList()).tolist() == expected.tolist()


def test_forward_and_other_auto_classes_are_rejected(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="calling it for logits is not supported"):
        pair.ours(**pair.inputs(PROMPTS))
    with pytest.raises(InputError, match="input_ids are missing"):
        pair.ours.generate()
    with pytest.raises(PlanError, match="is for text-generation, and AutoModelForMaskedLM is not"):
        hasten.transformers.AutoModelForMaskedLM.from_pretrained(pair.ours.bundle.path)
    with pytest.raises(PlanError, match="is for text-generation, and AutoModelForSeq2SeqLM is not"):
        hasten.transformers.AutoModelForSeq2SeqLM.from_pretrained(pair.ours.bundle.path)


def test_saved_model_generates_the_same_with_and_without_transformers(pair: Pair, tmp_path: Path) -> None:
    pair.ours.save_pretrained(tmp_path / "saved")
    again = hasten.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    inputs = pair.inputs(PROMPTS)
    options = {"do_sample": False, "max_new_tokens": 6}
    assert again.generate(**inputs, **options).tolist() == pair.ours.generate(**inputs, **options).tolist()
    with hasten.pipeline("text-generation", tmp_path / "saved") as generate:
        expected = pair.tokenizer.decode(pair.ours.generate(**pair.inputs(PROMPTS[:1]), **options)[0])
        text = generate(PROMPTS[0], max_tokens=6)[0]["generated_text"]
        assert text.strip() == expected.removeprefix(tiny_decoders.BOS).strip()
