"""Optimum's question answering tutorial, with hasten: the same model vanilla, optimized and quantized.

    python examples/question_answering.py deepset/minilm-uncased-squad2 --data xquad.jsonl

Rows are {"question": …, "context": …, "answers": {"text": […]}}. All three are asked by the same few lines of PyTorch:
only where a model is loaded from differs. What comes out: exact match and F1 of each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

import hasten
from hasten.core import squad
from hasten.core.hardware import this_machine
from hasten.core.targets import target_of
from hasten.transformers import AutoModelForQuestionAnswering

LONGEST_ANSWER = 30


def load_three(model: str, work: Path, **options: Any) -> dict[str, Any]:
    """Vanilla is transformers' own module; the others are built, each proven to answer like it."""
    hasten.build(model, work / "optimized", level="O3", force=True, **options)
    hasten.build(model, work / "quantized", preset=target_of(this_machine()).name, force=True, **options)
    return open_three(model, work)


def open_three(model: str, work: Path) -> dict[str, Any]:
    return {
        "vanilla": transformers.AutoModelForQuestionAnswering.from_pretrained(model).eval(),
        "optimized": AutoModelForQuestionAnswering.from_pretrained(work / "optimized"),
        "quantized": AutoModelForQuestionAnswering.from_pretrained(work / "quantized"),
    }


def windows(tokenizer: Any, row: dict[str, Any]) -> Any:
    """A long context in several, 128 tokens of each in the next one too."""
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
    """The best span of all windows: any that lies in the context, begins before it ends and is not too long."""
    encoded = windows(tokenizer, row)
    inputs = {name: encoded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded}
    found = model(**inputs)
    best, text = -torch.inf, ""
    for place, offsets in enumerate(encoded["offset_mapping"]):
        outside = torch.tensor([part != 1 for part in encoded.sequence_ids(place)])
        scores = found.start_logits[place][:, None] + found.end_logits[place][None, :]
        scores = scores.masked_fill(outside[:, None] | outside[None, :], -torch.inf)
        scores = scores.triu().masked_fill(torch.ones_like(scores).triu() == 0, -torch.inf)
        scores = scores.masked_fill(torch.ones_like(scores).triu(LONGEST_ANSWER) == 1, -torch.inf)
        first, last = divmod(int(scores.argmax()), scores.shape[1])
        if scores[first, last] > best:
            best, text = scores[first, last], row["context"][offsets[first][0] : offsets[last][1]]
    return text


def score(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    answers = [answer(model, tokenizer, row) for row in rows]
    pairs = [(text, row["answers"]["text"]) for text, row in zip(answers, rows, strict=True)]
    return {
        "exact": sum(squad.best(squad.exact, text, rights) for text, rights in pairs) / len(rows),
        "f1": sum(squad.best(squad.f1, text, rights) for text, rights in pairs) / len(rows),
    }


def read_rows(file: Path, count: int | None = None) -> list[dict[str, Any]]:
    """Those that have an answer."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    return [row for row in rows if row["answers"]["text"]][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, help="only so many of them")
    parser.add_argument("--work", type=Path, default=Path("question-answering"), help="where the bundles go")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    rows = read_rows(args.data, args.rows)
    for name, model in load_three(args.model, args.work).items():
        found = score(model, tokenizer, rows)
        print(f"{name:<10} exact {found['exact']:.4f}  F1 {found['f1']:.4f}  on {len(rows)} questions")


if __name__ == "__main__":
    main()
