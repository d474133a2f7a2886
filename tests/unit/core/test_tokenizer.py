from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, processors

from hasten.core.errors import BundleError
from hasten.core.tensors import Batch
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec

BOTH = ("input_ids", "token_type_ids")


Spelled = Callable[[Batch], list[str]]


def test_rows_are_not_padded(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(["a b c", "a", "zebra a"])
    assert tokens.batch.lengths.tolist() == [5, 3, 4]
    assert tokens.batch.values["input_ids"].tolist() == [2, 4, 5, 6, 3, 2, 4, 3, 2, 1, 4, 3]
    assert not tokens.batch.values["token_type_ids"].any()
    assert tokens.truncated == ()


def test_pairs_use_the_template(tokenizer: Tokenizer, spelled: Spelled) -> None:
    tokens = tokenizer.encode([("a b", "c"), "a"])
    assert spelled(tokens.batch)[0] == "[CLS] a b [SEP] c [SEP]"
    assert tokens.batch.values["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text("ab \n") | st.tuples(st.text("ab "), st.text("cd ")), max_size=4))
def test_traced_tokens_equal_untraced_ones(tokenizer: Tokenizer, texts: list[str | tuple[str, str]]) -> None:
    plain, traced = tokenizer.encode(texts), tokenizer.encode(texts, is_traced=True)
    assert {name: column.tolist() for name, column in plain.batch.values.items()} == {
        name: column.tolist() for name, column in traced.batch.values.items()
    }
    assert (plain.batch.lengths.tolist(), plain.truncated) == (traced.batch.lengths.tolist(), traced.truncated)
    for text, encoding in zip(texts, traced.encodings, strict=True):
        columns = zip(encoding.ids, encoding.offsets, encoding.sequence_ids, strict=True)
        for token, (begin, end), part in columns:
            if part is not None:
                surface = (text if isinstance(text, str) else text[part])[begin:end]
                assert tokenizer.token(token) == (surface if len(surface) == 1 else "[UNK]")


def test_encoding_no_texts_returns_an_empty_batch(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode([])
    assert len(tokens.batch) == 0
    assert tokens.truncated == ()


def test_batch_has_only_the_model_inputs(tokenizer_file: Path) -> None:
    tokens = Tokenizer.open(tokenizer_file, TokenizerSpec(("input_ids",), 16)).encode(["a"])
    assert set(tokens.batch.values) == {"input_ids"}


def test_padding_and_truncation_in_the_file_are_reset(
    fast_tokenizer: FastTokenizer, tmp_path: Path, spelled: Spelled
) -> None:
    fast_tokenizer.enable_padding(length=128)
    fast_tokenizer.enable_truncation(4, strategy="only_first", direction="left")
    fast_tokenizer.save(str(tmp_path / "fixed.json"))
    tokens = Tokenizer.open(tmp_path / "fixed.json", TokenizerSpec(BOTH, 8)).encode(["a b c", "a b c d e f g h"])
    assert spelled(tokens.batch)[0] == "[CLS] a b c [SEP]"
    assert spelled(tokens.batch)[1] == "[CLS] a b c d e f [SEP]"
    assert tokens.truncated == (1,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c d", "[CLS] a b c d [SEP]"),
        ("a b c d e", "[CLS] a b c d [SEP]"),
        # The longer text is truncated first, then both.
        (("a", "b c d e"), "[CLS] a [SEP] b c [SEP]"),
        (("a b c d", "e"), "[CLS] a b [SEP] e [SEP]"),
        (("a", "b c"), "[CLS] a [SEP] b c [SEP]"),
    ],
)
def test_texts_and_pairs_are_truncated_to_the_limit(
    tokenizer_file: Path, text: str | tuple[str, str], expected: str, spelled: Spelled
) -> None:
    tokens = Tokenizer.open(tokenizer_file, TokenizerSpec(BOTH, 6)).encode([text])
    assert spelled(tokens.batch)[0] == expected
    length = len(" ".join([text] if isinstance(text, str) else text).split()) + (2 if isinstance(text, str) else 3)
    assert tokens.truncated == ((0,) if length > 6 else ())


def test_two_long_texts_are_truncated_to_equal_lengths(tokenizer_file: Path, spelled: Spelled) -> None:
    tokens = Tokenizer.open(tokenizer_file, TokenizerSpec(BOTH, 7)).encode([("a b c d e f", "g h i j k l")])
    assert spelled(tokens.batch)[0] == "[CLS] a b [SEP] g h [SEP]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a b c d e", "[CLS] c d e [SEP]"), (("a b c d", "e"), "[CLS] d [SEP] e [SEP]"), ("a b", "[CLS] a b [SEP]")],
)
def test_truncation_on_the_left_keeps_the_last_tokens(
    tokenizer_file: Path, text: str | tuple[str, str], expected: str, spelled: Spelled
) -> None:
    tokens = Tokenizer.open(tokenizer_file, TokenizerSpec(BOTH, 5, truncates_left=True)).encode([text])
    assert spelled(tokens.batch)[0] == expected


