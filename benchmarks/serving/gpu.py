"""Measure latency and throughput over HTTP on a GPU: one client at 16 and 128 tokens, then 32 clients with mixed texts.

    python benchmarks/serving/gpu.py [--model DIR] [--tokenizer FILE] [--bundle DIR] [--variant fused-fp16@cuda]

DIR of a text classifier as Hugging Face saves it; the default is a model of MiniLM-L6's size with random weights, good
for speed only, with the vocabulary of FILE (the `tokenizer.json` of a BERT model) or a generated one. The same work in
process alternates with the server; the difference is the overhead. The single client repeats one text, whose words are
in the word cache; changes one word in every request; and sends texts of new words alone, each of which the tokenizer
splits into pieces. Clients with texts of mixed length send known words, then new ones. Without a GPU, --variant
onnxruntime-fp32 tests the script. Nothing else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import count, cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from clients import closed_loop
from contenders import RunningServer, hasten_server
from environments import provenance
from http_requests import json_format
from latency import UNTIMED, WORDS, Http, Interface, text_of_length, time_requests
from vocabulary import SPECIAL, UnseenTexts, word_piece_tokenizer

import hasten
from hasten.bundle import Bundle, open_bundle
from hasten.core.plan import Keep

HERE = Path(__file__).parent
# p50 in ms by text length in tokens.
TARGETS_MS = {16: 0.9, 128: 1.1}
MINILM_CONFIG = {
    "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
    "intermediate_size": 1536, "max_position_embeddings": 512,
}  # fmt: skip
BINARY, JSON, IN_PROCESS = "HTTP binary", "HTTP JSON", "in process"
UNSEEN_WORD, UNSEEN_TEXT = "HTTP JSON, unseen word", "HTTP JSON, unseen text"
# Lengths of the mixed texts are log-normal: most are sentences, some reach the model's limit.
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 30, 0.9, 500
WARM_UP = 200
WARM_UP_S = 3.0
# More than the server answers.
UNSEEN_TEXTS_PER_SECOND = 4000
_RECORDED = """
grpcio httptools msgspec numpy nvidia-ml-py onnxruntime tokenizers torch transformers triton uvloop
"""


def main() -> None:
    """Run the study, write its result file and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a text classifier (default: random weights)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for random weights (default: a generated one)")
    parser.add_argument("--bundle", type=Path, help="bundle of a text classifier, instead of building one")
    parser.add_argument("--variant", default="fused-fp16@cuda")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=300, help="requests per turn")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of mixed traffic")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "results" / "serving_gpu.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hasten-serving-") as work:
        model = args.model or make_model(Path(work, "model"), args.tokenizer)
        bundle = args.bundle or build(model, args.variant, Path(work, "bundle"))
        results = measure(bundle, args)
    args.output.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    report(results)


def make_model(folder: Path, tokenizer_file: Path | None, config: Mapping[str, int] = MINILM_CONFIG) -> Path:
    """Save a classifier with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**config, num_labels=2))
    model.save_pretrained(folder)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    backend = (
        {"tokenizer_file": str(tokenizer_file)} if tokenizer_file else {"tokenizer_object": word_piece_tokenizer()}
    )
    tokenizer = transformers.PreTrainedTokenizerFast(**backend, model_max_length=512, **names)
    tokenizer.save_pretrained(folder)
    return folder


def build(model: Path, variant: str, folder: Path) -> Path:
    """Build one variant, verified on a few rows: with random weights there is little to verify."""
    rows = folder.with_suffix(".jsonl")
    words = WORDS.split()
    texts = [" ".join((words * 8)[start : start + 2 + 3 * start]) for start in range(32)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"batch_size": (1, 4, 8), "seq_len": (16, 64, 128)}
    hasten.build(model, folder, variants=(variant,), data=rows, keep=Keep.ALL, bench_budget_s=1.0, **sizes)
    return folder


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Serve the bundle and measure both kinds of traffic."""
    bundle = open_bundle(path)
    contender = hasten_server(path, list(bundle.manifest.task.labels), "--variant", args.variant, "--no-grpc")
    with RunningServer(contender) as server:
        unseen = UnseenTexts(bundle)
        alone = [row for tokens in TARGETS_MS for row in time_single_client(server, bundle, unseen, tokens, args)]
        mixed = [
            time_mixed_traffic(server, texts, args.clients, args.seconds)
            for texts in mixed_texts(bundle, unseen, args.seconds)
        ]
        log = [line for line in server.log().splitlines() if "ready" in line]
    return {
        **provenance(),
        "versions": dict(_versions()),
        "model": str((args.model or args.bundle or Path("random weights of MiniLM-L6's size")).name),
        "vocabulary": {"pieces": unseen.pieces, "is_generated": not (args.model or args.bundle or args.tokenizer)},
        "is_word_cached": {BINARY: True, JSON: True, UNSEEN_WORD: "all but one", UNSEEN_TEXT: False},
        "variant": args.variant,
        "ready_s": server.ready_s,
        "log": log,
        "turns": args.turns,
        "requests": args.requests,
        "alone": alone,
        "mixed": mixed,
    }


