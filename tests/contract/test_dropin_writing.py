"""AutoModelForCausalLM of hasten.transformers against transformers' own generate, and its text-generation pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
import hasten.transformers
import writers
from hasten.core.errors import InputError, PlanError, UnsupportedError
from writing_pair import Pair, load_pair

PROMPTS = ["the cat sat on", "a dog", "prices rose by three percent in the second", "I"]
KINDS = {"gpt2": writers.byte_level, "llama": writers.whole_characters}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> Pair:
    folder = tmp_path_factory.mktemp("writer") / request.param
    backend = KINDS[request.param]()
    writers.model(request.param, writers.vocabulary_of(backend)).save_pretrained(folder)
    writers.theirs(backend, model_max_length=writers.CONTEXT).save_pretrained(folder)
    return load_pair("AutoModelForCausalLM", folder, texts_file)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 12},
    "until it is so long": {"max_length": 40},
    "not again": {"max_new_tokens": 12, "repetition_penalty": 1.5},
    "beams": {"max_new_tokens": 10, "num_beams": 3},
    "beams for long texts": {"max_new_tokens": 10, "num_beams": 2, "length_penalty": 2.0},
}


@pytest.mark.parametrize("given", OPTIONS.values(), ids=list(OPTIONS))
def test_the_same_tokens(given: dict[str, Any], pair: Pair) -> None:
    # Of a padded prompt transformers counts the padding as repeated; here it is no part of the text.
    batches = [[prompt] for prompt in PROMPTS] if "repetition_penalty" in given else [PROMPTS]
    for prompts in batches:
        inputs = pair.inputs(prompts)
        expected = pair.theirs.generate(**inputs, do_sample=False, **given)
        found = pair.ours.generate(**inputs, do_sample=False, **given)
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()


class Listening:
    """What transformers tells a streamer."""

    def __init__(self, heard: list[Any]) -> None:
        self.heard = heard

    def put(self, tokens: Any) -> None:
        self.heard.append(tokens.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_texts_that_end_are_padded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model with random weights ends with is whatever comes third in one of its texts."""
    inputs = pair.inputs(PROMPTS)
    width = inputs["input_ids"].shape[1]
    end = int(pair.theirs.generate(**inputs, do_sample=False, max_new_tokens=6)[0, width + 2])
    from dataclasses import replace

    # The one that came is kept, also where it is not the first of those that may.
    for ends in ((end,), (0, end)):
        monkeypatch.setattr(pair.ours._writer, "spec", replace(pair.ours._spec, end_ids=ends))
        monkeypatch.setattr(pair.ours, "_spec", replace(pair.ours._spec, end_ids=ends))
        options = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": list(ends), "pad_token_id": 1}
        for beams in (1, 3):
            asked = {**options, "num_beams": beams}
            assert pair.ours.generate(**inputs, **asked).tolist() == pair.theirs.generate(**inputs, **asked).tolist()
    told: dict[str, list[Any]] = {"ours": [], "theirs": []}
    for name, model in (("ours", pair.ours), ("theirs", pair.theirs)):
        model.generate(**pair.inputs(PROMPTS[:1]), **options, streamer=Listening(told[name]))
    assert told["ours"] == told["theirs"]
    assert told["ours"][-2] == [end]


