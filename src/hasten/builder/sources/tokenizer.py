"""Load transformers' tokenizers, and save them as one file that does not need transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten.builder.sources.directory import ModelDirectory
from hasten.builder.sources.quiet import first_line
from hasten.core.errors import StageError, UnsupportedError
from hasten.core.plan import Plan
from hasten.core.text.tokenizer import TokenizerSpec

# Names of vocabulary files.
_VOCABULARY_PREFIXES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")
_VOCABULARY_SUFFIXES = (".model", ".spm", ".tiktoken")


def load_tokenizer(model: ModelDirectory, plan: Plan) -> Any:
    """Load the tokenizer of a model with transformers."""
    import transformers

    folder = model.tokenizer_path
    missing = f"{model.id} has no tokenizer: no tokenizer.json or vocabulary next to its config.json"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=plan.trust_remote_code)
    except Exception as error:
        reason = f"the tokenizer of {model.id} does not load: {first_line(error)}"
        names = [file.name for file in folder.iterdir() if file.name != "tokenizer_config.json"]
        # transformers' error does not mention a missing vocabulary.
        has_vocabulary = any(
            name.startswith(_VOCABULARY_PREFIXES) or name.endswith(_VOCABULARY_SUFFIXES) for name in names
        )
        raise StageError(reason if has_vocabulary else missing) from error
    # transformers 5 creates a tokenizer with only special tokens if it finds no files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise StageError(missing)
    return tokenizer


def load_fast_tokenizer(model: ModelDirectory, plan: Plan) -> Any:
    """Load the tokenizer of a model; reject one that cannot be saved for bundles."""
    tokenizer = load_tokenizer(model, plan)
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedError(
            f"the tokenizer of {model.id} ({type(tokenizer).__name__}) has no tokenizers-library form,"
            " and bundles are served without transformers"
        )
    return tokenizer


def tokenizer_spec(tokenizer: Any, inputs: tuple[str, ...], max_length: int) -> TokenizerSpec:
    """Return the settings of a tokenizer for the manifest."""
    # transformers removes spaces before punctuation for BPE only if forced.
    is_forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return TokenizerSpec(
        inputs=inputs,
        max_length=max_length,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        truncates_left=tokenizer.truncation_side == "left",
        tidies_spaces=bool(tokenizer.clean_up_tokenization_spaces) and (is_forced or not is_bpe),
        pads_left=tokenizer.padding_side == "left",
        cls_id=tokenizer.cls_token_id,
    )


def prepend_lowercase(tokenizer: Any) -> None:
    """Convert texts to lower case before the tokenizer normalizes them (sentence-transformers' do_lower_case)."""
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    existing = [backend.normalizer] if backend.normalizer is not None else []
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *existing])


def save_tokenizer(original: Any, file: Path) -> None:
    """Save transformers' tokenizer as one file that does not need transformers."""
    import tokenizers

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
