"""Text written with tiny models, over the plainest decoder and the real one, against transformers' own generate."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import writers
from hasten.core.errors import InputError, StageError
from hasten.core.generation import Finish, Sampling
from hasten.generation.generator import Generator
from hasten.generation.rows import Piece
from hasten.generation.writing import Writer

KINDS = {
    "gpt2": writers.byte_level,
    "llama": writers.whole_characters,
    "t5": writers.metaspace,
    "bart": writers.byte_level,
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
    """A tiny model, its tokenizers, and whatever writes with it."""

    def __init__(self, kind: str, runtime: str, folder: Path) -> None:
        backend = KINDS[kind]()
        self.module = writers.model(kind, writers.vocabulary_of(backend))
        self.spec = writers.spec_of(self.module, chat_template=TEMPLATE)
        self.tokenizer = writers.ours(backend)
        self.theirs = writers.theirs(backend)
        self.runtime, self.folder = runtime, folder

    @property
    def reads_apart(self) -> bool:
        return bool(self.spec.start_ids)

    def decoder(self, slots: int = 8) -> Any:
        if self.runtime == "plain":
            return writers.PlainDecoder(self.module, slots)
        return writers.onnx_decoder(self.module, self.folder, slots)

    def generator(self, slots: int = 8, **about: Any) -> Generator:
        return Generator(replace(self.spec, **about), self.tokenizer, self.decoder(slots))

    def ids(self, prompt: str) -> list[int]:
        found: list[int] = self.theirs(prompt)["input_ids"]
        return found

    def expected(self, prompt: str, **options: Any) -> list[int]:
        """What transformers.generate writes after a prompt, the token that ends it left out."""
        import torch

        ids = torch.tensor([self.ids(prompt)])
        before = len(self.spec.start_ids) or ids.shape[1]
        # What is forced to come first counts as written there.
        options["max_new_tokens"] += max(0, len(self.spec.start_ids) - 1)
        made = self.module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0].tolist()
        new = made[before:]
        ends = [place for place, token in enumerate(new) if token in self.spec.end_ids]
        return new[: ends[0]] if ends else new

    def write(self, prompts: Any, *samplings: Sampling, slots: int = 8) -> list[list[int]]:
        """The tokens after each prompt; one way to choose them for all, or one for each."""
        writer = Writer(self.decoder(slots), self.spec, self.tokenizer)
        ways = samplings if len(samplings) == len(prompts) else samplings * len(prompts)
        rows = [writer.row(self.ids(prompt), way, lambda _: None) for prompt, way in zip(prompts, ways, strict=True)]
        for row in rows:
            writer.add(row)
        while not writer.is_idle:
            writer.step()
        return [row.ids for row in rows]


@pytest.fixture(scope="module", params=CASES, ids=lambda param: "-".join(param))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(*request.param, tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """For what no decoder can change."""
    return Case("gpt2", "plain", tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", "plain", tmp_path_factory.mktemp("decoder"))


def test_greedy_is_what_transformers_writes(case: Case) -> None:
    expected = [case.expected(prompt, max_new_tokens=16) for prompt in PROMPTS]
    assert case.write(PROMPTS, Sampling(16)) == expected
    # Models that say the same whatever they read, or one word again and again, would prove nothing.
    assert len({tuple(ids) for ids in expected}) > 6
    assert np.mean([len(set(ids)) for ids in expected if len(ids) == 16]) > 5


def test_prompts_together_are_written_as_alone(case: Case) -> None:
    """Greedy, drawn and searched for, in one batch; with fewer slots than prompts, too."""
    ways = [Sampling(12), Sampling(12, 0.9, seed=3), Sampling(12, beams=2), Sampling(5, 1.2, top_k=20, seed=4)]
    ways += [Sampling(9, repetition_penalty=1.4), Sampling(12, 0.7, top_p=0.9, seed=5), Sampling(7), Sampling(3)]
    alone = [case.write([prompt], way)[0] for prompt, way in zip(PROMPTS, ways, strict=True)]
    assert case.write(PROMPTS, *ways) == alone
    assert case.write(PROMPTS, *ways, slots=3) == alone
    assert case.write(PROMPTS[::-1], *ways[::-1], slots=5) == alone[::-1]


@pytest.mark.parametrize(("beams", "length_penalty"), [(2, 1.0), (4, 0.2), (3, 2.0)])
def test_beams_find_what_transformers_finds(case: Case, beams: int, length_penalty: float) -> None:
    asked = {"num_beams": beams, "length_penalty": length_penalty, "max_new_tokens": 10}
    expected = [case.expected(prompt, **asked) for prompt in PROMPTS[:3]]
    assert case.write(PROMPTS[:3], Sampling(10, beams=beams, length_penalty=length_penalty)) == expected


def test_a_repetition_penalty_is_that_of_transformers(case: Case) -> None:
    expected = [case.expected(prompt, max_new_tokens=12, repetition_penalty=1.6) for prompt in PROMPTS[:4]]
    assert case.write(PROMPTS[:4], Sampling(12, repetition_penalty=1.6)) == expected
    assert expected != [case.expected(prompt, max_new_tokens=12) for prompt in PROMPTS[:4]]


def test_pieces_are_the_text_of_the_tokens(case: Case) -> None:
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
    asked = {"max_new_tokens": 9, "do_sample": False}
    with gpt2.generator() as write:
        assert write(PROMPTS[0], max_tokens=9) == theirs(PROMPTS[0], **asked)
        assert write(list(PROMPTS), max_tokens=9) == theirs(list(PROMPTS), **asked)
        assert write(PROMPTS[0], max_tokens=9, return_full_text=False) == theirs(
            PROMPTS[0], return_full_text=False, **asked
        )
        assert write([], max_tokens=9) == []


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_chats_are_answered_as_transformers_pipeline_does(gpt2: Case, last: str) -> None:
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


def test_a_message_in_parts_goes_on_with_one_more(gpt2: Case) -> None:
    user, said = {"role": "user", "content": "the cat"}, [{"type": "text", "text": "sat"}]
    with gpt2.generator() as write:
        (whole,) = write([user, {"role": "assistant", "content": "sat"}], max_tokens=5)
        (parts,) = write([user, {"role": "assistant", "content": said}], max_tokens=5)
    content = parts["generated_text"][-1]["content"]
    assert content[:1] == said
    assert "".join(part["text"] for part in content) == whole["generated_text"][-1]["content"]


def test_an_encoder_decoder_gives_the_answer_alone(tmp_path: Path) -> None:
    case = Case("t5", "onnxruntime", tmp_path)
    new = case.expected(PROMPTS[0], max_new_tokens=9)
    with case.generator() as write:
        answer = [{"generated_text": case.theirs.decode(new, skip_special_tokens=True)}]
        assert write(PROMPTS[0], max_tokens=9) == answer
        full = write(PROMPTS[0], max_tokens=9, return_full_text=True)
        assert full[0]["generated_text"] == PROMPTS[0] + answer[0]["generated_text"]


def test_what_is_forced_to_come_first_is_no_part_of_the_text(tmp_path: Path) -> None:
    """BART's answers begin with two tokens, of which transformers counts one as written."""
    case = Case("bart", "onnxruntime", tmp_path)
    assert len(case.spec.start_ids) == 2
    for way, asked in (
        (Sampling(6), {}),
        (Sampling(6, beams=3, length_penalty=2.0), {"num_beams": 3, "length_penalty": 2.0}),
    ):
        expected = [case.expected(prompt, max_new_tokens=6, **asked) for prompt in PROMPTS[:4]]
        assert case.write(PROMPTS[:4], way) == expected
        assert len({tuple(ids) for ids in expected}) > 2