def test_every_truncated_row_is_reported(tokenizer_file: Path) -> None:
    tokens = Tokenizer.open(tokenizer_file, TokenizerSpec(BOTH, 4)).encode(["a", "a b c", "a b", "a b c d"])
    assert tokens.truncated == (1, 3)
    assert tokens.batch.lengths.tolist() == [3, 4, 4, 4]


# --- texts that tasks truncate and join themselves

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROCESSORS = {
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    ),
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
}


def letters(max_size: int) -> st.SearchStrategy[str]:
    return st.text(LETTERS, max_size=max_size).map(" ".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=letters(60), truncates_left=st.booleans())
def test_encode_whole_keeps_all_tokens(tokenizer_file: Path, text: str, truncates_left: bool) -> None:
    tokenizer = Tokenizer.open(tokenizer_file, TokenizerSpec(BOTH, 7, truncates_left=truncates_left))
    (whole,) = tokenizer.encode_whole([text])
    assert whole.tokens == text.split()
    assert [text[start:end] for start, end in whole.offsets] == text.split()
    assert whole.word_ids == list(range(len(text.split())))
    assert not whole.overflowing


def test_encode_whole_of_a_book_needs_little_memory(tokenizer: Tokenizer) -> None:
    """Merging tens of thousands of pieces with their overflow would exhaust the memory."""
    (whole,) = tokenizer.encode_whole([" ".join(LETTERS * 10_000)])
    assert len(whole) == 260_000


@pytest.mark.parametrize("name", PROCESSORS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=letters(30), others=st.lists(letters(11), min_size=1, max_size=6), truncates_left=st.booleans())
def test_joined_rows_equal_those_of_the_library(
    fast_tokenizer: FastTokenizer, name: str, text: str, others: list[str], truncates_left: bool
) -> None:
    fast_tokenizer.post_processor = PROCESSORS[name]
    library = FastTokenizer.from_str(fast_tokenizer.to_str())
    library.enable_truncation(16, strategy="only_first", direction="left" if truncates_left else "right")
    expected = [library.encode(text, other) for other in others]
    tokenizer = Tokenizer(fast_tokenizer, TokenizerSpec(BOTH, 16, truncates_left=truncates_left))
    (first,) = tokenizer.encode_whole([text])
    tokens = tokenizer.join_each(first, tokenizer.encode_whole(others))
    assert tokens.batch.lengths.tolist() == [len(row) for row in expected]
    assert tokens.batch.values["input_ids"].tolist() == [token for row in expected for token in row.ids]
    assert tokens.batch.values["token_type_ids"].tolist() == [kind for row in expected for kind in row.type_ids]
    assert tokens.truncated == tuple(index for index, row in enumerate(expected) if row.overflowing)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"not json", b'{"version": "1.0", "model": {"type": "Nothing"}}', b"\xff"]
)
def test_broken_file_is_a_bundle_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.open(file, TokenizerSpec(BOTH, 16))


def test_missing_file_is_a_bundle_error(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a tokenizer"):
        Tokenizer.open(tmp_path / "tokenizer.json", TokenizerSpec(BOTH, 16))


def test_ids_are_decoded_to_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(["a b zebra"]).batch.values["input_ids"].tolist()
    assert tokenizer.decode(ids) == "[CLS] a b [UNK] [SEP]"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([99]) == ""


def test_vocabulary_size_includes_ids_beyond_a_gap() -> None:
    backend = FastTokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 9}, unk_token="[UNK]"))
    assert Tokenizer(backend, TokenizerSpec(BOTH, max_length=16)).size == 10
