"""Text in pieces: nothing is taken back, nothing of a stop string gets out, whichever tokens it comes in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import writers
from hasten.core.tokenizer import Tokenizer
from hasten.generation.text import Detokenizer, StopStrings

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
    """What gets out after each piece, and at the end."""
    gate = StopStrings(stops)
    out = [gate.add(piece) for piece in pieces]
    return [*out, gate.end()], gate.is_met


def test_without_stops_everything_passes_at_once() -> None:
    assert through((), ["a", "b", ""]) == (["a", "b", "", ""], False)


def test_a_stop_inside_one_piece() -> None:
    assert through(["STOP"], ["before STOP after"]) == (["before ", ""], True)


def test_a_stop_across_pieces_is_held_back_from_its_first_letter() -> None:
    assert through(["\nUser:"], ["Hello.", "\n", "Us", "er", ": hi", "more"]) == (
        ["Hello.", "", "", "", "", "", ""],
        True,
    )


def test_what_only_looked_like_a_stop_comes_out() -> None:
    assert through(["\nUser:"], ["Hello.\n", "Us", "ual"]) == (["Hello.", "", "\nUsual", ""], False)
    assert through(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], True)


def test_the_beginning_of_a_stop_at_the_end_is_text() -> None:
    assert through(["###"], ["end ##"]) == (["end ", "##"], False)


def test_the_stop_that_is_complete_first_counts() -> None:
    assert through(["abcd", "bc"], ["xabcd"]) == (["xa", ""], True)
    assert through(["abc", "c"], ["xabc"]) == (["x", ""], True)


def letter_by_letter(text: str, stops: Sequence[str]) -> str:
    """What the text is up to the first stop, by definition."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))]
    return text


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
)
def test_what_gets_out_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    out, is_met = through(stops, pieces)
    expected = letter_by_letter("".join(pieces), stops)
    assert "".join(out) == expected
    assert is_met == any(stop in "".join(pieces) for stop in stops)
    # At no time more than what stays in the end.
    assert all(expected.startswith("".join(out[:end])) for end in range(len(out)))


@pytest.fixture(scope="module", params=writers.TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return writers.ours(writers.TOKENIZERS[request.param]())


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    text = Detokenizer(tokenizer, prompt)
    return [*(text.add(token) for token in ids), text.end()]


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_whole([text])[0].ids


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = plain(tokenizer, text)
    whole = tokenizer.decode(ids, skips_special=True)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_goes_on_from_its_prompt(tokenizer: Tokenizer, text: str) -> None:
    """Wherever between two whole characters it begins; SentencePiece's space between two words included."""
    ids = plain(tokenizer, text)
    whole = tokenizer.decode(ids, skips_special=True)
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut], skips_special=True)
        if not before.endswith("\ufffd"):
            assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == whole[len(before) :]


def test_a_word_comes_as_soon_as_it_is_whole() -> None:
    tokenizer = writers.ours(writers.byte_fallback())
    ids = plain(tokenizer, "the cat sat")
    assert [tokenizer.token(token) for token in ids] == ["▁the", "▁cat", "▁sat"]
    assert pieces_of(tokenizer, ids) == ["the", " cat", " sat", ""]
    assert pieces_of(tokenizer, ids[1:], ids[:1]) == [" cat", " sat", ""]


def test_half_a_character_waits_and_is_told_at_the_end() -> None:
    for made in (writers.byte_level, writers.byte_fallback):
        tokenizer = writers.ours(made())
        euro = [token for token in plain(tokenizer, "€") if tokenizer.token(token) != "▁"]
        assert len(euro) == 3
        assert pieces_of(tokenizer, euro) == ["", "", "€", ""]
        assert pieces_of(tokenizer, euro[:2])[:2] == ["", ""]
        assert set(pieces_of(tokenizer, euro[:2])[2]) == {"\ufffd"}


def test_special_tokens_are_no_text() -> None:
    tokenizer = writers.ours(writers.byte_fallback())
    the, cat = plain(tokenizer, "the cat")
    special = [tokenizer.id_of(writers.BOS), tokenizer.id_of(writers.PAD)]
    assert pieces_of(tokenizer, [special[0], the, special[1], special[1], cat]) == ["", "the", "", "", " cat", ""]  # type: ignore[list-item]


@given(ids=st.lists(st.integers(0, 290), max_size=30), data=st.data())
def test_any_tokens_at_all(ids: list[int], data: st.DataObject) -> None:
    tokenizer = writers.ours(writers.byte_level())
    cut = data.draw(st.integers(0, len(ids)))
    before = tokenizer.decode(ids[:cut], skips_special=True)
    whole = tokenizer.decode(ids, skips_special=True)
    if not before.endswith("\ufffd"):
        assert "".join(pieces_of(tokenizer, ids[cut:], ids[:cut])) == whole[len(before) :]


BYTE_FALLBACK = writers.ours(writers.byte_fallback())


@given(st.lists(st.integers(0, 340), max_size=24) | st.text(max_size=12).map(lambda text: plain(BYTE_FALLBACK, text)))
def test_any_bytes_at_all(ids: list[int]) -> None:
    whole = BYTE_FALLBACK.decode(ids, skips_special=True)
    found = "".join(pieces_of(BYTE_FALLBACK, ids))
    assert len(found) >= len(whole.replace("\ufffd", ""))
    if "\ufffd" not in whole:
        assert found == whole


@given(st.lists(st.sampled_from(["▁", "n", "t", "'", "m", "s", ".", ",", "?", "v", "e", "▁the", "▁cat"]), max_size=16))
def test_spaces_that_are_tidied_later_wait(tokens: list[str]) -> None:
    """Once a space is out it stays: " n't" becomes "n't" only if the space was not told yet."""
    backend = writers.metaspace()
    backend.add_tokens(["'"])
    tokenizer = writers.ours(backend, tidies_spaces=True)
    ids = [tokenizer.id_of(token) for token in tokens]
    assert None not in ids
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skips_special=True)  # type: ignore[arg-type]