def test_sentencepieces_space_between_two_words_is_kept(llama: Case) -> None:
    """A text goes on with its prompt; the answer of a chat begins anew."""
    the, cat, sat = (llama.tokenizer.id_of(word) for word in ("▁the", "▁cat", "▁sat"))
    decoder = Says({(the,): [cat, sat]}, llama.spec.vocabulary)
    write = Generator(llama.spec, llama.tokenizer, decoder)
    assert write("the", max_tokens=2) == [{"generated_text": "the cat sat"}]
    answer = write([{"role": "user", "content": "x"}], max_tokens=2, return_full_text=False)
    assert answer == [{"generated_text": "cat sat"}]


class Says(writers.PlainDecoder):
    """Says the words it was told, whatever it reads."""

    def __init__(self, words: dict[tuple[int | None, ...], list[int | None]], vocabulary: int) -> None:
        self.slots, self.vocabulary = 2, vocabulary
        self.words = next(iter(words.values()))
        self.rows, self.prompts, self.log = {}, {}, []

    def begin(self, slot: int, ids: Any) -> Any:
        self.rows[slot], self.prompts[slot] = [], []
        return self._said(slot)

    def step(self, slots: Any, ids: Any) -> Any:
        for slot, token in zip(slots, ids, strict=True):
            self.rows[slot] = [*self.rows[slot], int(token)]
        return np.stack([self._said(slot) for slot in slots])

    def _said(self, slot: int) -> Any:
        logits = np.zeros(self.vocabulary, np.float32)
        logits[self.words[len(self.rows[slot])]] = 1
        return logits


