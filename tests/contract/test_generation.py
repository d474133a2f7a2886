"""Text written over a decoder against transformers' own generate, on tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import writers
from hasten.core.generation import Sampling
from hasten.generation.generator import Generator
from hasten.generation.writing import Writer

KINDS = {"gpt2": writers.byte_level, "llama": writers.byte_fallback, "t5": writers.metaspace}
PROMPTS = (
    "the cat sat on",
    "a dog",
    "prices rose by three percent in the second",
    "she reads old books about ships and the sea",
    "is this",
    "the plot is dull and the acting",
    "I",
    "what a wonderful film, I would watch",
)


class Case:
    """A tiny model, its tokenizers, and whatever writes with it."""

    def __init__(self, kind: str) -> None:
        backend = KINDS[kind]()
        self.kind = kind
        self.module = writers.model(kind, writers.vocabulary_of(backend))
        self.spec = writers.spec_of(self.module)
        self.tokenizer = writers.ours(backend)
        self.theirs = writers.theirs(backend)

    def decoder(self, slots: int = 8) -> writers.PlainDecoder:
        return writers.PlainDecoder(self.module, slots)

    def generator(self, slots: int = 8) -> Generator:
        return Generator(self.spec, self.tokenizer, self.decoder(slots))

    def ids(self, prompt: str) -> list[int]:
        found: list[int] = self.theirs(prompt)["input_ids"]
        return found

    def expected(self, prompt: str, **options: Any) -> list[int]:
        """What transformers.generate writes after a prompt, the token that ends it left out."""
        import torch

        ids = torch.tensor([self.ids(prompt)])
        given = {"do_sample": False, "use_cache": True, **options}
        made = self.module.generate(ids, attention_mask=torch.ones_like(ids), **given)[0].tolist()
        new = made[1:] if self.module.config.is_encoder_decoder else made[ids.shape[1] :]
        ends = [place for place, token in enumerate(new) if token in self.spec.end_ids]
        return new[: ends[0]] if ends else new

    def write(self, prompts: Any, sampling: Sampling, slots: int = 8) -> list[list[int]]:
        writer = Writer(self.decoder(slots), self.spec, self.tokenizer)
        rows = [writer.row(self.ids(prompt), sampling, lambda _: None) for prompt in prompts]
        for row in rows:
            writer.add(row)
        while not writer.is_idle:
            writer.step()
        return [row.ids for row in rows]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_greedy_is_what_transformers_writes(case: Case) -> None:
    expected = [case.expected(prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert [case.write([prompt], Sampling(20))[0] for prompt in PROMPTS] == expected
    # Models that say the same whatever they read would prove nothing.
    assert len({tuple(ids) for ids in expected}) > 6
    assert np.mean([len(set(ids)) for ids in expected if len(ids) == 20]) > 5


def test_prompts_together_are_written_as_alone(case: Case) -> None:
    alone = [case.write([prompt], Sampling(20))[0] for prompt in PROMPTS]
    assert case.write(PROMPTS, Sampling(20)) == alone
    assert case.write(PROMPTS, Sampling(20), slots=3) == alone
