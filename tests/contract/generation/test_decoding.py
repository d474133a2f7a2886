"""Generation with tiny models, on a plain reference decoder and the real one, compared with transformers."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.core.errors import InputError, StageError
from hasten.core.generation_types import Finish, SamplingParams
from hasten.generation.generator import Generator
from hasten.generation.scheduler import DecodeScheduler
from hasten.generation.sequences import TextDelta
from support.models import tiny_decoders

KINDS = {
    "gpt2": tiny_decoders.byte_level,
    "llama": tiny_decoders.whole_characters,
    "t5": tiny_decoders.metaspace,
    "bart": tiny_decoders.byte_level,
}
# Of what kind of model, and which decoder.
CASES = [(kind, "onnxruntime") for kind in ("gpt2", "llama", "t5")]
PROMPTS = (
    "the cat sat on",
    "a dog",
    "prices rose by three percent in the second",
    "she reads old books",
    "is this",
    "the plot is dull and the acting",
    "I",
    "what a wonderful film",
)
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


class Case:
    """A tiny model with its tokenizers and a decoder."""

    def __init__(self, kind: str, runtime: str, folder: Path) -> None:
        backend = KINDS[kind]()
        self.module = tiny_decoders.model(kind, tiny_decoders.vocabulary_of(backend))
        self.spec = tiny_decoders.spec_of(self.module, chat_template=TEMPLATE)
        self.tokenizer = tiny_decoders.ours(backend)
        self.theirs = tiny_decoders.theirs(backend)
        self.runtime, self.folder = runtime, folder

    @property
    def reads_apart(self) -> bool:
        return bool(self.spec.decoder_start_token_ids)

    def decoder(self, slots: int = 8) -> Any:
        if self.runtime == "plain":
            return tiny_decoders.PlainDecoder(self.module, slots)
        return tiny_decoders.onnx_decoder(self.module, self.folder, slots)

    def generator(self, slots: int = 8, **spec_fields: Any) -> Generator:
        return Generator(replace(self.spec, **spec_fields), self.tokenizer, self.decoder(slots))

    def ids(self, prompt: str) -> list[int]:
        result: list[int] = self.theirs(prompt)["input_ids"]
        return result

    def expected(self, prompt: str, **options: Any) -> list[int]:
        """Return the tokens of transformers.generate after a prompt, without the end-of-sequence token."""
        import torch

        ids = torch.tensor([self.ids(prompt)])
        before = len(self.spec.decoder_start_token_ids) or ids.shape[1]
        # What is forced to come first counts as written there.
        options["max_new_tokens"] += max(0, len(self.spec.decoder_start_token_ids) - 1)
        generated = self.module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[
            0
        ].tolist()
        new = generated[before:]
        ends = [position for position, token in enumerate(new) if token in self.spec.eos_token_ids]
        return new[: ends[0]] if ends else new

    def write(self, prompts: Any, *samplings: SamplingParams, slots: int = 8) -> list[list[int]]:
        """Return the tokens after each prompt; parameters are for all prompts, or one per prompt."""
        scheduler = DecodeScheduler(self.decoder(slots), self.spec, self.tokenizer)
        modifiers = samplings if len(samplings) == len(prompts) else samplings * len(prompts)
        rows = [
            scheduler.new_sequence(self.ids(prompt), each, lambda _: None)
            for prompt, each in zip(prompts, modifiers, strict=True)
        ]
        for row in rows:
            scheduler.add(row)
        while not scheduler.is_idle:
            scheduler.step()
        return [row.ids for row in rows]


@pytest.fixture(scope="module", params=CASES, ids=lambda param: "-".join(param))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case for tests that do not depend on the decoder."""
    return Case("gpt2", "plain", tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", "plain", tmp_path_factory.mktemp("decoder"))


def test_greedy_decoding_matches_transformers(case: Case) -> None:
    expected = [case.expected(prompt, max_new_tokens=16) for prompt in PROMPTS]
    assert case.write(PROMPTS, SamplingParams(16)) == expected
    # Models that say the same whatever they read, or one word again and again, would prove nothing.
    assert len({tuple(ids) for ids in expected}) > 6
    assert np.mean([len(set(ids)) for ids in expected if len(ids) == 16]) > 5


def test_batched_prompts_match_single_prompts(case: Case) -> None:
    """Greedy decoding, sampling and beam search in one batch, also with fewer slots than prompts."""
    modifiers = [
        SamplingParams(12),
        SamplingParams(12, 0.9, seed=3),
        SamplingParams(12, num_beams=2),
        SamplingParams(5, 1.2, top_k=20, seed=4),
    ]
    modifiers += [
        SamplingParams(9, repetition_penalty=1.4),
        SamplingParams(12, 0.7, top_p=0.9, seed=5),
        SamplingParams(7),
        SamplingParams(3),
    ]
    alone = [case.write([prompt], each)[0] for prompt, each in zip(PROMPTS, modifiers, strict=True)]
    assert case.write(PROMPTS, *modifiers) == alone
    assert case.write(PROMPTS, *modifiers, slots=3) == alone
    assert case.write(PROMPTS[::-1], *modifiers[::-1], slots=5) == alone[::-1]


@pytest.mark.parametrize(("num_beams", "length_penalty"), [(2, 1.0), (4, 0.2), (3, 2.0)])
def test_beam_search_matches_transformers(case: Case, num_beams: int, length_penalty: float) -> None:
    search_options = {"num_beams": num_beams, "length_penalty": length_penalty, "max_new_tokens": 10}
    expected = [case.expected(prompt, **search_options) for prompt in PROMPTS[:3]]
    assert case.write(PROMPTS[:3], SamplingParams(10, num_beams=num_beams, length_penalty=length_penalty)) == expected


def test_repetition_penalty_matches_transformers(case: Case) -> None:
    expected = [case.expected(prompt, max_new_tokens=12, repetition_penalty=1.6) for prompt in PROMPTS[:4]]
    assert case.write(PROMPTS[:4], SamplingParams(12, repetition_penalty=1.6)) == expected
    assert expected != [case.expected(prompt, max_new_tokens=12) for prompt in PROMPTS[:4]]


def test_deltas_join_to_the_text_of_the_tokens(case: Case) -> None:
    with case.generator() as write:
        for prompt in PROMPTS[:3]:
            pieces = list(write(prompt, stream=True, max_tokens=12))
            new = case.expected(prompt, max_new_tokens=12)
            before = [] if case.reads_apart else case.ids(prompt)
            text = case.tokenizer.decode([*before, *new], skips_special=True)
            assert "".join(pieces) == text[len(case.tokenizer.decode(before, skips_special=True)) :]
            assert len(pieces) > 1


def test_answers_have_the_shape_of_transformers_pipeline(gpt2: Case) -> None:
    import transformers

    theirs = transformers.pipeline("text-generation", model=gpt2.module, tokenizer=gpt2.theirs)
    search_options = {"max_new_tokens": 9, "do_sample": False}
    with gpt2.generator() as write:
        assert write(PROMPTS[0], max_tokens=9) == theirs(PROMPTS[0], **search_options)
        assert write(list(PROMPTS), max_tokens=9) == theirs(list(PROMPTS), **search_options)
        assert write(PROMPTS[0], max_tokens=9, return_full_text=False) == theirs(
            PROMPTS[0], return_full_text=False, **search_options
        )
        assert write([], max_tokens=9) == []


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_chat_answers_match_transformers_pipeline(gpt2: Case, last: str) -> None:
    import transformers

    gpt2.theirs.chat_template = TEMPLATE
    theirs = transformers.pipeline("text-generation", model=gpt2.module, tokenizer=gpt2.theirs)
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    chat = chat if last == "assistant" else chat[:1]
    with gpt2.generator() as write:
        expected = theirs(chat, max_new_tokens=9, do_sample=False)
        assert write(chat, max_tokens=9) == expected
        assert expected[0]["generated_text"][-1]["role"] == "assistant"
        short = [{"role": "user", "content": "a dog"}]
        assert write([chat, short], max_tokens=9) == [expected, write(short, max_tokens=9)]
        text = write(chat, max_tokens=9, return_full_text=False)[0]["generated_text"]
        assert "".join(write(chat, max_tokens=9, stream=True)) == text


def test_message_parts_are_continued_with_another_part(gpt2: Case) -> None:
    user, output = {"role": "user", "content": "the cat"}, [{"type": "text", "text": "sat"}]
    with gpt2.generator() as write:
        (whole,) = write([user, {"role": "assistant", "content": "sat"}], max_tokens=5)
        (parts,) = write([user, {"role": "assistant", "content": output}], max_tokens=5)
    content = parts["generated_text"][-1]["content"]
    assert content[:1] == output
    assert "".join(part["text"] for part in content) == whole["generated_text"][-1]["content"]


def test_encoder_decoder_returns_only_the_answer(tmp_path: Path) -> None:
    case = Case("t5", "onnxruntime", tmp_path)
    new = case.expected(PROMPTS[0], max_new_tokens=9)
    with case.generator() as write:
        answer = [{"generated_text": case.theirs.decode(new, skip_special_tokens=True)}]
        assert write(PROMPTS[0], max_tokens=9) == answer
        full = write(PROMPTS[0], max_tokens=9, return_full_text=True)
        assert full[0]["generated_text"] == PROMPTS[0] + answer[0]["generated_text"]


def test_forced_first_tokens_are_not_part_of_the_text(tmp_path: Path) -> None:
    """BART's answers begin with two tokens, of which transformers counts one as generated."""
    case = Case("bart", "onnxruntime", tmp_path)
    assert len(case.spec.decoder_start_token_ids) == 2
    for each, search_options in (
        (SamplingParams(6), {}),
        (SamplingParams(6, num_beams=3, length_penalty=2.0), {"num_beams": 3, "length_penalty": 2.0}),
    ):
        expected = [case.expected(prompt, max_new_tokens=6, **search_options) for prompt in PROMPTS[:4]]
        assert case.write(PROMPTS[:4], each) == expected
        assert len({tuple(ids) for ids in expected}) > 2


def test_sentencepiece_space_between_words_is_kept(llama: Case) -> None:
    """A text continues its prompt; the answer of a chat begins anew."""
    the, cat, sat = (llama.tokenizer.id_of(word) for word in ("▁the", "▁cat", "▁sat"))
    decoder = Says({(the,): [cat, sat]}, llama.spec.vocab_size)
    write = Generator(llama.spec, llama.tokenizer, decoder)
    assert write("the", max_tokens=2) == [{"generated_text": "the cat sat"}]
    answer = write([{"role": "user", "content": "x"}], max_tokens=2, return_full_text=False)
    assert answer == [{"generated_text": "cat sat"}]


class Says(tiny_decoders.PlainDecoder):
    """A decoder that generates fixed tokens for any prompt."""

    def __init__(self, words: dict[tuple[int | None, ...], list[int | None]], vocabulary: int) -> None:
        self.slots, self.vocabulary = 2, vocabulary
        self.words = next(iter(words.values()))
        self.rows, self.prompts, self.log = {}, {}, []

    def prefill(self, slot: int, ids: Any) -> Any:
        self.rows[slot], self.prompts[slot] = [], []
        return self._said(slot)

    def decode(self, slots: Any, ids: Any) -> Any:
        for slot, token in zip(slots, ids, strict=True):
            self.rows[slot] = [*self.rows[slot], int(token)]
        return np.stack([self._said(slot) for slot in slots])

    def _said(self, slot: int) -> Any:
        logits = np.zeros(self.vocabulary, np.float32)
        logits[self.words[len(self.rows[slot])]] = 1
        return logits


def test_seed_reproduces_the_text(case: Case) -> None:
    with case.generator() as write:
        first = write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=1)
        assert write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=1) == first
        assert write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=2) != first
        several = write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=1, num_return_sequences=3)
        assert several[0] == first[0]
        assert len({answer["generated_text"] for answer in several}) == 3


