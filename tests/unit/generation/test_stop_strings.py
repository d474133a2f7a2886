"""Text deltas: emitted text is never taken back, and stop strings are never emitted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hasten.core.text.tokenizer import Tokenizer
from hasten.generation.detokenizer import Detokenizer, StopStrings
from support.models import tiny_decoders

# Two of its bytes alone are no character.
TEXTS = (
    "the cat sat on the mat",
    "a “quoted” naïve café — 12 €",
    "emoji 😀😅 family 👨‍👩‍👧 end",
    "  two spaces  and\n\nlines\ttabs",
    "日本語のテキスト",
    "x",
)


def through(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    """Return the text emitted after each delta, and at the end."""
    gate = StopStrings(stops)
    out = [gate.add(piece) for piece in pieces]
    return [*out, gate.end()], gate.is_met


def test_text_passes_at_once_without_stops() -> None:
    assert through((), ["a", "b", ""]) == (["a", "b", "", ""], False)


def test_stop_inside_one_delta() -> None:
    assert through(["STOP"], ["before STOP after"]) == (["before ", ""], True)


def test_stop_across_deltas_is_held_back_from_its_first_letter() -> None:
    assert through(["\nUser:"], ["Hello.", "\n", "Us", "er", ": hi", "more"]) == (
        ["Hello.", "", "", "", "", "", ""],
        True,
    )


def test_partial_stop_is_emitted_once_it_cannot_match() -> None:
    assert through(["\nUser:"], ["Hello.\n", "Us", "ual"]) == (["Hello.", "", "\nUsual", ""], False)
    assert through(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], True)


def test_partial_stop_at_the_end_is_emitted() -> None:
    assert through(["###"], ["end ##"]) == (["end ", "##"], False)


def test_first_complete_stop_counts() -> None:
    assert through(["abcd", "bc"], ["xabcd"]) == (["xa", ""], True)
    assert through(["abc", "c"], ["xabc"]) == (["x", ""], True)


def letter_by_letter(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop, by definition."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
)
def test_emitted_text_does_not_depend_on_the_deltas(pieces: list[str], stops: list[str]) -> None:
    out, is_met = through(stops, pieces)
    expected = letter_by_letter("".join(pieces), stops)
    assert "".join(out) == expected
    assert is_met == any(stop in "".join(pieces) for stop in stops)
    # At no time more than what stays in the end.
    assert all(expected.startswith("".join(out[:end])) for end in range(len(out)))


@pytest.fixture(scope="module", params=tiny_decoders.TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return tiny_decoders.ours(tiny_decoders.TOKENIZERS[request.param]())


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    text = Detokenizer(tokenizer, prompt)
    return [*(text.add(token) for token in ids), text.end()]


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_whole([text])[0].ids


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = plain(tokenizer, text)
    whole = tokenizer.decode(ids, skips_special=True)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_text_continues_its_prompt(tokenizer: Tokenizer, text: str) -> None:
    """The text may begin between any two characters; SentencePiece's space between words is kept."""
    ids = plain(tokenizer, text)
    whole = tokenizer.decode(ids, skips_special=True)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut], skips_special=True)
        if not before.endswith("\ufffd"):
            assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == whole[len(before) :]


def test_word_is_emitted_as_soon_as_it_is_complete() -> None:
    tokenizer = tiny_decoders.ours(tiny_decoders.byte_fallback())
    ids = plain(tokenizer, "the cat sat")
    assert [tokenizer.token(token) for token in ids] == ["▁the", "▁cat", "▁sat"]
    assert pieces_of(tokenizer, ids) == ["the", " cat", " sat", ""]
    assert pieces_of(tokenizer, ids[1:], ids[:1]) == [" cat", " sat", ""]


def test_incomplete_character_is_held_until_the_end() -> None:
    for make_tokenizer in (tiny_decoders.byte_level, tiny_decoders.byte_fallback):
        tokenizer = tiny_decoders.ours(make_tokenizer())
        euro = [token for token in plain(tokenizer, "€") if tokenizer.token(token) != "▁"]
        assert len(euro) == 3
        assert pieces_of(tokenizer, euro) == ["", "", "€", ""]
        assert pieces_of(tokenizer, euro[:2])[:2] == ["", ""]
        assert set(pieces_of(tokenizer, euro[:2])[2]) == {"\ufffd"}


def test_special_tokens_are_skipped() -> None:
    tokenizer = tiny_decoders.ours(tiny_decoders.byte_fallback())
    the, cat = plain(tokenizer, "the cat")
    special = [tokenizer.id_of(tiny_decoders.BOS), tokenizer.id_of(tiny_decoders.PAD)]
    assert pieces_of(tokenizer, [special[0], the, special[1], special[1], cat]) == ["", "the", "", "", " cat", ""]  # type: ignore[list-item]


@given(ids=st.lists(st.integers(0, 290), max_size=30), data=st.data())
def test_deltas_join_to_the_text_for_any_tokens(ids: list[int], data: st.DataObject) -> None:
    tokenizer = tiny_decoders.ours(tiny_decoders.byte_level())
    cut = data.draw(st.integers(0, len(ids)))
    before = tokenizer.decode(ids[:cut], skips_special=True)
    whole = tokenizer.decode(ids, skips_special=True)
    if not before.endswith("\ufffd"):
        assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == whole[len(before) :]


BYTE_FALLBACK = tiny_decoders.ours(tiny_decoders.byte_fallback())


@given(st.lists(st.integers(0, 340), max_size=24) | st.text(max_size=12).map(lambda text: plain(BYTE_FALLBACK, text)))
def test_deltas_join_to_the_text_for_any_bytes(ids: list[int]) -> None:
    whole = BYTE_FALLBACK.decode(ids, skips_special=True)
    emitted = "".join(pieces_of(BYTE_FALLBACK, ids))
    assert len(emitted) >= len(whole.replace("\ufffd", ""))
    if "\ufffd" not in whole:
        assert emitted == whole


@given(st.lists(st.sampled_from(["▁", "n", "t", "'", "m", "s", ".", ",", "?", "v", "e", "▁the", "▁cat"]), max_size=16))
def test_spaces_that_may_be_cleaned_up_are_held(tokens: list[str]) -> None:
    """An emitted space stays: " n't" becomes "n't" only if the space is still held."""
    backend = tiny_decoders.metaspace()
    backend.add_tokens(["'"])
    tokenizer = tiny_decoders.ours(backend, tidies_spaces=True)
    ids = [tokenizer.id_of(token) for token in tokens]
    assert None not in ids
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skips_special=True)  # type: ignore[arg-type]
