"""Replay Optimum's question answering tutorial: exact match, F1 and latency of vanilla, optimized and quantized models.

    python benchmarks/cpu/tutorial_qa.py MODEL --data xquad_en.jsonl --calibration qa_calibration.jsonl accuracy
    python benchmarks/cpu/tutorial_qa.py MODEL --data xquad_en.jsonl latency

`accuracy` builds and verifies, and may share the machine. `latency` needs an idle machine; the three models alternate
question by question. Both write into the same file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

sys.path.append(str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import question_answering as tutorial

from provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "tutorial_qa.json"


def main() -> None:
    """Run one part of the study and write it into the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("part", choices=("accuracy", "latency"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--calibration", type=Path, help="rows for calibration and the accuracy gate, disjoint from --data"
    )
    parser.add_argument("--rows", type=int, help="use the first N rows only (default: all; latency: 80)")
    parser.add_argument("--work", type=Path, default=Path("question-answering"))
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    results = json.loads(args.output.read_text()) if args.part == "latency" else {}
    rows = tutorial.read_rows(args.data, args.rows or (80 if args.part == "latency" else None))
    if args.part == "accuracy":
        # The gate uses other rows: those that are reported on take no part in the choice.
        models = tutorial.load_three(args.model, args.work, data=args.calibration, bench_budget_s=10.0, seq_len=128)
    else:
        models = tutorial.open_three(args.model, args.work)
    measured = accuracy(models, tokenizer, rows) if args.part == "accuracy" else latency(models, tokenizer, rows)
    variants = {name: getattr(model, "bundle", None) for name, model in models.items()}
    results |= {
        **provenance(),
        "model": Path(args.model).name,
        "data": args.data.name,
        "variants": {name: bundle.chosen.name if bundle else "torch-fp32" for name, bundle in variants.items()},
        args.part: measured,
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps(measured, indent=1))


def accuracy(models: dict[str, Any], tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return exact match and F1 of the three models."""
    return {"questions": len(rows)} | {name: tutorial.score(model, tokenizer, rows) for name, model in models.items()}


@torch.inference_mode()
def latency(models: dict[str, Any], tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Time the model without tokenization and span search, one question at a time, as in the tutorial."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    questions = [{name: tutorial.windows(tokenizer, row)[name] for name in names} for row in rows]
    times: dict[str, list[float]] = {name: [] for name in models}
    for index, inputs in enumerate([*questions[:3], *questions]):
        for name, model in models.items():
            begin = time.perf_counter()
            model(**inputs)
            if index >= 3:  # the first three warm up
                times[name].append((time.perf_counter() - begin) * 1e3)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["vanilla"], latencies, strict=True))
        for name, latencies in times.items()
    }
    return {
        "questions": len(rows),
        "tokens_p50": statistics.median(inputs["input_ids"].numel() for inputs in questions),
        **{
            name: {
                "p50_ms": round(statistics.median(latencies), 1),
                "p90_ms": round(statistics.quantiles(latencies, n=10)[-1], 1),
                "speedup_p50": round(ratios[name], 2),
            }
            for name, latencies in times.items()
        },
    }


if __name__ == "__main__":
    main()
