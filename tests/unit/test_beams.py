"""Beam search against transformers' own, on a tiny model, and the slots it asks for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import writers
from hasten.core.errors import InputError
from hasten.core.generation import Finish, GenerationSpec, Sampling
from hasten.generation.beams import BeamSearch
from hasten.generation.options import sampling_of
from hasten.generation.rows import Piece, Row
from hasten.generation.writing import Writer

PROMPTS = ((7, 30, 12), (100,), (55, 8, 9, 201, 17), (20, 21, 22, 23), (5, 5, 5), (250, 3))
# Enough of them that texts end at different lengths.
MANY_ENDS = tuple(range(2, 290, 5))


@cache
def backend() -> Any:
    return writers.byte_level()


@cache
def module() -> Any:
    return writers.model("gpt2", writers.vocabulary_of(backend()))


def expected(prompt: tuple[int, ...], sampling: Sampling, ends: tuple[int, ...]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    made = (
        module()
        .generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=sampling.beams,
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
    # Behind the end there may be padding: of the best text all that end in it are cut.
    places = [place for place, token in enumerate(made) if token in ends]
    return made[: places[0]] if places else made


def writer(decoder: writers.PlainDecoder, ends: tuple[int, ...]) -> Writer:
    spec = replace(writers.spec_of(module()), end_ids=ends)
    return Writer(decoder, spec, writers.ours(backend()))


def written(
    prompts: tuple[tuple[int, ...], ...], sampling: Sampling, ends: tuple[int, ...], slots: int = 8
) -> tuple[list[Row], list[list[Piece]], writers.PlainDecoder]:
    decoder = writers.PlainDecoder(module(), slots)
    loop = writer(decoder, ends)
    told: list[list[Piece]] = [[] for _ in prompts]
    rows = [loop.row(prompt, sampling, pieces.append) for prompt, pieces in zip(prompts, told, strict=True)]
    for row in rows:
        loop.add(row)
    while not loop.is_idle:
        loop.step()
    return rows, told, decoder


@pytest.mark.parametrize("ends", [(2,), MANY_ENDS], ids=["one end", "many ends"])
@pytest.mark.parametrize(
    "asked",
    [
        {"beams": 2},
        {"beams": 5},
        {"beams": 3, "length_penalty": 0.0},
        {"beams": 3, "length_penalty": 2.5},
        {"beams": 4, "length_penalty": -1.0},
        {"beams": 3, "repetition_penalty": 1.5},
        {"beams": 3, "early_stopping": True},
        {"beams": 4, "early_stopping": True, "length_penalty": 2.0},
        {"beams": 3, "no_repeat_ngram_size": 2},
        {"beams": 3, "min_tokens": 6, "no_repeat_ngram_size": 1},
        {"beams": 3, "bad_words_ids": [[7], [30, 12], *([token] for token in range(100, 200))]},
    ],
    ids=str,
)
def test_texts_are_those_of_transformers(asked: dict[str, Any], ends: tuple[int, ...]) -> None:
    sampling = sampling_of(Sampling(max_tokens=12), asked)
    rows, _, _ = written(PROMPTS, sampling, ends)
    assert [row.ids for row in rows] == [expected(prompt, sampling, ends) for prompt in PROMPTS]


def test_beams_find_other_texts_than_greed_does() -> None:
    """Else the comparison above would prove nothing."""
    rows, _, _ = written(PROMPTS, Sampling(12, beams=4), MANY_ENDS)
    greedy, _, _ = written(PROMPTS, Sampling(12), MANY_ENDS)
    assert sum(beam.ids != one.ids for beam, one in zip(rows, greedy, strict=True)) >= 3
    assert {row.finish for row in rows} == {Finish.STOP, Finish.LENGTH}
    assert len({len(row.ids) for row in rows}) > 2


def test_a_search_is_told_once_at_its_end_and_leaves_no_slot_taken() -> None:
    rows, told, decoder = written(PROMPTS, Sampling(8, beams=3), MANY_ENDS, slots=7)
    assert [len(pieces) for pieces in told] == [1] * len(PROMPTS)
    assert [pieces[0].finish for pieces in told] == [row.finish for row in rows]
    assert decoder.rows == {}
    # Two searches of three slots ran together, never more.
    assert max(len(slots) for what, slots in decoder.log if what == "step") == 6


def test_beams_that_go_on_stay_where_they_are() -> None:
    """A copy of what was read is the dear part: as many as there are beams that share a beginning, and no more."""
    search = BeamSearch(Sampling(6, beams=3), (1,), GenerationSpec(writers.CONTEXT, 50, (0,)))
    random = np.random.default_rng(0)
    assert search.advance(random.standard_normal((1, 50)).astype(np.float32)) == [0, 0, 0]
    decoder = writers.PlainDecoder(module(), 3)
    loop = writer(decoder, (2,))
    row = loop.row((7, 30, 12), Sampling(12, beams=3), lambda _: None)
    loop.add(row)
    while not loop.is_idle:
        loop.step()
    copies = [len(slots) for what, slots in decoder.log if what == "copy"]
    assert copies[0] == 2
    assert 0 < sum(copies[1:]) < 2 * 11


def test_stop_strings_end_beams() -> None:
    plain, told, _ = written(PROMPTS[:1], Sampling(12, beams=3), (2,))
    text = told[0][0].text
    stop = text[len(text) // 2 :][:2]
    rows, told, _ = written(PROMPTS[:1], Sampling(12, beams=3, stop=(stop,)), (2,))
    assert told[0][0].finish is Finish.STOP
    assert stop not in told[0][0].text
    assert stop in writers.ours(backend()).decode(rows[0].ids)
    assert len(rows[0].ids) < len(plain[0].ids)


def test_more_beams_than_slots() -> None:
    loop = writer(writers.PlainDecoder(module(), 2), (2,))
    with pytest.raises(InputError, match="3 beams need as many slots, and there are 2"):
        loop.row((1,), Sampling(4, beams=3), lambda _: None)