def test_seeds_give_the_same_text_again_and_others_another(case: Case) -> None:
    with case.generator() as write:
        first = write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=1)
        assert write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=1) == first
        assert write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=2) != first
        several = write(PROMPTS[0], max_tokens=12, temperature=1.0, seed=1, num_return=3)
        assert several[0] == first[0]
        assert len({answer["generated_text"] for answer in several}) == 3


def test_the_models_own_way_is_the_default(gpt2: Case) -> None:
    defaults = Sampling(max_tokens=4, temperature=1.0, seed=9)
    with gpt2.generator(defaults=defaults) as write:
        assert write(PROMPTS[0]) == write(PROMPTS[0], max_tokens=4, temperature=1.0, seed=9)
        greedy = write(PROMPTS[0], temperature=0, return_full_text=False)
    new = gpt2.expected(PROMPTS[0], max_new_tokens=4)
    assert greedy == [{"generated_text": gpt2.theirs.decode(new)}]


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(case: Case) -> None:
    with case.generator() as write:
        whole = write(PROMPTS[0], max_tokens=16, return_full_text=False)[0]["generated_text"]
        stop = whole[6:9]
        cut = whole[: whole.index(stop)]
        assert write(PROMPTS[0], max_tokens=16, stop=stop, return_full_text=False) == [{"generated_text": cut}]
        assert "".join(write(PROMPTS[0], max_tokens=16, stop=[stop, "never"], stream=True)) == cut
        assert write(PROMPTS[0], max_tokens=16, stop="never met", return_full_text=False)[0]["generated_text"] == whole


def test_a_text_ends_where_the_context_does(case: Case) -> None:
    told: list[Piece] = []
    writer = Writer(case.decoder(), case.spec, case.tokenizer)
    row = writer.row(case.ids(PROMPTS[0]), Sampling(10_000), told.append)
    writer.add(row)
    while not writer.is_idle:
        writer.step()
    if row.finish is Finish.LENGTH:
        assert len(row.ids) + (len(case.spec.start_ids) or len(row.prompt)) == writers.CONTEXT
    assert told[-1].finish is row.finish is not None
    assert [piece.finish for piece in told[:-1]] == [None] * (len(told) - 1)


