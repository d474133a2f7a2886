"""Texts to ids: words looked up, against the tokenizers library, one text at a time and alternating.

    python benchmarks/words.py --tokenizer FILE [--texts FILE]

FILE is a tokenizer.json of BERT's kind; texts are one a line of JSON with a "text", or hasten's own sample. Ids are
compared first, and all words learnt; then the same with one word of each text that is new every time, and with all.
Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hasten.core import tokenizer as module
from hasten.core.tokenizer import Tokenizer, TokenizerSpec, Tokens
from hasten.measure.data import sample_texts
from origin import origin

HERE = Path(__file__).parent
ROUNDS = 21
LENGTHS = (16, 128)
# How often all texts come before all of their words are known.
LEARNT = 20
numbers = count()
NEW: dict[str, Callable[[str], str]] = {
    "": lambda text: text,
    ", one new word": lambda text: f"{text} x{next(numbers)}",
    ", all words new": lambda text: " ".join(f"{word}{next(numbers)}" for word in text.split()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "words.json")
    args = parser.parse_args()
    if args.texts is None:
        texts, source = list(sample_texts()), "hasten's sample"
    else:
        texts, source = [json.loads(line)["text"] for line in args.texts.read_text().splitlines()], args.texts.name
    tokenizer = Tokenizer.open(args.tokenizer, TokenizerSpec(("input_ids", "token_type_ids"), 512))
    rows = []
    for name, some in {
        "as they are": texts,
        **{f"{n} tokens": of_length(tokenizer, texts, n) for n in LENGTHS},
    }.items():
        for what, renewed in NEW.items():
            row = study(name + what, tokenizer, some, renewed)
            rows.append(row)
            print(row, flush=True)
    results = {**origin(), "tokenizer": args.tokenizer.parent.name, "texts": source, "rows": rows}
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def of_length(tokenizer: Tokenizer, texts: Sequence[str], tokens: int) -> list[str]:
    """The same words, in texts of about as many tokens."""
    found, words = [], " ".join(texts).split()
    while words and len(found) < len(texts):
        taken: list[str] = []
        while words and len(library(tokenizer, " ".join(taken)).batch.values["input_ids"]) < tokens:
            taken.append(words.pop())
        found.append(" ".join(taken))
    return found


def study(name: str, tokenizer: Tokenizer, texts: Sequence[str], renewed: Callable[[str], str]) -> dict[str, Any]:
    for text in texts * LEARNT:
        ours, theirs = (how(tokenizer, text).batch.values["input_ids"] for how in (looked_up, library))
        assert ours.tolist() == theirs.tolist(), text
    taken: dict[str, list[float]] = {"library": [], "looked up": []}
    for _ in range(ROUNDS):
        some = [renewed(text) for text in texts]
        for lane, how in (("library", library), ("looked up", looked_up)):
            taken[lane].append(timed(how, tokenizer, some))
    medians = {lane: float(np.median(values)) for lane, values in taken.items()}
    tokens = sum(len(library(tokenizer, text).batch.values["input_ids"]) for text in texts) / len(texts)
    ratio = medians["library"] / medians["looked up"]
    return {"texts": name, "count": len(texts), "tokens": tokens, "us": medians, "ratio": ratio}


def timed(how: Callable[[Tokenizer, str], Tokens], tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    begin = time.perf_counter()
    for text in texts:
        how(tokenizer, text)
    return (time.perf_counter() - begin) / len(texts) * 1e6


def looked_up(tokenizer: Tokenizer, text: str) -> Tokens:
    return tokenizer.encode([text])


def library(tokenizer: Tokenizer, text: str) -> Tokens:
    few, module._FEW = module._FEW, 0
    try:
        return tokenizer.encode([text])
    finally:
        module._FEW = few


if __name__ == "__main__":
    main()
