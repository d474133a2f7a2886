"""Beam search compared with transformers on a tiny model, and its use of slots."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import InputError
from hasten.core.generation_types import Finish, GenerationSpec, SamplingParams
from hasten.generation.beams import BeamSearch
from hasten.generation.options import sampling_params
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta, TextSequence
from support.models import tiny_decoders

PROMPTS = ((7, 30, 12), (100,), (55, 8, 9, 201, 17), (20, 21, 22, 23), (5, 5, 5), (250, 3))
# Enough tokens that texts end at different lengths.
MANY_ENDS = tuple(range(2, 290, 5))


@cache
def backend() -> Any:
    return tiny_decoders.byte_level()


@cache
def module() -> Any:
    return tiny_decoders.model("gpt2", tiny_decoders.vocabulary_of(backend()))


def expected(prompt: tuple[int, ...], sampling: SamplingParams, ends: tuple[int, ...]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    expected_texts = (
        module()
        .generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=sampling.num_beams,
            do_sample=False,
            length_penalty=sampling.length_penalty,
            repetition_penalty=sampling.repetition_penalty,
            no_repeat_ngram_size=sampling.no_repeat_ngram_size,
            bad_words_ids=[list(word) for word in sampling.bad_words_ids] or None,
            early_stopping=sampling.early_stopping,
            min_new_tokens=sampling.min_tokens or None,
            max_new_tokens=sampling.max_tokens,
            eos_token_id=list(ends),
        )[0]
        .tolist()[len(prompt) :]
    )
    # Padding may follow the end-of-sequence token.
    indices = [index for index, token in enumerate(expected_texts) if token in ends]
    return expected_texts[: indices[0]] if indices else expected_texts


def make_scheduler(decoder: tiny_decoders.PlainDecoder, ends: tuple[int, ...]) -> DecodeScheduler:
    spec = replace(tiny_decoders.spec_of(module()), eos_token_ids=ends)
    return DecodeScheduler(decoder, spec, tiny_decoders.ours(backend()))


def run_search(
    prompts: tuple[tuple[int, ...], ...], sampling: SamplingParams, ends: tuple[int, ...], slots: int = 8
) -> tuple[list[TextSequence], list[list[TextDelta]], tiny_decoders.PlainDecoder]:
    decoder = tiny_decoders.PlainDecoder(module(), slots)
    loop = make_scheduler(decoder, ends)
    deltas: list[list[TextDelta]] = [[] for _ in prompts]
    rows = [loop.new_sequence(prompt, sampling, pieces.append) for prompt, pieces in zip(prompts, deltas, strict=True)]
    for row in rows:
        loop.add(row)
    while not loop.is_idle:
        loop.step()
    return rows, deltas, decoder


@pytest.mark.parametrize("ends", [(2,), MANY_ENDS], ids=["one end", "many ends"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 5},
        {"num_beams": 3, "length_penalty": 0.0},
        {"num_beams": 3, "length_penalty": 2.5},
        {"num_beams": 4, "length_penalty": -1.0},
        {"num_beams": 3, "repetition_penalty": 1.5},
        {"num_beams": 3, "early_stopping": True},
        {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0},
        {"num_beams": 3, "no_repeat_ngram_size": 2},
        {"num_beams": 3, "min_tokens": 6, "no_repeat_ngram_size": 1},
        {"num_beams": 3, "bad_words_ids": [[7], [30, 12], *([token] for token in range(100, 200))]},
    ],
    ids=str,
)
def test_beam_search_matches_transformers(options: dict[str, Any], ends: tuple[int, ...]) -> None:
    sampling = sampling_params(SamplingParams(max_tokens=12), options)
    rows, _, _ = run_search(PROMPTS, sampling, ends)
    assert [row.ids for row in rows] == [expected(prompt, sampling, ends) for prompt in PROMPTS]


def test_beam_search_differs_from_greedy() -> None:
    """Otherwise the comparison above would prove nothing."""
    rows, _, _ = run_search(PROMPTS, SamplingParams(12, num_beams=4), MANY_ENDS)
    greedy, _, _ = run_search(PROMPTS, SamplingParams(12), MANY_ENDS)
    assert sum(beam.ids != one.ids for beam, one in zip(rows, greedy, strict=True)) >= 3
    assert {row.finish for row in rows} == {Finish.STOP, Finish.LENGTH}
    assert len({len(row.ids) for row in rows}) > 2


def test_beam_search_emits_once_and_frees_its_slots() -> None:
    rows, deltas, decoder = run_search(PROMPTS, SamplingParams(8, num_beams=3), MANY_ENDS, slots=7)
    assert [len(pieces) for pieces in deltas] == [1] * len(PROMPTS)
    assert [pieces[0].finish for pieces in deltas] == [row.finish for row in rows]
    assert decoder.rows == {}
    # Two searches of three slots ran together, never more.
    assert max(len(slots) for call, slots in decoder.log if call == "step") == 6


def test_continuing_beams_keep_their_slots() -> None:
    """Forking a slot is expensive: only beams that share a parent need it."""
    search = BeamSearch(SamplingParams(6, num_beams=3), (1,), GenerationSpec(tiny_decoders.CONTEXT, 50, (0,)))
    random = np.random.default_rng(0)
    assert search.advance(random.standard_normal((1, 50)).astype(np.float32)) == [0, 0, 0]
    decoder = tiny_decoders.PlainDecoder(module(), 3)
    loop = make_scheduler(decoder, (2,))
    row = loop.new_sequence((7, 30, 12), SamplingParams(12, num_beams=3), lambda _: None)
    loop.add(row)
    while not loop.is_idle:
        loop.step()
    copies = [len(slots) for call, slots in decoder.log if call == "copy"]
    assert copies[0] == 2
    assert 0 < sum(copies[1:]) < 2 * 11


def test_stop_strings_end_beams() -> None:
    plain, deltas, _ = run_search(PROMPTS[:1], SamplingParams(12, num_beams=3), (2,))
    text = deltas[0][0].text
    stop = text[len(text) // 2 :][:2]
    rows, deltas, _ = run_search(PROMPTS[:1], SamplingParams(12, num_beams=3, stop=(stop,)), (2,))
    assert deltas[0][0].finish is Finish.STOP
    assert stop not in deltas[0][0].text
    assert stop in tiny_decoders.ours(backend()).decode(rows[0].ids)
    assert len(rows[0].ids) < len(plain[0].ids)


def test_more_beams_than_slots_are_rejected() -> None:
    loop = make_scheduler(tiny_decoders.PlainDecoder(module(), 2), (2,))
    with pytest.raises(InputError, match="3 beams need as many slots, and there are 2"):
        loop.new_sequence((1,), SamplingParams(4, num_beams=3), lambda _: None)