def test_a_prompt_past_the_context_is_refused_with_numbers(case: Case) -> None:
    with case.generator() as write:
        with pytest.raises(InputError, match=r"the prompt has \d+ tokens") as caught:
            write("the cat sat on the mat. " * 40)
        assert "64" in str(caught.value)
        assert write(PROMPTS[0], max_tokens=2)


@pytest.mark.parametrize(
    ("payload", "options", "complaint"),
    [
        (3, {}, "the prompt is 3; it must be a text or a chat"),
        (None, {}, "the prompt is None"),
        (["a", 3], {}, "the prompt is 3"),
        ("a \ud800", {}, "the prompt is not valid Unicode: lone surrogate at character 2"),
        ([{"role": "user", "content": "\ud800"}], {}, "the chat is not valid Unicode"),
        ([[1, 99999]], {}, "there is no token 99999"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
        ("a", {"num_return": 2}, "would all be the same"),
        ("a", {"num_return": 0}, "num_return is 0"),
        ("a", {"num_return": 2, "temperature": 1.0, "stream": True}, "a stream is one text"),
        (["a", "b"], {"stream": True}, "the prompt is ['a', 'b']"),
        ("a", {"beams": 99}, "99 beams need as many slots, and there are 8"),
        ("a", {"num_beams": 2}, "here it is beams"),
        ([{"role": "user"}], {}, "message 1 has no content"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_line(gpt2: Case, payload: Any, options: dict[str, Any], complaint: str) -> None:
    with gpt2.generator() as write, pytest.raises(InputError) as caught:
        write(payload, **options)
    assert complaint in str(caught.value)


def test_nothing_to_go_on_from(gpt2: Case) -> None:
    """What begins every text, as transformers has it; where there is no such token, an error."""
    with gpt2.generator() as write:
        begun = gpt2.write([writers.BOS], Sampling(5))[0]
        assert write("", max_tokens=5) == [{"generated_text": gpt2.theirs.decode(begun, skip_special_tokens=True)}]
    with gpt2.generator(special_tokens={}) as write, pytest.raises(InputError, match="the prompt is empty"):
        write("")


def test_a_stream_that_is_left_frees_its_slot(case: Case) -> None:
    with case.generator(slots=1) as write:
        stream = write(PROMPTS[0], max_tokens=40, temperature=1.0, seed=1, stream=True)
        next(stream)
        stream.close()
        assert write._writer.running == 0
        # With one slot alone this would wait forever.
        assert write(PROMPTS[0], max_tokens=3)
        write(PROMPTS[0], max_tokens=40, stream=True)  # never asked for a piece
        assert write(PROMPTS[1], max_tokens=3)


def test_threads_write_together(case: Case) -> None:
    with case.generator(slots=4) as write:
        alone = [write(prompt, max_tokens=10) for prompt in PROMPTS]
        found: dict[int, Any] = {}

        def work(place: int) -> None:
            found[place] = write(PROMPTS[place], max_tokens=10)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[place] for place in range(len(PROMPTS))] == alone
        assert write._writer.is_idle


def test_a_text_that_another_threads_step_failed_on_is_no_answer(gpt2: Case) -> None:
    class Fails(writers.PlainDecoder):
        def begin(self, slot: int, ids: Any) -> Any:
            raise StageError("the runtime failed")

    write = Generator(gpt2.spec, gpt2.tokenizer, Fails(gpt2.module))
    stream = write(PROMPTS[0], stream=True)
    waiting = write._writer.row(gpt2.ids(PROMPTS[0]), Sampling(3), lambda _: None)
    write._writer.add(waiting)
    with pytest.raises(StageError, match="the runtime failed"):
        next(stream)
    assert write._writer.is_idle
    # Whoever waited for that one must not take it for an empty text.
    with pytest.raises(StageError, match="the text was given up"):
        next(write._pieces(waiting, []))


def test_answers_are_json(gpt2: Case) -> None:
    with gpt2.generator() as write:
        assert json.loads(json.dumps(write(list(PROMPTS[:2]), max_tokens=4)))
