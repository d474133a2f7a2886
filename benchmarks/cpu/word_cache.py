"""Compare the word cache with the tokenizers library, one text at a time, alternating.

    python benchmarks/cpu/word_cache.py --tokenizer FILE [--texts FILE]

FILE is a WordPiece tokenizer.json; texts are JSON lines with a "text" (default: hasten's sample). Token ids are
compared first, which also fills the cache. Then the same texts are timed with no, one and all words unseen. Nothing
else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

from hasten.core.text import tokenizer as tokenizer_module
from hasten.core.text.tokenizer import Tokenizer, TokenizerSpec, Tokens
from hasten.measure.data import sample_texts
from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "word_cache.json"
ROUNDS = 21
LENGTHS = (16, 128)
# Passes over all texts until every word is cached.
WARM_UP_PASSES = 20
numbers = count()
# How texts are changed before each round, by the label in the result file.
CHANGES: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    ", one new word": lambda text: f"{text} x{next(numbers)}",
    ", all words new": lambda text: " ".join(f"{word}{next(numbers)}" for word in text.split()),
}


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json of a WordPiece tokenizer")
    parser.add_argument("--texts", type=Path, help='JSON lines with a "text" (default: hasten\'s sample)')
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.texts is None:
        texts, source = list(sample_texts()), "hasten's sample"
    else:
        texts, source = [json.loads(line)["text"] for line in args.texts.read_text().splitlines()], args.texts.name
    tokenizer = Tokenizer.open(args.tokenizer, TokenizerSpec(("input_ids", "token_type_ids"), 512))
    groups = {"as they are": texts, **{f"{n} tokens": texts_of_length(tokenizer, texts, n) for n in LENGTHS}}
    rows = []
    for name, group in groups.items():
        for label, change in CHANGES.items():
            row = study(name + label, tokenizer, group, change)
            rows.append(row)
            print(row, flush=True)
    results = {**provenance(), "tokenizer": args.tokenizer.parent.name, "texts": source, "rows": rows}
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def texts_of_length(tokenizer: Tokenizer, texts: Sequence[str], tokens: int) -> list[str]:
    """Combine the words into texts of about this many tokens."""
    regrouped, words = [], " ".join(texts).split()
    while words and len(regrouped) < len(texts):
        taken: list[str] = []
        while words and len(encode_by_library(tokenizer, " ".join(taken)).batch.values["input_ids"]) < tokens:
            taken.append(words.pop())
        regrouped.append(" ".join(taken))
    return regrouped


def study(name: str, tokenizer: Tokenizer, texts: Sequence[str], change: Callable[[str], str]) -> dict[str, Any]:
    """Return the median microseconds per text with and without the cache."""
    encoders = {"library": encode_by_library, "looked up": encode_by_cache}
    for text in texts * WARM_UP_PASSES:
        cached, reference = (
            encode(tokenizer, text).batch.values["input_ids"] for encode in (encode_by_cache, encode_by_library)
        )
        assert cached.tolist() == reference.tolist(), text
    times: dict[str, list[float]] = {label: [] for label in encoders}
    for _ in range(ROUNDS):
        changed = [change(text) for text in texts]
        for label, encode in encoders.items():
            times[label].append(microseconds_per_text(encode, tokenizer, changed))
    medians = {label: float(np.median(values)) for label, values in times.items()}
    tokens = sum(len(encode_by_library(tokenizer, text).batch.values["input_ids"]) for text in texts) / len(texts)
    ratio = medians["library"] / medians["looked up"]
    return {"texts": name, "count": len(texts), "tokens": tokens, "us": medians, "ratio": ratio}


def microseconds_per_text(
    encode: Callable[[Tokenizer, str], Tokens], tokenizer: Tokenizer, texts: Sequence[str]
) -> float:
    """Return the mean time of encoding a text."""
    begin = time.perf_counter()
    for text in texts:
        encode(tokenizer, text)
    return (time.perf_counter() - begin) / len(texts) * 1e6


def encode_by_cache(tokenizer: Tokenizer, text: str) -> Tokens:
    """Encode a text with the word cache."""
    return tokenizer.encode([text])


def encode_by_library(tokenizer: Tokenizer, text: str) -> Tokens:
    """Encode a text without the word cache."""
    limit, tokenizer_module._MAX_CACHED_TEXTS = tokenizer_module._MAX_CACHED_TEXTS, 0
    try:
        return tokenizer.encode([text])
    finally:
        tokenizer_module._MAX_CACHED_TEXTS = limit


if __name__ == "__main__":
    main()