def test_the_same_pipeline(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    made = [
        transformers.pipeline("text-generation", model=model, tokenizer=pair.tokenizer)
        for model in (pair.ours, pair.theirs)
    ]
    ours, theirs = (each(PROMPTS, max_new_tokens=8, do_sample=False) for each in made)
    assert ours == theirs
    assert "is not supported" not in caplog.text


def test_what_is_drawn_follows_torchs_seed(pair: Pair) -> None:
    import torch

    inputs = pair.inputs(PROMPTS[:1])
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(pair.ours.generate(**inputs, do_sample=True, temperature=3.0, max_new_tokens=12).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    several = pair.ours.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=4)
    assert len(several) == 3


def test_a_streamer_is_told_every_token(pair: Pair) -> None:
    from transformers import TextIteratorStreamer

    inputs = pair.inputs(PROMPTS[:1])
    streamer = TextIteratorStreamer(pair.tokenizer, skip_prompt=True)
    written = pair.ours.generate(**inputs, do_sample=False, max_new_tokens=8, streamer=streamer)
    new = written[0, inputs["input_ids"].shape[1] :]
    assert "".join(streamer) == pair.tokenizer.decode(new)


def test_stop_strings(pair: Pair) -> None:
    inputs = pair.inputs(PROMPTS[:1])
    width = inputs["input_ids"].shape[1]
    whole = pair.ours.generate(**inputs, do_sample=False, max_new_tokens=10)[0, width:]
    texts = [pair.tokenizer.decode(whole[place : place + 1]).strip() for place in range(2, 8)]
    # Bytes that are no characters are no text to stop at.
    stop = next((text for text in texts if text.isascii() and text), None)
    if stop is None:
        pytest.skip("the model writes no letter here")
    options = {"do_sample": False, "max_new_tokens": 10, "stop_strings": [stop], "tokenizer": pair.tokenizer}
    assert pair.ours.generate(**inputs, **options).tolist() == pair.theirs.generate(**inputs, **options).tolist()


@pytest.mark.parametrize(
    ("given", "error", "reason"),
    [
        ({"typical_p": 0.5}, UnsupportedError, "'typical_p' is not taken"),
        ({"num_return_sequences": 2}, UnsupportedError, "2 sequences of one prompt without sampling"),
        ({"num_beams": 2, "do_sample": True}, UnsupportedError, "beams that are drawn"),
        ({"eos_token_id": 0}, UnsupportedError, "end with the tokens"),
        ({"max_length": 2}, InputError, "leaves no token"),
        ({"max_new_tokens": 0}, InputError, "max_new_tokens is 0; it must be a whole number, at least 1"),
        ({"max_new_tokens": "5"}, InputError, "max_new_tokens is '5'"),
        ({"num_return_sequences": 0}, InputError, "num_return_sequences is 0"),
        ({"num_beams": 0}, InputError, "beams is 0"),
        ({"do_sample": True, "temperature": -1.0}, InputError, "temperature is -1.0"),
        ({"do_sample": True, "top_p": 2.0}, InputError, "top_p is 2.0"),
        ({"do_sample": True, "top_k": -3}, InputError, "top_k is -3"),
        ({"do_sample": True, "min_p": 7.0}, InputError, "min_p is 7.0"),
        ({"repetition_penalty": 0.0}, InputError, "repetition_penalty is 0.0"),
        ({"token_type_ids": np.zeros((4, 9))}, UnsupportedError, "'token_type_ids' is not taken"),
        ({"output_scores": True}, UnsupportedError, "'output_scores' is not taken"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], reason: str, pair: Pair) -> None:
    with pytest.raises(error, match=reason):
        pair.ours.generate(**pair.inputs(PROMPTS), **given)


@pytest.mark.parametrize("token", [-1, 10**7])
def test_tokens_that_are_none_are_refused(token: int, pair: Pair) -> None:
    import torch

    with pytest.raises(InputError, match=f"there is no token {token}"):
        pair.ours.generate(torch.tensor([[4, token]]), max_new_tokens=2)


def test_padding_is_known_by_its_token_and_what_is_empty_changes_nothing(pair: Pair) -> None:
    from transformers import StoppingCriteriaList

    ids = pair.inputs(PROMPTS)["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": pair.tokenizer.pad_token_id}
    expected = pair.theirs.generate(ids, **options)
    assert pair.ours.generate(ids, **options, stopping_criteria=StoppingCriteriaList()).tolist() == expected.tolist()


def test_logits_are_refused_and_other_classes(pair: Pair) -> None:
    with pytest.raises(UnsupportedError, match="only to generate"):
        pair.ours(**pair.inputs(PROMPTS))
    with pytest.raises(InputError, match="no input_ids given"):
        pair.ours.generate()
    with pytest.raises(PlanError, match="writes text, which AutoModelForMaskedLM does not"):
        hasten.transformers.AutoModelForMaskedLM.from_pretrained(pair.ours.bundle.path)
    with pytest.raises(PlanError, match="is for text-generation, which AutoModelForSeq2SeqLM is not"):
        hasten.transformers.AutoModelForSeq2SeqLM.from_pretrained(pair.ours.bundle.path)


def test_saved_and_in_the_twin_without_transformers(pair: Pair, tmp_path: Path) -> None:
    pair.ours.save_pretrained(tmp_path / "saved")
    again = hasten.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    inputs = pair.inputs(PROMPTS)
    given = {"do_sample": False, "max_new_tokens": 6}
    assert again.generate(**inputs, **given).tolist() == pair.ours.generate(**inputs, **given).tolist()
    with hasten.pipeline("text-generation", tmp_path / "saved") as write:
        expected = pair.tokenizer.decode(pair.ours.generate(**pair.inputs(PROMPTS[:1]), **given)[0])
        text = write(PROMPTS[0], max_tokens=6)[0]["generated_text"]
        assert text.strip() == expected.removeprefix(writers.BOS).strip()
