"""Optimum's question answering tutorial replayed: exact match, F1 and latency of vanilla, optimized and quantized.

    python benchmarks/tutorial_qa.py MODEL --data xquad_en.jsonl --calibration qa_calibration.jsonl accuracy
    python benchmarks/tutorial_qa.py MODEL --data xquad_en.jsonl latency

The first builds and judges, and may share the machine; the second times, and may not: the three take turns question by
question. Both write into the same file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from origin import origin

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import question_answering as tutorial  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", choices=("accuracy", "latency"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="rows to quantize by and to gate on, none of the data's")
    parser.add_argument("--rows", type=int, help="only so many of them (latency: 80)")
    parser.add_argument("--work", type=Path, default=Path("question-answering"))
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "tutorial_qa.json")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    results = json.loads(args.output.read_text()) if args.what == "latency" else {}
    rows = tutorial.read_rows(args.data, args.rows or (80 if args.what == "latency" else None))
    if args.what == "accuracy":
        # Judged on rows of its own: those that are reported on choose nothing.
        models = tutorial.load_three(args.model, args.work, data=args.calibration, bench_budget_s=10.0, seq_len=128)
    else:
        models = tutorial.open_three(args.model, args.work)
    measured = accuracy(models, tokenizer, rows) if args.what == "accuracy" else latency(models, tokenizer, rows)
    variants = {name: getattr(model, "bundle", None) for name, model in models.items()}
    results |= {
        **origin(),
        "model": Path(args.model).name,
        "data": args.data.name,
        "variants": {name: bundle.chosen.name if bundle else "torch-fp32" for name, bundle in variants.items()},
        args.what: measured,
    }
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps(measured, indent=1))


def accuracy(models: dict[str, Any], tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"questions": len(rows)} | {name: tutorial.score(model, tokenizer, rows) for name, model in models.items()}


@torch.inference_mode()
def latency(models: dict[str, Any], tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the model alone, one question at a time, as in the tutorial; tokens and spans cost the same for all three."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    asked = [{name: tutorial.windows(tokenizer, row)[name] for name in names} for row in rows]
    times: dict[str, list[float]] = {name: [] for name in models}
    for place, inputs in enumerate([*asked[:3], *asked]):
        for name, model in models.items():
            begin = time.perf_counter()
            model(**inputs)
            if place >= 3:  # the first few warm up
                times[name].append((time.perf_counter() - begin) * 1e3)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times["vanilla"], own, strict=True))
        for name, own in times.items()
    }
    return {
        "questions": len(rows),
        "tokens_p50": statistics.median(inputs["input_ids"].numel() for inputs in asked),
        **{
            name: {
                "p50_ms": round(statistics.median(own), 1),
                "p90_ms": round(statistics.quantiles(own, n=10)[-1], 1),
                "speedup_p50": round(ratios[name], 2),
            }
            for name, own in times.items()
        },
    }


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
