"""The question answering tutorial of Optimum with hasten: a model as it is, optimized and quantized.

    python examples/question_answering.py deepset/minilm-uncased-squad2 --data xquad.jsonl

Rows are {"question": …, "context": …, "answers": {"text": […]}}. The same PyTorch code runs all three
models; only loading differs. It prints exact match and F1 of each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import hasten
from hasten.core.system.cpu_targets import target_of
from hasten.core.system.hardware import this_machine
from hasten.metrics import squad
from hasten.transformers import AutoModelForQuestionAnswering

MAX_ANSWER_TOKENS = 30


def load_three(model: str, work: Path, **options: Any) -> dict[str, Any]:
    """Load the module of transformers, and build and load the optimized and the quantized bundle."""
    hasten.build(model, work / "optimized", level="O3", force=True, **options)
    hasten.build(model, work / "quantized", preset=target_of(this_machine()).name, force=True, **options)
    return open_three(model, work)


def open_three(model: str, work: Path) -> dict[str, Any]:
    """Load the module of transformers and the bundles of an earlier run."""
    return {
        "vanilla": transformers.AutoModelForQuestionAnswering.from_pretrained(model).eval(),
        "optimized": AutoModelForQuestionAnswering.from_pretrained(work / "optimized"),
        "quantized": AutoModelForQuestionAnswering.from_pretrained(work / "quantized"),
    }


def windows(tokenizer: Any, row: dict[str, Any]) -> Any:
    """Split a long context into windows that overlap by 128 tokens."""
    return tokenizer(
        row["question"],
        row["context"],
        max_length=384,
        stride=128,
        truncation="only_second",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=True,
        return_tensors="pt",
    )


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, row: dict[str, Any]) -> str:
    """Return the best span of all windows that lies in the context and is not too long."""
    encoded = windows(tokenizer, row)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded}
    outputs = model(**inputs)
    best, text = -torch.inf, ""
    for window, offsets in enumerate(encoded["offset_mapping"]):
        outside = torch.tensor([part != 1 for part in encoded.sequence_ids(window)])
        scores = outputs.start_logits[window][:, None] + outputs.end_logits[window][None, :]
        scores = scores.masked_fill(outside[:, None] | outside[None, :], -torch.inf)
        scores = scores.triu().masked_fill(torch.ones_like(scores).triu() == 0, -torch.inf)
        scores = scores.masked_fill(torch.ones_like(scores).triu(MAX_ANSWER_TOKENS) == 1, -torch.inf)
        first, last = divmod(int(scores.argmax()), scores.shape[1])
        if scores[first, last] > best:
            best, text = scores[first, last], row["context"][offsets[first][0] : offsets[last][1]]
    return text


def score(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean exact match and F1 of the answers."""
    answers = [answer(model, tokenizer, row) for row in rows]
    pairs = [(text, row["answers"]["text"]) for text, row in zip(answers, rows, strict=True)]
    return {
        "exact": sum(squad.best(squad.exact, text, references) for text, references in pairs) / len(rows),
        "f1": sum(squad.best(squad.f1, text, references) for text, references in pairs) / len(rows),
    }


def read_rows(file: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Read up to `count` rows that have an answer."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    return [row for row in rows if row["answers"]["text"]][:count]


def main() -> None:
    """Score the three models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or local directory")
    parser.add_argument("--data", type=Path, required=True, help="rows as jsonl")
    parser.add_argument("--rows", type=int, help="maximum number of rows (default: all)")
    parser.add_argument("--work", type=Path, default=Path("question-answering"), help="directory for the bundles")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    rows = read_rows(args.data, args.rows)
    for name, model in load_three(args.model, args.work).items():
        scores = score(model, tokenizer, rows)
        print(f"{name:<10} exact {scores['exact']:.4f}  F1 {scores['f1']:.4f}  on {len(rows)} questions")


if __name__ == "__main__":
    main()