def time_single_client(
    server: RunningServer, bundle: Bundle, unseen: UnseenTexts, tokens: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the latency of each interface for one client on a keep-alive connection."""
    text = text_of_length(bundle.path, tokens)
    binary, plain = server.contender.format.request(text), json_format().request(text)
    interfaces: list[Interface] = [
        Http(BINARY, IN_PROCESS, server.port, binary),
        Http(JSON, IN_PROCESS, server.port, plain),
        _UnseenWords(server.port, text),
        _UnseenTexts(server.port, unseen, tokens),
    ]
    times: dict[str, list[list[float]]] = {}
    with ExitStack() as stack:
        interfaces.append(stack.enter_context(work_in_process(bundle, args.variant, text)))
        for interface in interfaces:
            interface.time(WARM_UP)
        for turn in range(args.turns):
            for index in np.roll(np.arange(len(interfaces)), turn):
                interface = interfaces[index]
                times.setdefault(interface.name, []).append(interface.time(args.requests))
    base = np.median(times[IN_PROCESS], axis=1)
    for name, turns in times.items():
        latencies = np.concatenate(turns) * 1e3
        yield {
            "tokens": tokens,
            "contender": name,
            "p50_ms": float(np.median(latencies)),
            "p99_ms": float(np.percentile(latencies, 99)),
            "added_ms": float(np.median(np.median(turns, axis=1) - base)) * 1e3,
            "target_ms": TARGETS_MS[tokens] if name in (BINARY, JSON) else None,
            "turn_medians_ms": (np.median(turns, axis=1) * 1e3).tolist(),
        }


class _UnseenWords:
    """JSON over HTTP; the last word of the text changes in every request, its number of tokens hardly does."""

    name, base = UNSEEN_WORD, IN_PROCESS

    def __init__(self, port: int, text: str) -> None:
        self._port, self._numbers = port, count(10_000)
        self._rest = text.split()[:-1]

    def time(self, requests: int) -> list[float]:
        texts = [" ".join([*self._rest, f"{next(self._numbers)}"]) for _ in range(UNTIMED + requests)]
        return time_requests(self._port, [json_format().request(text) for text in texts])[UNTIMED:]


class _UnseenTexts:
    """JSON over HTTP; no word of a text was in a request before."""

    name, base = UNSEEN_TEXT, IN_PROCESS

    def __init__(self, port: int, texts: UnseenTexts, tokens: int) -> None:
        self._port, self._texts, self._tokens = port, texts, tokens

    def time(self, requests: int) -> list[float]:
        texts = self._texts.take([self._tokens] * (UNTIMED + requests))
        return time_requests(self._port, [json_format().request(text) for text in texts])[UNTIMED:]


class _InProcess:
    """The same work without a server, in its own process."""

    name = base = IN_PROCESS

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def time(self, requests: int) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))


@contextmanager
def work_in_process(bundle: Bundle, variant: str, text: str) -> Iterator[_InProcess]:
    """Start the process that does the work without a server."""
    command = [sys.executable, str(HERE / "in_process.py"), str(bundle.path), variant, "1", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline().split()[:1] != ["ready"]:
            raise SystemExit("in_process.py did not start")
        yield _InProcess(process)
        process.communicate()


def mixed_texts(bundle: Bundle, unseen: UnseenTexts, seconds: float) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield the kind and the texts of each run with mixed lengths."""
    random = np.random.default_rng(0)
    max_tokens = min(MAX_TOKENS, bundle.manifest.tokenizer.max_length)
    count = max(4096, int(UNSEEN_TEXTS_PER_SECOND * (seconds + WARM_UP_S)))
    tokens = np.clip(random.lognormal(np.log(MEDIAN_TOKENS), SIGMA, count), 5, max_tokens).astype(int).tolist()
    words = WORDS.split()
    yield "known words", cycle([" ".join(random.choice(words, size - 2)) for size in tokens[:4096]])
    # These are not repeated: the run ends when they run out.
    yield "unseen texts", iter(unseen.take(tokens))


def time_mixed_traffic(
    server: RunningServer, kind_and_texts: tuple[str, Iterator[str]], clients: int, seconds: float
) -> dict[str, Any]:
    """Return throughput and latency of closed-loop clients with texts of mixed length."""
    kind, texts = kind_and_texts
    request = server.contender.format.request
    stream = ((index, request(text)) for index, text in enumerate(texts))
    # Warm up: the first request of each shape is slower.
    closed_loop(server.port, stream, clients=clients, seconds=min(WARM_UP_S, seconds))
    before, begin = server.counters(), time.perf_counter()
    answers = closed_loop(server.port, stream, clients=clients, seconds=seconds)
    elapsed = time.perf_counter() - begin
    spent = {name: value - before.get(name, 0.0) for name, value in server.counters().items()}
    if answers.errors:
        raise SystemExit(f"the server answers {answers.errors[0]}")
    tokens, padding = spent["hasten_prompt_tokens_total"], spent["hasten_padding_tokens_total"]
    return {
        "texts": kind,
        "clients": clients,
        "seconds": elapsed,
        "per_second": answers.per_second,
        "tokens_per_second": tokens / elapsed,
        "p50_ms": answers.percentile_ms(50),
        "p99_ms": answers.percentile_ms(99),
        "client_share": answers.client_share,
        "rows_per_batch": spent["hasten_batch_rows_sum"] / spent["hasten_batch_rows_count"],
        "padding": padding / (tokens + padding),
        "compute_share": spent["hasten_compute_seconds_sum"] / elapsed,
        "gpu": {name: value for name, value in server.counters().items() if name.startswith("hasten_gpu")},
    }


def report(results: dict[str, Any]) -> None:
    """Print a summary of the results beside the targets."""
    print(f"{results['variant']}, ready after {results['ready_s']:.1f} s")
    print(*results["log"], sep="\n")
    for row in results["alone"]:
        target = row["target_ms"]
        verdict = "" if target is None else f"  target ≤ {target} ms: {'met' if row['p50_ms'] <= target else 'NOT met'}"
        times = f"p50 {row['p50_ms']:.3f} ms  p99 {row['p99_ms']:.3f} ms  overhead {row['added_ms']:.3f} ms"
        print(f"{row['tokens']:>4} tokens, {row['contender']:<23} {times}{verdict}")
    for mixed in results["mixed"]:
        print(
            f"{mixed['clients']} clients, mixed lengths, {mixed['texts']}: {mixed['per_second']:.0f} requests/s,"
            f" {mixed['tokens_per_second']:.0f} tokens/s, p50 {mixed['p50_ms']:.2f} ms, p99 {mixed['p99_ms']:.2f} ms,"
            f" {mixed['rows_per_batch']:.1f} rows per batch, padding {mixed['padding']:.1%},"
            f" sessions busy {mixed['compute_share']:.2f}, clients {mixed['client_share']:.2f}"
        )


def _versions() -> Iterator[tuple[str, str]]:
    for name in _RECORDED.split():
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


if __name__ == "__main__":
    main()