def test_defaults_come_from_the_model(gpt2: Case) -> None:
    defaults = SamplingParams(max_tokens=4, temperature=1.0, seed=9)
    with gpt2.generator(defaults=defaults) as write:
        assert write(PROMPTS[0]) == write(PROMPTS[0], max_tokens=4, temperature=1.0, seed=9)
        greedy = write(PROMPTS[0], temperature=0, return_full_text=False)
    new = gpt2.expected(PROMPTS[0], max_new_tokens=4)
    assert greedy == [{"generated_text": gpt2.theirs.decode(new)}]


def test_stop_string_ends_the_text_and_is_excluded(case: Case) -> None:
    with case.generator() as write:
        whole = write(PROMPTS[0], max_tokens=16, return_full_text=False)[0]["generated_text"]
        stop = whole[6:9]
        cut = whole[: whole.index(stop)]
        assert write(PROMPTS[0], max_tokens=16, stop=stop, return_full_text=False) == [{"generated_text": cut}]
        assert "".join(write(PROMPTS[0], max_tokens=16, stop=[stop, "never"], stream=True)) == cut
        assert write(PROMPTS[0], max_tokens=16, stop="never met", return_full_text=False)[0]["generated_text"] == whole


def test_text_ends_at_the_context_limit(case: Case) -> None:
    deltas: list[TextDelta] = []
    scheduler = DecodeScheduler(case.decoder(), case.spec, case.tokenizer)
    row = scheduler.new_sequence(case.ids(PROMPTS[0]), SamplingParams(10_000), deltas.append)
    scheduler.add(row)
    while not scheduler.is_idle:
        scheduler.step()
    if row.finish is Finish.LENGTH:
        assert len(row.ids) + (len(case.spec.decoder_start_token_ids) or len(row.prompt)) == tiny_decoders.CONTEXT
    assert deltas[-1].finish is row.finish is not None
    assert [piece.finish for piece in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_prompt_beyond_the_context_is_rejected(case: Case) -> None:
    with case.generator() as write:
        with pytest.raises(InputError, match=r"the prompt has \d+ tokens") as caught:
            write("the cat sat on the mat. " * 40)
        assert "64" in str(caught.value)
        assert write(PROMPTS[0], max_tokens=2)


@pytest.mark.parametrize(
    ("payload", "options", "message"),
    [
        (3, {}, "the prompt is 3; it must be a text or a chat"),
        (None, {}, "the prompt is None"),
        (["a", 3], {}, "the prompt is 3"),
        ("a \ud800", {}, "the prompt is not valid Unicode: lone surrogate at character 2"),
        ([{"role": "user", "content": "\ud800"}], {}, "the chat is not valid Unicode"),
        ([[1, 99999]], {}, "token id 99999 is out of range"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
        ("a", {"num_return_sequences": 2}, "would all be the same"),
        ("a", {"num_return_sequences": 0}, "num_return_sequences is 0"),
        ("a", {"num_return_sequences": 2, "temperature": 1.0, "stream": True}, "a stream returns one text"),
        (["a", "b"], {"stream": True}, "the prompt is ['a', 'b']"),
        ("a", {"num_beams": 99}, "99 beams need as many slots, and there are 8"),
        ("a", {"max_new_tokens": 2}, "use max_tokens"),
        ([{"role": "user"}], {}, "message 1 has no content"),
    ],
    ids=str,
)
def test_bad_input_is_a_one_line_error(gpt2: Case, payload: Any, options: dict[str, Any], message: str) -> None:
    with gpt2.generator() as write, pytest.raises(InputError) as caught:
        write(payload, **options)
    assert message in str(caught.value)


def test_empty_prompt_becomes_the_bos_token(gpt2: Case) -> None:
    """As in transformers; without a bos token an empty prompt is an error."""
    with gpt2.generator() as write:
        expected_ids = gpt2.write([tiny_decoders.BOS], SamplingParams(5))[0]
        assert write("", max_tokens=5) == [
            {"generated_text": gpt2.theirs.decode(expected_ids, skip_special_tokens=True)}
        ]
    with gpt2.generator(special_tokens={}) as write, pytest.raises(InputError, match="the prompt is empty"):
        write("")


def test_closed_stream_frees_its_slot(case: Case) -> None:
    with case.generator(slots=1) as write:
        stream = write(PROMPTS[0], max_tokens=40, temperature=1.0, seed=1, stream=True)
        next(stream)
        stream.close()
        assert write._scheduler.running == 0
        # With one slot alone this would wait forever.
        assert write(PROMPTS[0], max_tokens=3)
        write(PROMPTS[0], max_tokens=40, stream=True)  # never asked for a piece
        assert write(PROMPTS[1], max_tokens=3)


def test_threads_share_a_batch(case: Case) -> None:
    with case.generator(slots=4) as write:
        alone = [write(prompt, max_tokens=10) for prompt in PROMPTS]
        result: dict[int, Any] = {}

        def work(position: int) -> None:
            result[position] = write(PROMPTS[position], max_tokens=10)

        threads = [threading.Thread(target=work, args=(position,)) for position in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [result[position] for position in range(len(PROMPTS))] == alone
        assert write._scheduler.is_idle


def test_failure_in_another_threads_step_is_an_error(gpt2: Case) -> None:
    class Fails(tiny_decoders.PlainDecoder):
        def prefill(self, slot: int, ids: Any) -> Any:
            raise StageError("the runtime failed")

    write = Generator(gpt2.spec, gpt2.tokenizer, Fails(gpt2.module))
    stream = write(PROMPTS[0], stream=True)
    waiting = write._scheduler.new_sequence(gpt2.ids(PROMPTS[0]), SamplingParams(3), lambda _: None)
    write._scheduler.add(waiting)
    with pytest.raises(StageError, match="the runtime failed"):
        next(stream)
    assert write._scheduler.is_idle
    # A caller that waited for it must not get an empty text.
    with pytest.raises(StageError, match="the text was not finished"):
        next(write._deltas(waiting, []))


def test_answers_are_json_serializable(gpt2: Case) -> None:
    with gpt2.generator() as write:
        assert json.loads(json.dumps(write(list(PROMPTS[:2]), max_tokens=4)))
