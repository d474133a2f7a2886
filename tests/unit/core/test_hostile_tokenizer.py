"""A tokenizer file from a stranger is an error or works; a panic of the library must not pass `except Exception`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.core.errors import BundleError, StageError
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec


def test_panic_of_the_library_is_an_error(tokenizer_file: Path) -> None:
    content = json.loads(tokenizer_file.read_text())
    # The template names a token that the file does not define.
    content["post_processor"]["special_tokens"] = {}
    tokenizer_file.write_text(json.dumps(content))
    with pytest.raises(BundleError, match="is not a tokenizer"):
        Tokenizer.open(tokenizer_file, TokenizerSpec(("input_ids",), max_length=16))


def test_unknown_input_is_an_error(tokenizer_file: Path) -> None:
    with pytest.raises(BundleError, match="cannot feed the inputs pixels"):
        Tokenizer.open(tokenizer_file, TokenizerSpec(("input_ids", "pixels"), max_length=16))


def test_manifest_without_inputs_is_an_error(tokenizer_file: Path) -> None:
    with pytest.raises(BundleError, match="feeds no inputs"):
        Tokenizer.open(tokenizer_file, TokenizerSpec((), max_length=16))


def test_message_is_one_printable_line() -> None:
    error = StageError("\x1b]0;title\x07\nline two\u202e é")
    assert error.message == "\\x1b]0;title\\x07 line two\\u202e é"
    assert str(error) == error.message
