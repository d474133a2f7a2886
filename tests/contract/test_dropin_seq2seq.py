"""AutoModelForSeq2SeqLM of hasten.transformers against transformers' own generate, asked as published models ask."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import hasten
import hasten.transformers
import tiny_writers
from hasten.core.errors import InputError
from untimed import untimed
from writing_pair import Pair, load_pair

PROMPTS = ["the cat sat on a mat", "a dog", "prices rose by three percent in the second", "I"]
# In the configurations of a T5, of summarizers, and of Marian's translators.
OWN: dict[str, dict[str, Any]] = {
    "t5": {"num_beams": 3, "early_stopping": True, "max_length": 12},
    "bart": {"num_beams": 2, "no_repeat_ngram_size": 2, "min_length": 6, "max_length": 14, "length_penalty": 2.0}
    | {"early_stopping": True, "forced_bos_token_id": 1, "forced_eos_token_id": 2},
    "marian": {"num_beams": 3, "bad_words_ids": [[0], [40, 41]], "renormalize_logits": True, "max_length": 14}
    | {"forced_eos_token_id": 2},
}


# One of them each time; all with the slow ones.
KINDS = [pytest.param(kind, marks=() if kind == "bart" else pytest.mark.slow) for kind in OWN]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> Pair:
    import transformers

    folder = tmp_path_factory.mktemp("writer") / request.param
    tiny_writers.save(request.param, folder)
    told = transformers.GenerationConfig.from_pretrained(folder)
    told.update(**OWN[request.param])
    told.save_pretrained(folder)
    return load_pair("AutoModelForSeq2SeqLM", folder, texts_file)


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one beam": {"num_beams": 1},
    "so many": {"max_new_tokens": 7},
    "one beam, so many": {"num_beams": 1, "max_new_tokens": 7, "min_new_tokens": 5},
    "nothing twice": {"no_repeat_ngram_size": 1, "num_beams": 4},
    "not again": {"repetition_penalty": 1.5, "num_beams": 1},
    "later": {"early_stopping": False, "length_penalty": 0.5},
}


@pytest.mark.parametrize("given", OPTIONS.values(), ids=list(OPTIONS))
def test_the_same_tokens(given: dict[str, Any], pair: Pair) -> None:
    inputs = pair.inputs(PROMPTS)
    expected = pair.theirs.generate(**inputs, do_sample=False, **given)
    found = pair.ours.generate(**inputs, do_sample=False, **given)
    assert found.tolist() == expected.tolist()


def test_the_same_without_transformers(pair: Pair) -> None:
    """A bundle writes as the model's own configuration asks."""
    expected = pair.tokenizer.batch_decode(pair.theirs.generate(**pair.inputs(PROMPTS)), skip_special_tokens=True)
    with hasten.load(pair.ours.bundle.path) as write:
        found = [answer["generated_text"] for (answer,) in write(PROMPTS)]
    assert found == expected


def test_a_prompt_past_what_the_encoder_reads(pair: Pair) -> None:
    import torch

    reason = f"the prompt has 300 tokens, and the model reads up to {tiny_writers.CONTEXT}"
    with pytest.raises(InputError, match=reason):
        pair.ours.generate(torch.full((1, 300), 40))
    with hasten.load(pair.ours.bundle.path) as write, pytest.raises(InputError, match=reason):
        write([[40] * 300])


def test_an_odd_way_to_stop_is_refused(pair: Pair) -> None:
    with pytest.raises(hasten.UnsupportedError, match="early_stopping='never'"):
        pair.ours.generate(**pair.inputs(PROMPTS), early_stopping="never")


def test_summaries_and_translations(pair: Pair) -> None:
    """As transformers' pipelines answered while it had them."""
    with hasten.pipeline("summarization", pair.ours.bundle.path) as summarize:
        (found,) = summarize(PROMPTS[0])
    with hasten.pipeline("translation", pair.ours.bundle.path) as translate:
        assert translate([PROMPTS[0]]) == [[{"translation_text": found["summary_text"]}]]


@pytest.mark.slow
def test_what_the_configuration_says_for_a_task(pair: Pair, tmp_path: Path, texts_file: Path) -> None:
    folder = tmp_path / "several"
    shutil.copytree(pair.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    asked = {"prefix": "the dog: ", "num_beams": 1, "max_length": 9, "min_length": 3, "early_stopping": False}
    config["task_specific_params"] = {"translation_en_to_de": asked}
    (folder / "config.json").write_text(json.dumps(config))
    with untimed():
        translate = hasten.pipeline("translation_en_to_de", folder, data=texts_file, threads=1)
    given = {name: value for name, value in asked.items() if name != "prefix"}
    expected = pair.theirs.generate(**pair.inputs([f"the dog: {PROMPTS[0]}"]), **given)
    text = pair.tokenizer.decode(expected[0], skip_special_tokens=True)
    with translate:
        assert translate(PROMPTS[0]) == [{"translation_text": text}]
