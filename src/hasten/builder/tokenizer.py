"""transformers' tokenizers: read from a directory, and written as one file that needs no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from hasten.builder.libraries import first_line
from hasten.builder.source import ModelDirectory
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.plan import Plan

# How the files of vocabularies begin.
_VOCABULARY = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")


class HasTokenizer(Protocol):
    @property
    def original_tokenizer(self) -> Any: ...


def load_tokenizer(model: ModelDirectory, plan: Plan) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            model.tokenizer_path, trust_remote_code=plan.trust_remote_code
        )
    except Exception as error:
        if not _has_vocabulary(model.tokenizer_path):  # of which transformers says nothing
            raise _without_tokenizer(model) from error
        raise StageError(f"the tokenizer of {model.id} does not load: {first_line(error)}") from error
    # transformers 5 makes a tokenizer of special tokens alone where it finds no files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise _without_tokenizer(model)
    return tokenizer


def _has_vocabulary(folder: Path) -> bool:
    """By how the files of one are called, or end."""
    names = [file.name for file in folder.iterdir() if file.name != "tokenizer_config.json"]
    return any(name.startswith(_VOCABULARY) or name.endswith((".model", ".spm", ".tiktoken")) for name in names)


def _without_tokenizer(model: ModelDirectory) -> StageError:
    return StageError(f"{model.id} has no tokenizer: no tokenizer.json or vocabulary beside its config.json")


def lowercase_first(tokenizer: Any) -> None:
    """What sentence-transformers' do_lower_case asks for, whatever the tokenizer itself does."""
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    before = [backend.normalizer] if backend.normalizer is not None else []
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


def tidies_spaces(tokenizer: Any) -> bool:
    """Whether decoding takes out spaces before punctuation: transformers does not for BPE, unless it is made to."""
    is_forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces) and (is_forced or not is_bpe)


def save_tokenizer(loaded: HasTokenizer, file: Path) -> None:
    """The tokenizer as one file that needs no transformers."""
    import tokenizers

    original = loaded.original_tokenizer
    try:
        backend = tokenizers.Tokenizer.from_str(original.backend_tokenizer.to_str())
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedError(
            f"the tokenizer ({type(original).__name__}) has parts written in Python,"
            f" and bundles are served without transformers: {first_line(error)}"
        ) from error
    backend.no_padding()
    backend.no_truncation()
    backend.save(str(file))
