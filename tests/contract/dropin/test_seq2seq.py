"""AutoModelForSeq2SeqLM of hasten.transformers compared with transformers, with options of published models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import hasten
import hasten.transformers
from hasten.core.errors import InputError
from support.dropin import Pair, load_pair
from support.fake_bench import fake_benchmark
from support.models import tiny_generators

PROMPTS = ["the cat sat on a mat", "a dog", "prices rose by three percent in the second", "I"]
# Generation configurations of a T5, of summarizers, and of Marian's translation models.
GENERATION_CONFIGS: dict[str, dict[str, Any]] = {
    "t5": {"num_beams": 3, "early_stopping": True, "max_length": 12},
    "bart": {"num_beams": 2, "no_repeat_ngram_size": 2, "min_length": 6, "max_length": 14, "length_penalty": 2.0}
    | {"early_stopping": True, "forced_bos_token_id": 1, "forced_eos_token_id": 2},
    "marian": {"num_beams": 3, "bad_words_ids": [[0], [40, 41]], "renormalize_logits": True, "max_length": 14}
    | {"forced_eos_token_id": 2},
}


# One architecture in every run; all of them in slow runs.
KINDS = [pytest.param(kind, marks=() if kind == "bart" else pytest.mark.slow) for kind in GENERATION_CONFIGS]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, texts_file: Path) -> Pair:
    import transformers

    folder = tmp_path_factory.mktemp("generator") / request.param
    tiny_generators.save(request.param, folder)
    config = transformers.GenerationConfig.from_pretrained(folder)
    config.update(**GENERATION_CONFIGS[request.param])
    config.save_pretrained(folder)
    return load_pair("AutoModelForSeq2SeqLM", folder, texts_file)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one beam": {"num_beams": 1},
    "max new tokens": {"max_new_tokens": 7},
    "one beam, min and max new tokens": {"num_beams": 1, "max_new_tokens": 7, "min_new_tokens": 5},
    "no repeated n-grams": {"no_repeat_ngram_size": 1, "num_beams": 4},
    "repetition penalty": {"repetition_penalty": 1.5, "num_beams": 1},
    "no early stopping": {"early_stopping": False, "length_penalty": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_tokens_equal_those_of_transformers(options: dict[str, Any], pair: Pair) -> None:
    inputs = pair.inputs(PROMPTS)
    expected = pair.theirs.generate(**inputs, do_sample=False, **options)
    output = pair.ours.generate(**inputs, do_sample=False, **options)
    assert output.tolist() == expected.tolist()


def test_load_uses_the_generation_config_of_the_model(pair: Pair) -> None:
    expected = pair.tokenizer.batch_decode(pair.theirs.generate(**pair.inputs(PROMPTS)), skip_special_tokens=True)
    with hasten.load(pair.ours.bundle.path) as generate:
        texts = [answer["generated_text"] for (answer,) in generate(PROMPTS)]
    assert texts == expected


def test_prompt_longer_than_the_encoder_limit_is_rejected(pair: Pair) -> None:
    import torch

    reason = f"the prompt has 300 tokens, and the model reads up to {tiny_generators.CONTEXT}"
    with pytest.raises(InputError, match=reason):
        pair.ours.generate(torch.full((1, 300), 40))
    with hasten.load(pair.ours.bundle.path) as generate, pytest.raises(InputError, match=reason):
        generate([[40] * 300])


def test_early_stopping_never_is_rejected(pair: Pair) -> None:
    with pytest.raises(hasten.UnsupportedError, match="early_stopping='never'"):
        pair.ours.generate(**pair.inputs(PROMPTS), early_stopping="never")


def test_summarization_and_translation_pipelines_answer_alike(pair: Pair) -> None:
    """With the fields of the pipelines that transformers 5 removed."""
    with hasten.pipeline("summarization", pair.ours.bundle.path) as summarize:
        (summary,) = summarize(PROMPTS[0])
    with hasten.pipeline("translation", pair.ours.bundle.path) as translate:
        assert translate([PROMPTS[0]]) == [[{"translation_text": summary["summary_text"]}]]


@pytest.mark.slow
def test_task_specific_parameters_of_the_configuration_are_used(pair: Pair, tmp_path: Path, texts_file: Path) -> None:
    folder = tmp_path / "several"
    shutil.copytree(pair.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    params = {"prefix": "the dog: ", "num_beams": 1, "max_length": 9, "min_length": 3, "early_stopping": False}
    config["task_specific_params"] = {"translation_en_to_de": params}
    (folder / "config.json").write_text(json.dumps(config))
    with fake_benchmark():
        translate = hasten.pipeline("translation_en_to_de", folder, data=texts_file, threads=1)
    options = {name: value for name, value in params.items() if name != "prefix"}
    expected = pair.theirs.generate(**pair.inputs([f"the dog: {PROMPTS[0]}"]), **options)
    text = pair.tokenizer.decode(expected[0], skip_special_tokens=True)
    with translate:
        assert translate(PROMPTS[0]) == [{"translation_text": text}]
